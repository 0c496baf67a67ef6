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
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from tritonrec.data import text_files
from tritonrec.data.click_columns import LABEL, Columns, Part, as_log, labels
from tritonrec.data.ctr import ClickLog

COUNTS = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = (LABEL, *COUNTS, *CATEGORIES)
MISSING = 2**32
"""Id of a category that is missing."""

_VALUE_OF_DIGIT = np.zeros(256, np.int64)
for _digits, _first in ((b"0123456789", 0), (b"abcdef", 10), (b"ABCDEF", 10)):
    _VALUE_OF_DIGIT[list(_digits)] = np.arange(_first, _first + len(_digits))


class CriteoColumns:
    """Criteo's format, as `tritonrec.data.click_columns` takes it."""

    dense, features = COUNTS, CATEGORIES

    def arrays(self, part: Part, table: pa.Table) -> Columns:
        columns = {name: table.column(name).combine_chunks() for name in COLUMNS[1:]}
        return (
            labels(part, table),
            np.stack([_count(part, name, columns[name]) for name in COUNTS], 1),
            np.stack([_category(part, name, columns[name]) for name in CATEGORIES], 1),
        )


CRITEO = CriteoColumns()


def read_tsv(path: Path | str) -> ClickLog:
    """Read text in Criteo's format: a file, or a folder or glob of them; the errors of `tsv_parts`."""
    return as_log(CRITEO, _text_parts(path), path)


def tsv_parts(path: Path | str) -> Iterator[pa.Table]:
    """Rows of text in Criteo's format, as they are in Parquet, in parts and in the order of lines.

    Files may be compressed (.gz, .bz2, .zst, .lz4), and at a URL. Raises FileNotFoundError for a path that
    does not exist, and ValueError naming file, line and column of a bad field.
    """
    for part, table in _text_parts(path):
        columns = {name: table.column(name).combine_chunks() for name in COLUMNS[1:]}
        made: dict[str, Any] = {LABEL: labels(part, table)}
        for name in COUNTS:
            _count(part, name, columns[name])
            made[name] = pc.cast(columns[name], pa.int64())
        made |= {name: _category(part, name, columns[name]) for name in CATEGORIES}
        yield pa.table(made)


def _text_parts(path: Path | str) -> Iterator[tuple[Part, pa.Table]]:
    filesystem, files = text_files.text_files(str(path))
    for file in files:
        first = 1
        try:
            with filesystem.open_input_stream(file, compression="detect") as stream:
                for batch in _text(stream):
                    yield Part(Path(file), "line", first), pa.Table.from_batches([batch])
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


def _count(part: Part, name: str, values: pa.Array) -> np.ndarray:
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


def _category(part: Part, name: str, values: pa.Array) -> np.ndarray:
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
