"""Exchanges by one-sided puts: a rank writes its rows into the other ranks' windows and counts them there.

Nobody posts a receive, and between a start and the wait for it no code of the receiver runs (arXiv
2512.19342, section III-C). Puts, waits and copies are compiled (`numba_puts`).

The paper has as many receive buffers as exchanges in flight, and there a fast rank can overwrite rows that a
slow one has not read: a rank that has completed exchange j knows that all others have *started* j, not that
they have completed it. Twice as many slots, S = 2 (k + 1), make every put safe without a message in return.
Exchange j uses slot j mod S, whose last rows are those of exchange j - 2 (k + 1)::

    p starts j           so p has completed j - (k + 1), and has seen a put of it from each rank q
    q started j - (k+1)  so q has completed, and read, j - 2 (k + 1)
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..watch import RankDiedError
from . import numba_puts
from .checks import capacity_problem, disagreement
from .messages import EAGER, HEADER, UNKNOWN, Deadline, Header, buffer_size
from .transport import Disagreement, Exchange, others
from .window import (
    DIED,
    DISAGREED,
    END,
    FAILED_LENGTH,
    FAILED_STATE,
    FAILED_TEXT,
    TEXT_BYTES,
    Layout,
    Process,
    Segment,
    Window,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SLICE = 0.05
"""Seconds of a compiled wait; between two of them the other processes are looked at, and signals handled."""


def slots(bound: int) -> int:
    """S, places for the exchanges of a rank; see the top of this file."""
    return 2 * (bound + 1)


class SharedMemory:
    """A `Transport` between processes of one host.

    Args:
        rank, world_size, bound, capacity: as of `BoundedLagAllToAll`.

    A room holds `capacity` bytes, or `messages.EAGER`. A message that is larger, which only an exchange with
    known sizes has, gets a larger room at the end of the receiver's window; its sender adds it.
    """

    def __init__(self, rank: int, world_size: int, bound: int, capacity: int):
        self.rank, self.world_size, self.capacity = rank, world_size, capacity
        self._others = others(rank, world_size)
        self._most = buffer_size(max(EAGER, capacity))
        self._slots = slots(bound)
        self.layout = Layout(world_size, self._slots, self._most)
        self.window = Window.make(self.layout)
        self._windows: list[Window] = []
        self._processes: list[Process] = []
        self._scratch = np.zeros(4, np.int64)
        self._counts = np.zeros(world_size, np.int64)

    def open(self, names: Sequence[tuple[int, int, int]]) -> None:
        """Open the windows of all ranks by their names. Raises RankDiedError naming one that cannot be."""
        for peer, name in enumerate(names):
            try:
                self._windows.append(self.window if peer == self.rank else Window.open(self.layout, name))
                self._processes.append(Process(name[0]))
            except OSError as error:
                raise RankDiedError(
                    f"rank {peer} is gone, or its memory cannot be opened: {error}; "
                    'transport="messages" needs no shared memory'
                ) from error
        layout, ranks = self.layout, range(self.world_size)
        addresses = [window.address for window in self._windows]
        self._addresses = np.array(addresses, np.int64)
        # Of each slot and rank: where this rank's rows go, how many bytes fit, where the others' rows lie.
        self._heads_to = np.array(
            [[at + layout.head(slot, self.rank) for at in addresses] for slot in range(self._slots)]
        )
        self._heads = np.array(
            [
                [addresses[self.rank] + layout.head(slot, peer) for peer in ranks]
                for slot in range(self._slots)
            ]
        )
        self._offsets_to = np.array(
            [[layout.first_rows(slot, self.rank)] * self.world_size for slot in range(self._slots)]
        )
        self._rows_to = self._addresses + self._offsets_to
        self._rooms = np.full((self._slots, self.world_size), layout.room)
        self._offsets = np.array(
            [[layout.first_rows(slot, peer) for peer in ranks] for slot in range(self._slots)]
        )
        self._rows = self.window.address + self._offsets
        self._added: dict[tuple[str, int, int], Segment] = {}

    @property
    def buffer_bytes(self) -> int:
        return int(self.window.control.words(END, 1)[0])

    def begin(self, number: int, deadline: Deadline) -> None:
        """Nothing to wait for: see the top of this file."""

    def post(self, exchange: Exchange, values: torch.Tensor) -> None:
        slot = exchange.number % self._slots
        rows = values.detach().resolve_conj().resolve_neg().contiguous().cpu()
        row_bytes = exchange.layout.row_bytes
        sends = np.array(exchange.send, np.int64)
        starts = np.zeros(self.world_size + 1, np.int64)
        np.cumsum(sends * row_bytes, out=starts[1:])
        if (np.diff(starts) > self._rooms[slot]).any():
            self._add_rooms(slot, np.diff(starts))
        targets = self._rows_to[slot]
        expects = self._expected(exchange)
        numba_puts.put(
            self.rank, self._addresses, self._heads_to[slot], targets, rows.data_ptr(), starts,
            self._words(exchange), sends, expects, self._offsets_to[slot], slot,
        )  # fmt: skip

    def _words(self, exchange: Exchange) -> np.ndarray:
        """What `numba_puts` takes of a header that is the same for all ranks."""
        header = Header.of(exchange.number, 0, exchange.layout, UNKNOWN)
        return np.array([header.number, header.width, *header.dtype], np.int64)

    def _expected(self, exchange: Exchange) -> np.ndarray:
        if exchange.receive is None:
            return np.full(self.world_size, UNKNOWN, np.int64)
        return np.array(exchange.receive, np.int64)

    def _add_rooms(self, slot: int, sizes: np.ndarray) -> None:
        """Make room for `sizes` (W,) bytes in the windows where they do not fit."""
        for peer in np.flatnonzero(sizes > self._rooms[slot]).tolist():
            size = buffer_size(int(sizes[peer]))
            offset = numba_puts.add(self._windows[peer].address + END, size)
            try:
                segment = self._windows[peer].add_room(offset, size)
            except OSError as error:
                raise MemoryError(
                    f"no shared memory for a message of {sizes[peer]} bytes to rank {peer}: {error}"
                ) from error
            self._added["to", slot, peer] = segment
            self._rooms[slot, peer] = size
            self._offsets_to[slot, peer] = offset
            self._rows_to[slot, peer] = segment.address

    def finish(self, exchange: Exchange, deadline: Deadline) -> torch.Tensor:
        slot = exchange.number % self._slots
        row_bytes, words = exchange.layout.row_bytes, self._words(exchange)
        sent, expected = np.array(exchange.send, np.int64), self._expected(exchange)
        self._wait(exchange, deadline)
        while True:
            peer = numba_puts.compare(
                self.rank, self._heads[slot], words, row_bytes, self._most, sent, expected,
                self._offsets[slot], self._counts,
            )  # fmt: skip
            if peer < 0:
                break
            self._look(exchange, peer, slot)
        exchange.counts = self._counts.tolist()
        values = exchange.make_out(self.rank)
        host = values if values.device.type == "cpu" else torch.empty_like(values, device="cpu")
        numba_puts.take(host.data_ptr(), self._rows[slot], self._counts, row_bytes)
        if host is not values:
            values.copy_(host)
        return values

    def _wait(self, exchange: Exchange, deadline: Deadline) -> None:
        number, slot = exchange.number, exchange.number % self._slots
        target = (number // self._slots + 1) * self.world_size
        while True:
            seconds = min(deadline.left.total_seconds(), SLICE)
            outcome = numba_puts.wait_for(
                self.window.address, slot, target, int(seconds * 1e9), self._scratch.ctypes.data
            )
            if outcome == numba_puts.ALL_HERE:
                return
            if outcome == numba_puts.FAILED:
                for peer in self._others:
                    if self._number(slot, peer) == number:
                        self._check(exchange, peer, slot)  # this rank's own words come before the others'
                self._raise_failure()
            is_over = deadline.is_over
            ended = [process.has_ended for process in self._processes]
            numba_puts.started(self._addresses, self._counts)
            for peer in self._others:
                if self._number(slot, peer) == number:
                    continue
                if self._counts[peer] > number + 1:
                    raise Disagreement(
                        f"rank {peer} sent all-to-all {self._counts[peer] - 1} and rank {self.rank} expects "
                        f"{number}: all ranks have to run the same exchanges"
                    )
                if ended[peer]:
                    raise RankDiedError(f"rank {peer} is gone in exchange {number}: its process has ended")
                if is_over:
                    raise RankDiedError(deadline.stalled(peer, number))

    def _number(self, slot: int, peer: int) -> int:
        """Exchange of the last put of a rank into a slot, or `messages.NO_MESSAGE`."""
        return int(self.window.control.words(self.layout.head(slot, peer), 1)[0])

    def _check(self, exchange: Exchange, peer: int, slot: int) -> tuple[int, int]:
        """Rows of a header, and where they are; raises Disagreement where it is not as expected."""
        words = self.window.control.words(self.layout.head(slot, peer), HEADER // 8)
        header = Header.of_words(words)
        expected = UNKNOWN if exchange.receive is None else exchange.receive[peer]
        sent = exchange.send[peer]
        problem = disagreement(header, peer, self.rank, exchange.number, exchange.layout, sent, expected)
        problem = problem or capacity_problem(
            header, peer, self.rank, exchange, sent, expected, self.capacity, self._most
        )
        if problem:
            raise Disagreement(problem)
        return header.rows, int(words[6])

    def _look(self, exchange: Exchange, peer: int, slot: int) -> None:
        """Raise for a header that is not as expected, or map the room that its sender has added."""
        rows, offset = self._check(exchange, peer, slot)
        segment = self.window.room(offset, buffer_size(exchange.size(rows)))
        self._added["from", slot, peer] = segment
        self._offsets[slot, peer], self._rows[slot, peer] = offset, segment.address

    def _raise_failure(self) -> None:
        kind, length = (int(self.window.control.words(at, 1)[0]) for at in (FAILED_STATE, FAILED_LENGTH))
        text = bytes(self.window.control.memory[FAILED_TEXT : FAILED_TEXT + length]).decode(errors="replace")
        raise RankDiedError(text) if kind == DIED else RuntimeError(text)

    def started(self, number: int, in_flight: int) -> list[int]:
        """As the other ranks say in their windows, exactly."""
        numba_puts.started(self._addresses, self._counts)
        return self._counts.tolist()

    def drain(self, number: int, deadline: Deadline) -> None:
        """Nothing to wait for: a put is complete when it returns, in memory that its receiver keeps."""

    def report(self, number: int, problem: str, died: bool) -> None:
        prefix = f"rank {self.rank} gave up: " if died else ""
        text = (prefix + problem).encode()[:TEXT_BYTES]
        buffer = ctypes.create_string_buffer(text, TEXT_BYTES)
        for peer in self._others:
            numba_puts.report(
                self._windows[peer].address, DIED if died else DISAGREED, ctypes.addressof(buffer), len(text)
            )
