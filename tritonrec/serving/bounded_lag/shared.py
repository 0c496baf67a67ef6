"""One-sided puts between processes of one host, into windows that each can write to (`window`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ...distributed.watch import RankDiedError
from . import numba_puts
from .messages import buffer_size
from .one_sided import OneSided
from .transport import Exchange
from .window import DIED, DISAGREED, END, TEXT_BYTES, Process, Segment, Window


class SharedMemory(OneSided):
    """A `Transport` between processes of one host.

    A message that is larger than its room, which only an exchange with known sizes has, gets a larger room at
    the end of the receiver's window; its sender adds it.
    """

    name = "shared"

    def __init__(self, rank: int, world_size: int, bound: int, capacity: int):
        super().__init__(rank, world_size, bound, capacity)
        self.window = Window.make(self.layout)
        self._windows: list[Window] = []
        self._processes: list[Process] = []
        self._scratch = np.zeros(4, np.int64)

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
        self._place(self.window.address)
        layout = self.layout
        self._addresses = np.array([window.address for window in self._windows], np.int64)
        # Of each slot and rank: where this rank's header and rows go, and how many bytes fit.
        self._heads_to = self._addresses + np.array(
            [[layout.head(slot, self.rank)] for slot in range(self._slots)]
        )
        self._offsets_to = np.array(
            [[layout.first_rows(slot, self.rank)] * self.world_size for slot in range(self._slots)]
        )
        self._rows_to = self._addresses + self._offsets_to
        self._rooms = np.full((self._slots, self.world_size), layout.room)
        self._added: dict[tuple[str, int, int], Segment] = {}

    def words(self, offset: int, count: int) -> np.ndarray:
        return self.window.control.words(offset, count)

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

    def _add_rooms(self, slot: int, sizes: np.ndarray) -> None:
        """Make room for `sizes` (W,) bytes in the windows where they do not fit."""
        for peer in np.flatnonzero(sizes > self._rooms[slot]).tolist():
            # A power of two above the room, which is 64 KiB or more: offsets stay multiples of a page, as
            # mmap needs.
            size = buffer_size(int(sizes[peer]))
            # The end moves by an atomic addition: several senders may add room to one window at a time.
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

    def _map(self, slot: int, peer: int, offset: int, size: int) -> int:
        self._added["from", slot, peer] = segment = self.window.room(offset, size)
        return segment.address

    def _await(self, slot: int, target: int, seconds: float) -> int:
        return numba_puts.wait_for(self._address, slot, target, int(seconds * 1e9), self._scratch.ctypes.data)

    def _has_ended(self, peer: int) -> bool:
        return self._processes[peer].has_ended

    def started(self, number: int, in_flight: int) -> list[int]:
        """As the other ranks say in their windows, exactly."""
        numba_puts.started(self._addresses, self._counts)
        return self._counts.tolist()

    def report(self, number: int, problem: str, died: bool) -> None:
        text = self._told(problem, died)
        buffer = ctypes.create_string_buffer(text, TEXT_BYTES)
        for peer in self._others:
            numba_puts.report(
                self._windows[peer].address, DIED if died else DISAGREED, ctypes.addressof(buffer), len(text)
            )
