"""Exchanges by one-sided puts of MPI, also between hosts: windows with passive targets (MPI-3, chapter 11).

The windows have the layout of `window`, in memory that MPI has allocated. A put of rows and header is
flushed, and then the arrival counter is incremented atomically. The target takes no part, except that some
MPI libraries move messages of other hosts only inside of calls: a waiting rank makes one between two looks.
Rooms do not grow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from . import numba_puts
from .messages import HEADER, NO_MESSAGE, Header
from .one_sided import OneSided
from .transport import Exchange
from .window import (
    ARRIVED,
    DIED,
    DISAGREED,
    END,
    FAILED_CLAIMS,
    FAILED_LENGTH,
    FAILED_STATE,
    FAILED_TEXT,
    LINE,
    TEXT_BYTES,
)

NAP = 50e-6
"""Seconds between two looks of a rank that waits."""


def number_of_rank() -> int:
    """This process among those that mpiexec started. Raises ValueError without mpi4py or other ranks."""
    if find_spec("mpi4py") is not None:
        from mpi4py import MPI

        if MPI.COMM_WORLD.size > 1:
            return MPI.COMM_WORLD.rank
    raise ValueError('transport="mpi" needs mpi4py, and ranks that mpiexec has started')


def place_among(world_size: int) -> int:
    """This process's rank in MPI's world of as many processes.

    -1 where mpi4py is of another MPI than mpiexec, and so sees no other process.
    """
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank if MPI.COMM_WORLD.size == world_size else -1


class MpiWindows(OneSided):
    """A `Transport` between ranks that mpiexec has started.

    Args:
        numbers: (W,) of the ranks in MPI's world, in the order of the group. The others as of
            `BoundedLagAllToAll`. All ranks of the group make it together.

    A window is kept until the process ends: all ranks would have to free it together, also after an error.
    """

    name = "mpi"

    def __init__(self, numbers: Sequence[int], rank: int, bound: int, capacity: int):
        from mpi4py import MPI

        super().__init__(rank, len(numbers), bound, capacity)
        world = MPI.COMM_WORLD
        self._mpi: Any = MPI
        self._group = world.Create_group(world.group.Incl(numbers))
        self._window = MPI.Win.Allocate(self.layout.end, 1, comm=self._group)
        self._memory = np.frombuffer(self._window.tomemory(), np.uint8)
        self._memory[:] = 0
        heads = self.words(self.layout.heads, self.layout.slots * self.world_size * HEADER // 8)
        heads[:: HEADER // 8] = NO_MESSAGE
        self.words(END, 1)[0] = self.layout.end
        self._group.Barrier()
        self._window.Lock_all()
        self._place(int(self._memory.ctypes.data))

    def words(self, offset: int, count: int) -> np.ndarray:
        return self._memory[offset : offset + 8 * count].view(np.int64)

    def post(self, exchange: Exchange, values: torch.Tensor) -> None:
        slot, layout = exchange.number % self._slots, self.layout
        rows = values.detach().resolve_conj().resolve_neg().contiguous().cpu()
        flat = rows.view(-1).view(torch.uint8).numpy()
        largest = max(map(exchange.size, exchange.send))
        if largest > layout.room:
            raise ValueError(
                f"a message of {largest} bytes does not fit a room of {layout.room}: MPI needs a capacity as "
                'large, on all ranks; transport="messages" does not'
            )
        at = np.cumsum([0, *map(exchange.size, exchange.send)]).tolist()
        expects = self._expected(exchange).tolist()
        heads = np.zeros((self.world_size, HEADER // 8), np.int64)
        for peer in (*self._others, self.rank):
            header = Header.of(exchange.number, exchange.send[peer], exchange.layout, expects[peer])
            heads[peer, :7] = *header[:4], *header.dtype, layout.first_rows(slot, self.rank)
            if at[peer] < at[peer + 1]:
                self._put(flat[at[peer] : at[peer + 1]], peer, layout.first_rows(slot, self.rank))
            self._put(heads[peer].view(np.uint8), peer, layout.head(slot, self.rank))
        self._window.Flush_all()  # before arrivals are counted
        mpi, one, place = self._mpi, np.ones(1, np.int64), ARRIVED + LINE * slot
        for peer in range(self.world_size):
            self._window.Accumulate([one, mpi.INT64_T], peer, (place, 1, mpi.INT64_T), mpi.SUM)
        self._window.Flush_all()

    def _put(self, data: np.ndarray, peer: int, place: int) -> None:
        byte = self._mpi.BYTE
        self._window.Put([data, len(data), byte], peer, (place, len(data), byte))

    def _add(self, peer: int, place: int) -> int:
        """Add 1 to a word of a window; its earlier value."""
        mpi, one, before = self._mpi, np.ones(1, np.int64), np.zeros(1, np.int64)
        self._window.Fetch_and_op([one, mpi.INT64_T], [before, mpi.INT64_T], peer, place, mpi.SUM)
        self._window.Flush(peer)
        return int(before[0])

    def _await(self, slot: int, target: int, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while True:
            self._group.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)
            self._window.Sync()
            outcome = numba_puts.look(self._address, slot, target)
            if outcome != numba_puts.OVER or time.monotonic() > deadline:
                return outcome
            time.sleep(NAP)

    def _has_ended(self, peer: int) -> bool:
        return False  # mpiexec ends all ranks with one of them

    def started(self, number: int, in_flight: int) -> list[int]:
        """From the headers that have arrived: a lag may be reported too large, never too small."""
        counts = [number] * self.world_size
        for peer in self._others:
            counts[peer] = number - in_flight
            while counts[peer] < number and self._number(counts[peer] % self._slots, peer) == counts[peer]:
                counts[peer] += 1
        return counts

    def report(self, number: int, problem: str, died: bool) -> None:
        text = np.frombuffer(self._told(problem, died)[:TEXT_BYTES], np.uint8).copy()
        for peer in self._others:
            if self._add(peer, FAILED_CLAIMS) == 0:
                self._put(text, peer, FAILED_TEXT)
                # Text, length, state, flushed one after the other:
                # a rank that sees the state finds the text whole.
                for place, word in ((FAILED_LENGTH, len(text)), (FAILED_STATE, DIED if died else DISAGREED)):
                    self._window.Flush(peer)
                    self._put(np.array([word], np.int64).view(np.uint8), peer, place)
                self._window.Flush(peer)
