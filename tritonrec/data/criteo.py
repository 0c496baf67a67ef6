"""Criteo's format: a label, 13 counts I1 ... I13 and 26 categories C1 ... C26, as text or as Parquet.

As text, one impression a line, 40 fields between tabs, no header; a field may be empty::

    label  I1 ... I13          C1 ... C26
    0      1  1  5  0  1382 .. 68fd1e64  80e26c9b  fb936136 ..        0 or 1, integers, hexadecimal

In Parquet the columns have these names (``label``, ``I1``, ..., ``C26``), in any order; further columns are
ignored. Counts are numbers, categories strings of hexadecimal digits or integers of at least 0, and a field
may be null. A folder's files are read in the order of their paths. Rows of both formats are in the order of
time.

A count x becomes log(1 + max(x, 0)), a missing one 0. A category becomes its number, a missing one 2**32,
beyond eight hexadecimal digits. The last tenth is held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.dataset as ds

from tritonrec.data import text_files
from tritonrec.data.ctr import ClickLog, num_training_rows

COUNTS = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = ("label", *COUNTS, *CATEGORIES)
Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Labels, dense, categories."""
MISSING = 2**32
"""Id of a category that is missing."""

_VALUE_OF_DIGIT = np.zeros(256, np.int64)
for _digits, _first in ((b"0123456789", 0), (b"abcdef", 10), (b"ABCDEF", 10)):
    _VALUE_OF_DIGIT[list(_digits)] = np.arange(_first, _first + len(_digits))


def read_tsv(path: Path | str) -> ClickLog:
    """Read text in Criteo's format: a file, or a folder or glob of them; the errors of `tsv_parts`."""
    return _log(_text_parts(path), path)


def tsv_parts(path: Path | str) -> Iterator[pa.Table]:
    """Rows of text in Criteo's format, as `read_parquet` takes them, in parts and in the order of lines.

    Files may be compressed (.gz, .bz2, .zst, .lz4), and at a URL. Raises FileNotFoundError for a path that
    does not exist, and ValueError naming file, line and column of a bad field.
    """
    for part, table in _text_parts(path):
        columns = {name: table.column(name).combine_chunks() for name in COLUMNS}
        made: dict[str, Any] = {"label": _label(part, columns["label"])}
        for name in COUNTS:
            _count(part, name, columns[name])
            made[name] = pc.cast(columns[name], pa.int64())
        made |= {name: _category(part, name, columns[name]) for name in CATEGORIES}
        yield pa.table(made)


def _text_parts(path: Path | str) -> Iterator[tuple[_Part, pa.Table]]:
    filesystem, files = text_files.text_files(str(path))
    for file in files:
        first = 1
        try:
            with filesystem.open_input_stream(file, compression="detect") as stream:
                for batch in _text(stream):
                    yield _Part(Path(file), "line", first), pa.Table.from_batches([batch])
                    first += len(batch)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file}: not Criteo's text format, 40 fields between tabs: {error}") from error


def _text(stream: pa.NativeFile) -> pcsv.CSVStreamingReader:
    return pcsv.open_csv(
        stream,
        pcsv.ReadOptions(column_names=list(COLUMNS), use_threads=False, block_size=text_files.BLOCK_BYTES),
        pcsv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        pcsv.ConvertOptions(
            column_types=dict.fromkeys(COLUMNS, pa.string()), strings_can_be_null=True, null_values=[""]
        ),
    )


def read_parquet(path: Path | str) -> ClickLog:
    """Read a Parquet file, or a folder of them at any depth.

    Raises FileNotFoundError for a path that does not exist, and ValueError naming file, column and row (from
    0) for a missing column, another type, and a value out of range.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    return _log(_parquet_parts(path), path)


def _parquet_parts(path: Path) -> Iterator[tuple[_Part, pa.Table]]:
    try:
        fragments = sorted(ds.dataset(path, format="parquet").get_fragments(), key=lambda part: part.path)
        for fragment in fragments:
            names = fragment.physical_schema.names
            missing = [name for name in COLUMNS if name not in names]
            if missing:
                raise ValueError(f"{fragment.path}: no column {missing[0]!r}, found {', '.join(names)}")
            yield _Part(Path(fragment.path), "row", 0), fragment.to_table(columns=list(COLUMNS))
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a Parquet dataset: {error}") from error


class _Part:
    """Source of a table, for error messages: its first row's number, or that of each row (n,)."""

    def __init__(self, path: Path, unit: str, first: int | np.ndarray):
        self.path, self.unit, self.first = path, unit, first

    def fail(self, column: str, values: pa.Array, wrong: np.ndarray, expected: str) -> NoReturn:
        """Raise ValueError naming the first value that is wrong, (n,) bool."""
        row = int(wrong.nonzero()[0][0])
        value = values[row].as_py()
        number = row + self.first if isinstance(self.first, int) else self.first[row]
        shown = "an empty field" if value is None else repr(value)
        raise ValueError(
            f"{self.path}, {self.unit} {number}: column {column} has {shown}, expected {expected}"
        )


def _log(parts: Iterator[tuple[_Part, pa.Table]], path: Path | str) -> ClickLog:
    labels: list[np.ndarray] = []
    dense: list[np.ndarray] = []
    categories: list[np.ndarray] = []
    for part, table in parts:
        columns = _columns(part, table)
        for found, values in zip((labels, dense, categories), columns, strict=True):
            found.append(values)
    rows = sum(map(len, labels))
    if not rows:
        raise ValueError(f"{path}: holds no impressions")
    return ClickLog(
        np.concatenate(dense), np.concatenate(categories), np.concatenate(labels), CATEGORIES,
        num_training_rows(rows),
    )  # fmt: skip


def columns_of(path: Path | str, numbers: np.ndarray, table: pa.Table) -> Columns:
    """Labels (n,) int64, dense (n, 13) float32 and categories (n, 26) int64 of rows of a Parquet dataset.

    Raises ValueError naming `path`, column and row, by `numbers` (n,), of a bad value.
    """
    return _columns(_Part(Path(path), "row", numbers), table)


def labels_of(path: Path | str, numbers: np.ndarray, table: pa.Table) -> np.ndarray:
    """The first of `columns_of`, of a table that need not have more."""
    return _label(_Part(Path(path), "row", numbers), table.column("label").combine_chunks())


def _columns(part: _Part, table: pa.Table) -> Columns:
    columns = {name: table.column(name).combine_chunks() for name in COLUMNS}
    return (
        _label(part, columns["label"]),
        np.stack([_count(part, name, columns[name]) for name in COUNTS], 1),
        np.stack([_category(part, name, columns[name]) for name in CATEGORIES], 1),
    )


def _label(part: _Part, values: pa.Array) -> np.ndarray:
    plain = pc.cast(values, pa.string()) if not pa.types.is_boolean(values.type) else values
    if pa.types.is_boolean(values.type):
        plain = pc.if_else(values, "1", "0")
    known = pc.fill_null(pc.is_in(plain, pa.array(["0", "1"])), False).to_numpy(zero_copy_only=False)
    if not known.all():
        part.fail("label", values, ~known, "0 or 1")
    return pc.equal(plain, "1").to_numpy(zero_copy_only=False).astype(np.int64)


def _count(part: _Part, name: str, values: pa.Array) -> np.ndarray:
    """log(1 + max(x, 0)), float32; 0 where x is missing."""
    if pa.types.is_string(values.type):
        number = pc.fill_null(pc.match_substring_regex(values, r"^-?[0-9]{1,18}$"), True)
        wrong = ~number.to_numpy(zero_copy_only=False)
        if wrong.any():
            part.fail(name, values, wrong, "an integer or nothing")
        found = pc.cast(values, pa.int64())
    elif pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        found = values
    else:
        raise ValueError(f"{part.path}: column {name} is of type {values.type}, expected numbers")
    counts = pc.cast(pc.fill_null(found, 0), pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if not np.isfinite(counts).all():
        part.fail(name, values, ~np.isfinite(counts), "a finite number")
    return np.log1p(np.maximum(counts, 0)).astype(np.float32)


def _category(part: _Part, name: str, values: pa.Array) -> np.ndarray:
    """(n,) int64, `MISSING` where there is none."""
    if pa.types.is_integer(values.type):
        wrong = pc.fill_null(pc.less(values, 0), False).to_numpy(zero_copy_only=False)
        if wrong.any():
            part.fail(name, values, wrong, "an integer from 0 on")
        return pc.fill_null(pc.cast(values, pa.int64()), MISSING).to_numpy(zero_copy_only=False)
    if not pa.types.is_string(values.type):
        raise ValueError(
            f"{part.path}: column {name} is of type {values.type}, expected hexadecimal strings or integers"
        )
    fits = pc.fill_null(pc.match_substring_regex(values, "^[0-9a-fA-F]{1,8}$"), True)
    wrong = ~fits.to_numpy(zero_copy_only=False)
    if wrong.any():
        part.fail(name, values, wrong, "one to eight hexadecimal digits, or nothing")
    padded = pc.utf8_lpad(pc.fill_null(values, "0"), width=8, padding="0").to_numpy(zero_copy_only=False)
    digits = _VALUE_OF_DIGIT[padded.astype("S8").view(np.uint8).reshape(-1, 8)]
    numbers = digits @ (16 ** np.arange(7, -1, -1, dtype=np.int64))
    return np.where(pc.is_null(values).to_numpy(zero_copy_only=False), MISSING, numbers)
