"""Columns of a table in files that other tools open: Parquet, or safetensors.

A column (n,) is a plain one; a column (n, w) is a fixed-size list of w values in Parquet, a matrix in
safetensors. Rows keep their order, and every value its bits.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..files import full_disk_named

Format = Literal["parquet", "safetensors"]
Weights = Literal["float32", "int8"]
"""How files hold the weights of rows."""

WEIGHTS: tuple[Weights, ...] = ("float32", "int8")
SUFFIXES: dict[Format, str] = {"parquet": ".parquet", "safetensors": ".safetensors"}


def write_shard(path: Path, columns: Mapping[str, Tensor], format: Format) -> None:
    """Write columns (n,) or (n, w), w at least 1, to a new file."""
    if format == "safetensors":
        try:
            save_file({name: values.contiguous() for name, values in columns.items()}, path)
        except SafetensorError as error:  # of a disk too
            raise OSError(errno.EIO, str(error), str(path)) from error
        return
    import pyarrow
    import pyarrow.parquet as parquet

    arrays: dict[str, Any] = {}
    for name, values in columns.items():
        flat = pyarrow.array(values.contiguous().flatten().numpy())
        lists = values.dim() == 2
        arrays[name] = pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1]) if lists else flat
    with full_disk_named(path):
        parquet.write_table(pyarrow.table(arrays), path, write_page_checksum=True)


def read_shard(path: Path, format: Format) -> dict[str, Tensor]:
    """The columns of a file that `write_shard` wrote; ValueError naming one that cannot be read."""
    try:
        return load_file(path) if format == "safetensors" else _read_parquet(path)
    except (SafetensorError, OSError, ValueError, TypeError, NotImplementedError, MemoryError) as error:
        raise ValueError(f"{path} cannot be read as {format}: {error}") from error


def _read_parquet(path: Path) -> dict[str, Tensor]:
    import pyarrow
    import pyarrow.parquet as parquet

    columns = {}
    table = parquet.read_table(path, page_checksum_verification=True)
    for name, chunks in zip(table.column_names, table.columns, strict=True):
        lists = pyarrow.types.is_fixed_size_list(chunks.type)
        array = chunks.combine_chunks()
        values = (array.flatten() if lists else array).to_numpy(zero_copy_only=False)
        tensor = torch.from_numpy(values.copy())  # Arrow's memory cannot be written to
        columns[name] = tensor.view(-1, chunks.type.list_size) if lists else tensor
    return columns
