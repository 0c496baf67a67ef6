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

import numpy as np
import torch

from ...distributed.watch import RankDiedError
from . import numba_puts
from .checks import check_header
from .messages import EAGER, HEADER, UNKNOWN, Deadline, Header, buffer_size
from .transport import Disagreement, Exchange, others
from .window import DIED, END, FAILED_LENGTH, FAILED_STATE, FAILED_TEXT, TEXT_BYTES, Layout

SLICE = 0.05
"""Seconds of a compiled wait; between two of them the other processes are looked at, and signals handled."""


def slots(bound: int) -> int:
    """S, places for the exchanges of a rank; see the top of this file."""
    return 2 * (bound + 1)


class OneSided:
    """The part of a `Transport` by one-sided puts that reads this rank's own window.

    Args:
        rank, world_size, bound, capacity: as of `BoundedLagAllToAll`.

    A room holds `capacity` bytes, or `messages.EAGER`.
    """

    def __init__(self, rank: int, world_size: int, bound: int, capacity: int):
        self.rank, self.world_size, self.capacity = rank, world_size, capacity
        self._others = others(rank, world_size)
        self._most = buffer_size(max(EAGER, capacity))
        self._slots = slots(bound)
        self.layout = Layout(world_size, self._slots, self._most)
        self._counts = np.zeros(world_size, np.int64)

    def _place(self, address: int) -> None:
        """Note where this rank's window lies in memory, and so the others' headers and rows."""
        layout, places = (
            self.layout,
            [(slot, peer) for slot in range(self._slots) for peer in range(self.world_size)],
        )
        shape = (self._slots, self.world_size)
        self._address = address
        self._heads = address + np.array([layout.head(*place) for place in places]).reshape(shape)
        self._offsets = np.array([layout.first_rows(*place) for place in places]).reshape(shape)
        self._rows = address + self._offsets

    def words(self, offset: int, count: int) -> np.ndarray:
        """A view of `count` int64 of this rank's window."""
        raise NotImplementedError

    def started(self, number: int, in_flight: int) -> list[int]:
        raise NotImplementedError

    def _await(self, slot: int, target: int, seconds: float) -> int:
        """One of the outcomes of `numba_puts.wait_for`."""
        raise NotImplementedError

    def _has_ended(self, peer: int) -> bool:
        """Whether the process of a rank has ended."""
        raise NotImplementedError

    def _map(self, slot: int, peer: int, offset: int, size: int) -> int:
        """Address of a room that another rank has added to this window."""
        raise NotImplementedError

    @property
    def buffer_bytes(self) -> int:
        return int(self.words(END, 1)[0])

    def begin(self, number: int, deadline: Deadline) -> None:
        """Nothing to wait for: see the top of this file."""

    def drain(self, number: int, deadline: Deadline) -> None:
        """Nothing to wait for: a put is complete when it returns, in memory that its receiver keeps."""

    def _words(self, exchange: Exchange) -> np.ndarray:
        """What `numba_puts` takes of a header that is the same for all ranks."""
        header = Header.of(exchange.number, 0, exchange.layout, UNKNOWN)
        return np.array([header.number, header.width, *header.dtype], np.int64)

    def _expected(self, exchange: Exchange) -> np.ndarray:
        if exchange.receive is None:
            return np.full(self.world_size, UNKNOWN, np.int64)
        return np.array(exchange.receive, np.int64)

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
        # ARRIVED counts from the first exchange on: a slot that
        # was used u times before is full at (u + 1) W puts.
        target = (number // self._slots + 1) * self.world_size
        while True:
            seconds = min(deadline.left.total_seconds(), SLICE)
            outcome = self._await(slot, target, seconds)
            if outcome == numba_puts.ALL_HERE:
                return
            if outcome == numba_puts.FAILED:
                for peer in self._others:
                    if self._number(slot, peer) == number:
                        self._check(exchange, peer, slot)  # this rank's own words come before the others'
                self._raise_failure()
            # Looked at before the ranks' starts are read: a put that came in between is still found.
            is_over = deadline.is_over
            ended = [self._has_ended(peer) for peer in range(self.world_size)]
            starts = self.started(number, 0)
            for peer in self._others:
                if self._number(slot, peer) == number:
                    continue
                if starts[peer] > number + 1:
                    raise Disagreement(
                        f"rank {peer} sent all-to-all {starts[peer] - 1} and rank {self.rank} expects "
                        f"{number}: all ranks have to run the same exchanges"
                    )
                if ended[peer]:
                    raise RankDiedError(f"rank {peer} is gone in exchange {number}: its process has ended")
                if is_over:
                    raise RankDiedError(deadline.stalled(peer, number))

    def _number(self, slot: int, peer: int) -> int:
        """Exchange of the last put of a rank into a slot, or `messages.NO_MESSAGE`."""
        return int(self.words(self.layout.head(slot, peer), 1)[0])

    def _check(self, exchange: Exchange, peer: int, slot: int) -> tuple[int, int]:
        """Rows of a header, and where they are; raises Disagreement where it is not as expected."""
        words = self.words(self.layout.head(slot, peer), HEADER // 8)
        header = Header.of_words(words)
        check_header(header, exchange, peer, self.rank, self.capacity, self._most)
        return header.rows, int(words[6])

    def _look(self, exchange: Exchange, peer: int, slot: int) -> None:
        """Raise for a header that is not as expected, or map the room that its sender has added."""
        rows, offset = self._check(exchange, peer, slot)
        self._rows[slot, peer] = self._map(slot, peer, offset, buffer_size(exchange.size(rows)))
        self._offsets[slot, peer] = offset

    def _raise_failure(self) -> None:
        kind, length = (int(self.words(at, 1)[0]) for at in (FAILED_STATE, FAILED_LENGTH))
        text = self.words(FAILED_TEXT, TEXT_BYTES // 8).tobytes()[:length].decode(errors="replace")
        raise RankDiedError(text) if kind == DIED else RuntimeError(text)

    def _told(self, problem: str, died: bool) -> bytes:
        """A failure as the other ranks read it."""
        prefix = f"rank {self.rank} gave up: " if died else ""
        return (prefix + problem).encode()[:TEXT_BYTES]
