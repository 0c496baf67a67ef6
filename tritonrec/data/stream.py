"""Batches streamed from Parquet shards: a rank reads its part only, and keeps a shuffle buffer of it.

The global batch of a step is a function of (data, seed, step), not of the world size (`stream_plan`), so a
run goes on with the same bits at another one. A position is a step. Reading happens where the batches are
pulled: in the trainer's ``prefetch`` lane, with the slices ``read``, ``decode`` and ``collate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.epochs import BatchType
from tritonrec.data.positions import check_same
from tritonrec.data.slices import work
from tritonrec.data.stream_plan import StreamPlan

if TYPE_CHECKING:
    import pyarrow as pa

    from tritonrec.data.parquet_rows import ParquetRows, ReadCounts, RowReader

Collate = Callable[[int, Tensor, "pa.Table"], BatchType]
"""Makes a batch from its step, sample ids (b,) int64 and their rows; b may be 0."""


class Stream(Generic[BatchType]):
    """Endless batches from Parquet shards, epoch after epoch; an iterator with a position.

    A sample is a row, and its id is the row's number in the dataset. Every rank has the same number of
    batches; a rank's batch may be empty.

    Args:
        rows: a `ParquetRows`, or the path of one (a file, a folder, a glob or a URL).
        collate: makes a batch: ``collate(step, sample_ids, table)`` with a row of ``table`` for each id.
        batch_size: samples of a global batch, over all ranks; the last batch of an epoch may have fewer.
        seed: int64; fixes the order of samples in every epoch.
        rank, world_size: of the part that `batch` returns.
        shuffle, buffer_rows, readers: see `StreamPlan`. A rank's memory is ``buffer_rows / world_size``
            rows, and for each of its ``readers / world_size`` readers 256 rows and a page of each column (1
            MiB, unless the writer has chosen another size).

    Attributes:
        step: of the next batch. counts: bytes and rows that this rank has read.

    Raises ValueError for a number out of range and for more ranks than readers, and the errors of
    `ParquetRows`; where a row group cannot be read, ValueError names it.
    """

    def __init__(
        self,
        rows: ParquetRows | str | Path,
        collate: Collate[BatchType],
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        buffer_rows: int = 1 << 18,
        readers: int = 64,
    ) -> None:
        from tritonrec.data.parquet_rows import ParquetRows, ReadCounts  # pyarrow is slow to import

        self.rows = rows if isinstance(rows, ParquetRows) else ParquetRows(rows)
        self.collate, self.batch_size, self.seed = collate, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.plan = StreamPlan(self.rows.group_rows, batch_size, seed, shuffle, buffer_rows, readers)
        self.readers: Sequence[int] = self.plan.readers_of(rank, world_size)
        self.step = 0
        self.counts: ReadCounts = ReadCounts()
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
        ids, table = self.rows_of(step)
        with work("collate"):
            batch = self.collate(step, torch.from_numpy(ids), table)
        self.step = step + 1
        return batch

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
        return other

    def rows_of(self, step: int) -> tuple[np.ndarray, pa.Table]:
        """Numbers (b,) int64 and rows of this rank's samples at `step`, reader by reader."""
        import pyarrow as pa

        ids: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
        tables: list[pa.Table] = [self.rows.schema.empty_table()]
        for reader in self.readers:
            epoch, first, last = self.plan.part(step, reader)
            blocks = self._blocks.setdefault(reader, _Blocks(self, reader)) if first < last else None
            while blocks is not None and first < last:
                start, numbers, table = blocks.at(epoch, first)
                end = min(last - start, len(numbers))
                ids.append(numbers[first - start : end])
                tables.append(table.slice(first - start, end - first + start))
                first = start + end
        return np.concatenate(ids), pa.concat_tables(tables).combine_chunks()

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank: a few numbers."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position, whatever the world size was.

        Raises ValueError naming what differs: another dataset, batch size, seed or order has other batches.
        """
        check_same(state, self._identity(), "stream")
        self.step = int(state["step"])

    def _identity(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "kind": type(self).__name__,
            "data": self.rows.fingerprint,
            "samples": plan.num_rows,
            "batch_size": plan.batch_size,
            "seed": plan.seed,
            "shuffle": plan.shuffle,
            "buffer_rows": plan.buffer_rows,
            "readers": plan.readers,
        }


class _Blocks:
    """The block that a reader is in."""

    def __init__(self, stream: Stream[Any], reader: int) -> None:
        from tritonrec.data.parquet_rows import RowReader

        self._stream, self._number = stream, reader
        self._reader: RowReader = RowReader(stream.rows, stream.counts)
        self._known: tuple[int, int, int] | None = None  # epoch, first, last
        self._numbers, self._table = np.empty(0, dtype=np.int64), stream.rows.schema.empty_table()

    def at(self, epoch: int, place: int) -> tuple[int, np.ndarray, pa.Table]:
        """The block that has the row at `place` of the stretch: first place, numbers and rows, shuffled."""
        known = self._known
        if known is None or known[0] != epoch or not known[1] <= place < known[2]:
            plan, rows = self._stream.plan, self._stream.rows
            first, last = plan.block(self._number, place)
            self._known, self._table = None, rows.schema.empty_table()  # one block at a time in memory
            stretches = plan.rows(epoch, self._number, first, last)
            table = self._reader.read(*stretches)
            numbers = np.concatenate([rows.numbers(stretch) for stretch in stretches])
            order = plan.shuffled(epoch, numbers)
            self._numbers, self._table = numbers[order], table.take(order)
            self._known = known = epoch, first, last
        return known[1], self._numbers, self._table
