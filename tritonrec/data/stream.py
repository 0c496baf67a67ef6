"""Batches streamed from Parquet shards: a rank reads its part only, and keeps a shuffle buffer of it.

The global batch of a step is a function of (data, seed, step), not of the world size (`stream_plan`), so a
run goes on with the same bits at another one. A position is a step. Reading happens where the batches are
pulled: in the trainer's ``prefetch`` lane, with the slices ``read``, ``decode`` and ``collate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.epochs import BatchType, Endless, check_same
from tritonrec.data.slices import work
from tritonrec.data.stream_plan import StreamPlan
from tritonrec.settings import counts_of, typed

if TYPE_CHECKING:
    import pyarrow as pa

    from tritonrec.data.parquet_rows import ParquetRows, ReadCounts, RowReader

Rows: TypeAlias = "pa.Table | tuple[np.ndarray, ...]"
Collate = Callable[[int, Tensor, Any], BatchType]
"""Makes a batch from its step, sample ids (b,) int64 and their rows, a table unless `prepared` says
otherwise; b may be 0."""
MOST_AT_ONCE = 4096
"""Rows of a block that are decoded at once, at most."""


@typed
class Stream(Endless[BatchType]):
    """Endless batches from Parquet shards, epoch after epoch; an iterator with a position.

    A sample is a row, and its id is the row's number in the dataset. Every rank has the same number of
    batches; a rank's batch may be empty.

    Args:
        rows: a `ParquetRows`, or the path of one (a file, a folder, a glob or a URL).
        collate: makes a batch: ``collate(step, sample_ids, table)`` with a row of ``table`` for each id; None
            for a subclass that has it.
        batch_size: samples of a global batch, over all ranks; the last batch of an epoch may have fewer.
        seed: int64; fixes the order of samples in every epoch.
        rank, world_size: of the part that `batch` returns.
        shuffle, buffer_rows, readers: see `StreamPlan`. A rank's memory is ``buffer_rows / world_size``
            rows, as many again that are decoded (a reader at most 4,096), and for each of its ``readers /
            world_size`` readers a page of each column (1 MiB, unless the writer has chosen another size).

    Attributes:
        step: of the next batch. counts: bytes and rows that this rank has read.

    Raises ValueError for a number out of range and for more ranks than readers, and the errors of
    `ParquetRows`; where a row group cannot be read, ValueError names it.
    """

    def __init__(
        self,
        rows: ParquetRows | str | Path,
        collate: Collate[BatchType] | None,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        buffer_rows: int = 1 << 18,
        readers: int = 64,
    ) -> None:
        # pyarrow is slow to import
        from tritonrec.data.parquet_rows import DecodedGroups, ParquetRows, ReadCounts

        self.rows = rows if isinstance(rows, ParquetRows) else ParquetRows(rows)
        if collate is not None:
            self.collate = collate
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.plan = StreamPlan(self.rows.group_rows, batch_size, seed, shuffle, buffer_rows, readers)
        self.readers: Sequence[int] = self.plan.readers_of(rank, world_size)
        self.step = 0
        self.counts: ReadCounts = ReadCounts()
        self._at_once = min(self.plan.block_rows, MOST_AT_ONCE)
        self._decoded = DecodedGroups(self.rows, self.plan.divided.tolist(), self._at_once)
        self._blocks: dict[int, _Blocks] = {}
        self._whole: Stream[BatchType] | None = None

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.plan.num_rows

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, the incomplete last one included."""
        return self.plan.steps_per_epoch

    def __iter__(self) -> Iterator[BatchType]:
        return self

    def __next__(self) -> BatchType:
        return self.batch(self.step)

    def batch(self, step: int) -> BatchType:
        """This rank's samples of the global batch at `step`; the next one is at ``step + 1``.

        Any step may be read at any time. One that does not follow the last one reads a block of each reader.
        """
        ids, rows = self.rows_of(step)
        with work("collate"):
            batch = self.collate(step, torch.from_numpy(ids), rows)
        self.step = step + 1
        return self.divided(batch)

    def global_batch(self, step: int) -> BatchType:
        """The batch of all ranks, which this rank then reads alone."""
        if self.world_size == 1:
            return self.batch(step)
        if self._whole is None:
            self._whole = self.of_rank(0, 1)
        return self._whole.batch(step)

    def of_rank(self, rank: int, world_size: int) -> Self:
        """The same stream for another rank, at its beginning, with counts of its own."""
        other = copy(self)
        other.rank, other.world_size = rank, world_size
        other.readers = self.plan.readers_of(rank, world_size)
        other.step, other.counts, other._blocks, other._whole = 0, type(self.counts)(), {}, None
        other._shard = None
        return other

    def prepared(self, numbers: np.ndarray, table: pa.Table, order: np.ndarray) -> Rows:
        """A block's rows, whose numbers are (n,), in an `order`, as `collate` takes them: table or arrays.

        Arrays (..., n) are cut and joined at a tenth of the cost of columns.
        """
        return table.take(order)

    def rows_of(self, step: int) -> tuple[np.ndarray, Any]:
        """Numbers (b,) int64 and rows of this rank's samples at `step`, reader by reader."""
        ids: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
        parts: list[Rows] = []
        epoch, firsts, lasts = self.plan.parts(step)
        for reader in self.readers:
            first, last = firsts[reader], lasts[reader]
            while first < last:
                if reader not in self._blocks:
                    self._blocks[reader] = _Blocks(self, reader)
                start, numbers, rows = self._blocks[reader].at(self, epoch, first)
                end = min(last - start, len(numbers))
                ids.append(numbers[first - start : end])
                parts.append(cut(rows, first - start, end))
                first = start + end
        numbers = np.concatenate(ids)
        return numbers, joined(parts or [self.prepared(numbers, self.rows.schema.empty_table(), numbers)])

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank: a few numbers."""
        return {"step": self.step, **self.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position, whatever the world size was.

        Raises ValueError naming what differs: another dataset, batch size, seed or order has other batches.
        """
        check_same(state, self.identity(), "stream")
        (self.step,) = counts_of(state, "step")

    def identity(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "kind": type(self).__name__,
            "data": self.rows.fingerprint,
            "values": self.rows.content,
            "samples": plan.num_rows,
            "batch_size": plan.batch_size,
            "seed": plan.seed,
            "shuffle": plan.shuffle,
            "buffer_rows": plan.buffer_rows,
            "readers": plan.readers,
        }


def cut(rows: Rows, first: int, last: int) -> Rows:
    """The rows from `first` to `last`."""
    if isinstance(rows, tuple):
        return tuple([own[..., first:last] for own in rows])
    return rows.slice(first, last - first)


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows end to end."""
    if isinstance(parts[0], tuple):
        return tuple(np.concatenate(every, axis=-1) for every in zip(*parts, strict=True))
    import pyarrow as pa

    return pa.concat_tables(parts).combine_chunks()


class _Blocks:
    """The block that a reader is in."""

    def __init__(self, stream: Stream[Any], reader: int) -> None:
        from tritonrec.data.parquet_rows import RowReader

        self._number = reader
        decoded = stream._decoded if len(stream.readers) > 1 else None
        self._reader: RowReader = RowReader(stream.rows, stream.counts, stream._at_once, decoded)
        self._known: tuple[int, int, int] | None = None  # epoch, first, last
        self._numbers = np.empty(0, dtype=np.int64)
        self._rows: Any = None

    def at(self, stream: Stream[Any], epoch: int, place: int) -> tuple[int, np.ndarray, Rows]:
        """The block that has the row at `place` of the stretch: first place, numbers and rows, shuffled."""
        known = self._known
        if known is None or known[0] != epoch or not known[1] <= place < known[2]:
            plan, rows = stream.plan, stream.rows
            first, last = plan.block(self._number, place)
            self._known = self._rows = None  # one block at a time in memory
            stretches = plan.rows(epoch, self._number, first, last)
            table = self._reader.read(*stretches)
            numbers = np.concatenate([rows.numbers(stretch) for stretch in stretches])
            order = plan.shuffled(epoch, numbers)
            self._rows = stream.prepared(numbers, table, order)
            self._numbers = numbers[order]
            self._known = known = epoch, first, last
        return known[1], self._numbers, self._rows
