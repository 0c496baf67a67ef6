"""Clicks in Criteo's format streamed from Parquet, a row each; the last tenth of the rows is held out.

Columns, missing values and the held-out tenth are those of `tritonrec.data.criteo`; every file has the same
types. The order of the other rows is that of `tritonrec.data.stream`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonrec.data.ctr import ClickBatch, num_training_rows
from tritonrec.data.epochs import check_at_least
from tritonrec.data.jagged import KeyedJaggedTensor
from tritonrec.data.stream import Stream

if TYPE_CHECKING:
    import pyarrow as pa

    from tritonrec.data.parquet_rows import ParquetRows


class ClickStream(Stream[ClickBatch]):
    """Training rows of a dataset in Criteo's format, streamed, and the held-out ones behind them.

    Args:
        rows: the path of a dataset with the columns of `tritonrec.data.criteo`, or a `ParquetRows` of these.
        batch_size, seed, rank, world_size, shuffle, buffer_rows, readers: see `Stream`.

    Raises the errors of `Stream`, and while reading ValueError naming column and row of a bad value.
    """

    def __init__(
        self,
        rows: ParquetRows | str | Path,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        buffer_rows: int = 1 << 18,
        readers: int = 64,
    ) -> None:
        from tritonrec.data.criteo import CATEGORIES, COLUMNS, COUNTS
        from tritonrec.data.parquet_rows import ParquetRows

        self.whole = rows if isinstance(rows, ParquetRows) else ParquetRows(rows, COLUMNS)
        self.trained = num_training_rows(self.whole.num_rows)
        super().__init__(
            self.whole.first(self.trained), self._collate, batch_size, seed, rank, world_size, shuffle,
            buffer_rows, readers,
        )  # fmt: skip
        self.features, self.num_dense = CATEGORIES, len(COUNTS)

    @property
    def num_held_out(self) -> int:
        """Rows that are held out for evaluation."""
        return self.whole.num_rows - self.trained

    @property
    def click_rate(self) -> float:
        """Share of clicks among the rows that are not held out, which reads their labels."""
        from tritonrec.data.criteo import labels_of
        from tritonrec.data.parquet_rows import ParquetRows

        rows = ParquetRows(self.whole.path, ["label"], self.whole.filesystem).first(self.trained)
        every = rows.batches(1 << 16)
        clicks = sum(int(labels_of(rows.path, numbers, table).sum()) for numbers, table in every)
        return clicks / self.trained

    def evaluation_batches(self, batch_size: int = 1024) -> Iterator[ClickBatch]:
        """The held-out rows in their order, at most `batch_size` at a time, as step 0."""
        check_at_least("batch_size", batch_size, 1)
        for numbers, table in self.whole.batches(batch_size, begin=self.trained):
            yield self._collate(0, torch.from_numpy(numbers), table)

    def _collate(self, step: int, sample_ids: Tensor, table: pa.Table) -> ClickBatch:
        from tritonrec.data.criteo import CATEGORIES, columns_of

        labels, dense, categories = columns_of(self.whole.path, sample_ids.numpy(), table)
        features = KeyedJaggedTensor.from_matrix(CATEGORIES, torch.from_numpy(categories))
        return ClickBatch(step, sample_ids, features, torch.from_numpy(dense), torch.from_numpy(labels))
