"""Columns of click logs in Parquet: a label, dense features and categories, an impression each row.

A format says which columns are dense features and which are categories: Criteo's (`tritonrec.data.criteo`),
or the plain one, which needs no names but ``label``::

    label   age    price     site   device      0 or 1, or a boolean
    0       31.0   1.25      10     4           floating: dense features, finite, read as float32
    1       22.0   0.5       11     4           integers: categories, any int64, one id each

A folder's files are read in the order of their paths, and rows are in the order of time: the last tenth is
held out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from tritonrec.data.ctr import ClickLog, num_training_rows
from tritonrec.data.parquet_rows import UNREADABLE

LABEL = "label"
Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Labels (n,) int64, dense (n, F) float32, categories (n, C) int64."""


@dataclass(frozen=True)
class Part:
    """Source of a table, for error messages: its first row's number, or that of each row (n,)."""

    path: Path | str
    unit: str
    first: int | np.ndarray

    def fail(self, column: str, values: pa.Array, wrong: np.ndarray, expected: str) -> NoReturn:
        """Raise ValueError naming the first value that is wrong, (n,) bool."""
        row = int(wrong.nonzero()[0][0])
        value = values[row].as_py()
        number = row + self.first if isinstance(self.first, int) else self.first[row]
        shown = "an empty field" if value is None else repr(value)
        raise ValueError(
            f"{self.path}, {self.unit} {number}: column {column} has {shown}, expected {expected}"
        )


class ClickColumns(Protocol):
    """A format: the names of its columns, and what they become."""

    @property
    def dense(self) -> tuple[str, ...]: ...

    @property
    def features(self) -> tuple[str, ...]: ...

    def arrays(self, part: Part, table: pa.Table) -> Columns:
        """The columns of some rows; raises ValueError naming part, row and column of a bad value."""
        ...


def names(columns: ClickColumns) -> tuple[str, ...]:
    """Of all columns."""
    return LABEL, *columns.dense, *columns.features


@dataclass(frozen=True)
class PlainColumns:
    """The plain format, drawn in the module's docstring."""

    dense: tuple[str, ...]
    features: tuple[str, ...]

    @classmethod
    def of(cls, path: str | Path, schema: pa.Schema) -> PlainColumns:
        """By the types of the columns of the dataset at `path`, in their order.

        Raises ValueError for a dataset without labels or without categories, and naming a column of another
        type.
        """
        dense, features = [], []
        for column in schema:
            if column.name == LABEL:
                continue
            if pa.types.is_floating(column.type):
                dense.append(column.name)
            elif pa.types.is_integer(column.type):
                features.append(column.name)
            else:
                raise ValueError(
                    f"{path}: column {column.name!r} is of type {column.type}, expected integers for a "
                    "category or floating numbers for a dense feature"
                )
        if LABEL not in schema.names or not features:
            raise ValueError(
                f"{path}: clicks need a column 'label' and columns of integers, found "
                f"{', '.join(schema.names) or 'no columns'}"
            )
        return cls(tuple(dense), tuple(features))

    def arrays(self, part: Part, table: pa.Table) -> Columns:
        rows = len(table)
        dense = [_finite(part, name, table.column(name).combine_chunks()) for name in self.dense]
        ids = [_ids(part, name, table.column(name).combine_chunks()) for name in self.features]
        return (
            labels(part, table),
            np.stack(dense, 1) if dense else np.zeros((rows, 0), np.float32),
            np.stack(ids, 1),
        )


def _finite(part: Part, name: str, values: pa.Array) -> np.ndarray:
    found = pc.cast(values, pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    if not np.isfinite(found).all():  # a missing value is NaN
        part.fail(name, values, ~np.isfinite(found), "a finite number of float32")
    return found


def _ids(part: Part, name: str, values: pa.Array) -> np.ndarray:
    wrong = pc.is_null(values)
    if pa.types.is_uint64(values.type):
        wrong = pc.or_kleene(wrong, pc.greater(values, pa.scalar(2**63 - 1, pa.uint64())))
    if pc.any(wrong).as_py():
        part.fail(name, values, wrong.to_numpy(zero_copy_only=False), "an int64")
    return pc.cast(values, pa.int64()).to_numpy(zero_copy_only=False)


def labels(part: Part, table: pa.Table) -> np.ndarray:
    """(n,) int64: the column of labels."""
    values = table.column(LABEL).combine_chunks()
    plain = pc.cast(values, pa.string()) if not pa.types.is_boolean(values.type) else values
    if pa.types.is_boolean(values.type):
        plain = pc.if_else(values, "1", "0")
    known = pc.fill_null(pc.is_in(plain, pa.array(["0", "1"])), False).to_numpy(zero_copy_only=False)
    if not known.all():
        part.fail(LABEL, values, ~known, "0 or 1")
    return pc.equal(plain, "1").to_numpy(zero_copy_only=False).astype(np.int64)


def read_parquet(path: Path | str, columns: ClickColumns | None = None) -> ClickLog:
    """Read a Parquet file, or a folder of them at any depth.

    Args:
        columns: a format; the plain one by default.

    Raises FileNotFoundError for a path that does not exist, and ValueError naming file, column and row (from
    0) for a missing column, another type, and a value out of range.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    try:
        dataset = ds.dataset(path, format="parquet")
        columns = columns or PlainColumns.of(path, dataset.schema)
    except UNREADABLE as error:
        raise ValueError(f"{path}: not a Parquet dataset: {error}") from error
    return as_log(columns, _parts(path, dataset, columns), path)


def _parts(path: Path, dataset: ds.Dataset, columns: ClickColumns) -> Iterator[tuple[Part, pa.Table]]:
    needed = names(columns)
    try:
        for fragment in sorted(dataset.get_fragments(), key=lambda part: part.path):
            found = fragment.physical_schema.names
            missing = [name for name in needed if name not in found]
            if missing:
                raise ValueError(f"{fragment.path}: no column {missing[0]!r}, found {', '.join(found)}")
            yield Part(fragment.path, "row", 0), fragment.to_table(columns=list(needed))
    except UNREADABLE as error:
        raise ValueError(f"{path}: not a Parquet dataset: {error}") from error


def as_log(columns: ClickColumns, parts: Iterable[tuple[Part, pa.Table]], path: Path | str) -> ClickLog:
    """The log of some tables, in memory; raises ValueError where they have no rows."""
    found = [columns.arrays(part, table) for part, table in parts]
    rows = sum(len(own) for own, _dense, _ids in found)
    if not rows:
        raise ValueError(f"{path}: holds no impressions")
    own, dense, ids = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return ClickLog(dense, ids, own, columns.features, num_training_rows(rows))
