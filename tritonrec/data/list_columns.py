"""Columns of integers, and of lists of integers, of Parquet rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    from tritonrec.data.parquet_rows import ParquetRows


def list_column(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A column of lists: all values, and the length of each row's list; int64.

    Raises ValueError for nulls and for values beyond int64.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(name).combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    if column.null_count:
        raise ValueError(f"column {name!r} has nulls")
    return _int64(name, column.flatten()), pc.list_value_length(column).cast(pa.int64()).to_numpy().copy()


def integer_column(table: pa.Table, name: str) -> np.ndarray:
    """A column of integers as int64; raises ValueError for nulls and for values beyond int64."""
    import pyarrow as pa

    column = table.column(name).combine_chunks()
    return _int64(name, column.chunk(0) if isinstance(column, pa.ChunkedArray) else column)


def _int64(name: str, values: pa.Array) -> np.ndarray:
    import pyarrow as pa

    if values.null_count:
        raise ValueError(f"column {name!r} has nulls")
    try:
        return values.cast(pa.int64()).to_numpy().copy()
    except pa.ArrowInvalid as error:
        raise ValueError(f"column {name!r} does not fit: {error}") from error


def check_columns(rows: ParquetRows, lists: Sequence[str], integers: Sequence[str], hint: str) -> None:
    """Raise ValueError unless a dataset has such columns; of a wrong type the `hint` says who writes it."""
    import pyarrow as pa

    for name in (*lists, *integers):
        if name not in rows.schema.names:
            raise ValueError(f"{rows.path}: no column {name!r}; found {', '.join(rows.schema.names)}")
        kind = rows.schema.field(name).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        found = kind.value_type if is_list else kind
        if is_list != (name in lists) or not pa.types.is_integer(found):
            expected = "lists of integers, a row for each sequence" if name in lists else "integers"
            raise ValueError(f"{rows.path}: column {name!r} must hold {expected}, got {kind}: {hint}")
