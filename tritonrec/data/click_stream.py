"""Clicks streamed from Parquet, a row each; the last tenth of the rows is held out.

Columns, missing values and the held-out tenth are those of a format (`tritonrec.data.click_columns`); every
file has the same types. The order of the other rows is that of `tritonrec.data.stream`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.ctr import HELD_OUT, ClickBatch, ClickSamples, num_training_rows
from tritonrec.data.epochs import check_at_least
from tritonrec.data.jagged import KeyedJaggedTensor
from tritonrec.data.labels import check_counts
from tritonrec.data.loader import LEAVE_ONE_OUT
from tritonrec.data.splits import Part, Split, rows_of
from tritonrec.data.stream import Stream
from tritonrec.settings import typed

if TYPE_CHECKING:
    import pyarrow as pa

    from tritonrec.data.click_columns import ClickColumns
    from tritonrec.data.log_format import LogFormat
    from tritonrec.data.parquet_rows import ParquetRows


@typed
class ClickStream(ClickSamples, Stream[ClickBatch]):
    """Training rows of a dataset, streamed, and the held-out ones behind them.

    Args:
        rows: the path of a dataset, a `ParquetRows` of the format's columns, or a frame.
        batch_size, seed, rank, world_size, shuffle, buffer_rows, readers: see `Stream`.
        columns: the format, such as `tritonrec.data.presets.CRITEO`; the plain one by default.
        split: by default the last tenth is for test, with validation a tenth of the others before it
            (`ClickLog.divided`).

    Raises the errors of `Stream` and of the format, ValueError where all labels are alike, and while reading
    ValueError naming column and row of a bad value.
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
        columns: ClickColumns | LogFormat | None = None,
        split: Split = LEAVE_ONE_OUT,
    ) -> None:
        from tritonrec.data.click_columns import ClickColumns
        from tritonrec.data.parquet_rows import ParquetRows, schema_of

        if isinstance(columns, ClickColumns):
            rows = rows if isinstance(rows, ParquetRows) else ParquetRows(rows, columns.names)
        else:
            if columns is not None and columns.is_clicks and isinstance(rows, (str, Path)):
                file, schema = schema_of(str(rows))
                rows = ParquetRows(rows, ClickColumns.of(file, schema, columns).names)
            rows = rows if isinstance(rows, ParquetRows) else ParquetRows(rows)
            columns = ClickColumns.of(rows.path, rows.schema, columns)
            rows = rows.select(columns.names)
        if columns.format.ids == "words":
            raise ValueError(
                f"{rows.path}: a stream reads its rows in an order of its own, and words are numbered in "
                "that of the log: stream the folder of clicks_of(source, words=), which numbers them once, "
                "read the log whole (load, ClickLoader), or take ids='hashed'"
            )
        self.whole, self._columns = rows, columns
        count = rows.num_rows
        self.trained, self.num_validation = rows_of(split, count, num_training_rows(count), HELD_OUT)
        self.num_held_out = count - self.trained - self.num_validation
        self.features, self.num_dense = self._columns.features, len(self._columns.dense)
        super().__init__(
            self.whole.first(self.trained), None, batch_size, seed, rank, world_size, shuffle,
            buffer_rows, readers,
        )  # fmt: skip
        self._check_labels()

    def identity(self) -> dict[str, Any]:
        columns = self._columns
        own = {"label": columns.label, "dense": list(columns.dense), "features": list(self.features)}
        return {**super().identity(), **own, "format": columns.format.query()}

    @property
    def click_rate(self) -> float:
        """Share of clicks among the rows that are not held out; reads their labels."""
        return sum(int(labels.sum()) for labels in self._labels(self.trained)) / self.trained

    def _labels(self, count: int) -> Iterator[np.ndarray]:
        """Those of the first rows, some at a time."""
        from tritonrec.data.values import Part

        rows, columns = self.whole.select([self._columns.label]).first(count), self._columns
        for numbers, table in rows.batches(1 << 16):
            yield columns.labels(Part(rows.path, "row", numbers), table)

    def _check_labels(self) -> None:
        """Read labels until there are both kinds, of a log of any use in the first rows."""
        rows = clicks = 0
        for labels in self._labels(self.trained):
            rows, clicks = rows + len(labels), clicks + int(labels.sum())
            if 0 < clicks < rows:
                return
        check_counts("click", rows, clicks)

    def evaluation_batches(self, batch_size: int = 1024, part: Part = "test") -> Iterator[ClickBatch]:
        check_at_least("batch_size", batch_size, 1)
        first, last = self.rows_of_part(part)
        for numbers, table in self.whole.first(last).batches(batch_size, begin=first):
            yield self.collate(0, torch.from_numpy(numbers), self.prepared(numbers, table))

    def prepared(
        self, numbers: np.ndarray, table: pa.Table, order: Any = slice(None)
    ) -> tuple[np.ndarray, ...]:
        """Labels (n,), dense features (F, n) and ids (C, n) of rows; raises ValueError naming a bad value."""
        from tritonrec.data.values import Part

        return self._columns.arrays(Part(self.whole.path, "row", numbers), table, order)

    def collate(self, step: int, sample_ids: Tensor, rows: tuple[np.ndarray, ...]) -> ClickBatch:
        labels, dense, ids = map(torch.from_numpy, rows)
        features = KeyedJaggedTensor.from_matrix(self.features, ids.T)
        return ClickBatch(step, sample_ids, features, dense.T.contiguous(), labels)
