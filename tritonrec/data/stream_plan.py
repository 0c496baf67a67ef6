"""Which rows of a dataset make the batch of a step: a function of the row groups' sizes, seed and step.

An epoch's rows are those of its row groups in a shuffled order. V logical readers have equal stretches of
them, one after another, whatever the world size; the ranks divide the readers. Sample i of an epoch comes
from the reader at place ``i % V`` of an order in which neighbours are far apart (bits reversed, as in van der
Corput's sequence), so a batch takes about as much from every rank. 4 readers, 11 rows, batches of 4 samples,
2 ranks::

    row groups, shuffled    [ c c c c c | a a a | b b b ]
    reader                    0 0 0   1 1 1   2 2 2   3 3
    rank                      0 0 0   0 0 0   1 1 1   1 1
    sample i                  0 4 8   2 6 10  1 5 9   3 7        order of the readers: 0, 2, 1, 3
    batch                     0 1 2   0 1 2   0 1 2   0 1

A reader's stretch is cut into blocks of ``buffer_rows / V`` rows, and the rows of a block are shuffled: that
is the shuffle buffer. The first blocks differ in length, so that readers do not begin new blocks all at once.

MosaicML's StreamingDataset has the same idea (canonical nodes and shuffle blocks), as have EasyScale's
logical workers. Dimensions: G row groups, N rows, V readers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from tritonrec.data.epochs import check_at_least
from tritonrec.kernels.launch import random_indices

GROUPS, ROWS = 2, 3
"""Streams of the counter-based generator, beside those of `epochs`."""


class Stretch(NamedTuple):
    """Rows [first, last) of a row group."""

    group: int
    first: int
    last: int


@dataclass(frozen=True)
class StreamPlan:
    """The plan of a stream.

    Args:
        group_rows: (G,) int64, each at least 1. batch_size: samples of a global batch; the last batch of an
            epoch may have fewer. seed: int64, of the order.
        shuffle: False: row groups and rows in their own order.
        buffer_rows: rows that are shuffled together, all readers' blocks in all.
        readers: V, a power of two.

    Raises ValueError for a number out of range.
    """

    group_rows: np.ndarray
    batch_size: int
    seed: int
    shuffle: bool = True
    buffer_rows: int = 1 << 18
    readers: int = 64
    _recent: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        for name in ("batch_size", "buffer_rows", "readers"):
            check_at_least(name, getattr(self, name), 1)
        if self.readers & (self.readers - 1):
            raise ValueError(f"readers must be a power of two, got {self.readers}")

    @cached_property
    def num_rows(self) -> int:
        """N."""
        return int(self.group_rows.sum())

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, the incomplete last one included."""
        return -(-self.num_rows // self.batch_size)

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return max(self.buffer_rows // self.readers, 1)

    @property
    def divided(self) -> np.ndarray:
        """Row groups that have more rows than a reader's stretch, by number."""
        return np.flatnonzero(self.group_rows * self.readers > self.num_rows)

    def num_samples(self, step: int) -> int:
        """Samples of the global batch."""
        first, last = self._samples(step)[1:]
        return last - first

    def readers_of(self, rank: int, world_size: int) -> range:
        """The readers of a rank. Raises ValueError for more ranks than readers."""
        check_at_least("world_size", world_size, 1)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        if world_size > self.readers:
            raise ValueError(
                f"{world_size} ranks cannot divide {self.readers} readers: set readers to a power of two of "
                "at least the number of ranks; it changes the order of the samples"
            )
        return range(rank * self.readers // world_size, (rank + 1) * self.readers // world_size)

    def parts(self, step: int) -> tuple[int, list[int], list[int]]:
        """Epoch, and of each reader the places [first, last) in its stretch of the step's samples."""
        epoch, *ends = self._samples(step)
        first, last = (self._before(end).tolist() for end in ends)
        return epoch, first, last

    def block(self, reader: int, place: int) -> tuple[int, int]:
        """The block [first, last) in the reader's stretch that has the row at `place`."""
        size = self.block_rows
        # The first block has 1 / V, ..., V / V of a block's rows, by the reader's place in the order.
        head = max(size * (self._places[reader] + 1) // self.readers, 1)
        number = -1 if place < head else (place - head) // size
        first = 0 if number < 0 else head + number * size
        last = head if number < 0 else first + size
        return first, min(last, self._starts[reader + 1] - self._starts[reader])

    def rows(self, epoch: int, reader: int, first: int, last: int) -> list[Stretch]:
        """The rows at [first, last) of a reader's stretch, before a block's shuffle."""
        order, ends = self._groups(epoch)
        at, stop = self._starts[reader] + first, self._starts[reader] + last
        found = []
        while at < stop:
            number = bisect_right(ends, at)
            begin = int(ends[number] - self.group_rows[order[number]])
            end = min(stop, int(ends[number]))
            found.append(Stretch(int(order[number]), at - begin, end - begin))
            at = end
        return found

    def shuffled(self, epoch: int, numbers: np.ndarray) -> np.ndarray:
        """(n,) int64: places of a block's rows, whose numbers are (n,), by a random word of each."""
        if not self.shuffle:
            return np.arange(len(numbers))
        return self._order(ROWS, epoch, torch.from_numpy(numbers))

    def _samples(self, step: int) -> tuple[int, int, int]:
        """Epoch, and the samples [first, last) of it."""
        check_at_least("step", step, 0)
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        return epoch, first, min(first + self.batch_size, self.num_rows)

    @cached_property
    def _places(self) -> list[int]:
        """Of each reader in the order of samples: its bits reversed."""
        bits = self.readers.bit_length() - 1
        return [int(f"{reader:0{bits}b}"[::-1], 2) if bits else 0 for reader in range(self.readers)]

    def _before(self, sample: int) -> np.ndarray:
        """(V,) int64: samples below `sample` of each reader."""
        return np.maximum(-((np.array(self._places) - sample) // self.readers), 0)

    @cached_property
    def _starts(self) -> list[int]:
        """Where the stretch of each reader begins, and the last one ends (V + 1)."""
        return [0, *np.cumsum(self._before(self.num_rows)).tolist()]

    def _groups(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of row groups (G,), and the ends of their rows in it (G,)."""
        for known, order, ends in self._recent:
            if known == epoch:
                return order, ends
        order = np.arange(len(self.group_rows))
        if self.shuffle:
            order = self._order(GROUPS, epoch, torch.from_numpy(order))
        ends = np.cumsum(self.group_rows[order])
        self._recent[:] = [*self._recent[-1:], (epoch, order, ends)]
        return order, ends

    def _order(self, stream: int, epoch: int, ids: torch.Tensor) -> np.ndarray:
        words = random_indices(self.seed, stream, epoch, ids, torch.zeros_like(ids), 1, 2**32)
        # A word is below 2**32: with its place it is one integer, which sorts faster than in a stable sort.
        return np.sort(words[:, 0].numpy() << 31 | np.arange(len(ids))) & (2**31 - 1)
