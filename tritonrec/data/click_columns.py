"""Clicks: a label, dense features and categories, an impression each row, from files or a frame.

A format says which columns are dense features and which are categories (`LogFormat`, `presets.CRITEO`); the
plain one needs no names but ``label``, and takes columns with types::

    label   age    price     site   device      0 or 1, or a boolean
    0       31.0   1.25      10     4           floating: dense features, finite, read as float32
    1       22.0   0.5       11     4           integers: categories, any int64, one id each

In Criteo's format a count x becomes log(1 + max(x, 0)), a missing one 0, and a category of up to eight
hexadecimal digits its number, a missing one 2**32. Files are in their natural order and rows in the order of
time: the last tenth is held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritonrec.data import numba_text
from tritonrec.data.ctr import ClickLog, num_training_rows
from tritonrec.data.log_format import LogFormat, named
from tritonrec.data.numba_text import MISSING, read_hexadecimal
from tritonrec.data.tables import Log, common_schema, is_metadata, tables_of
from tritonrec.data.values import Part, filled, flags, integers, is_integer, numbers, plain, word_ids

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Labels (n,) int64, dense (F, n) float32, categories (C, n) int64."""
_LOGS = np.log1p(np.arange(1 << 12)).astype(np.float32)
"""Of the smallest counts, as most are."""


@dataclass(frozen=True)
class ClickColumns:
    """The columns of a format, and what they become.

    Args:
        label, dense, features: names. format: how values are read.
        words: for ``ids="words"`` a vocabulary for each feature; made where it is missing.
    """

    label: str
    dense: tuple[str, ...]
    features: tuple[str, ...]
    format: LogFormat = field(default_factory=LogFormat)
    words: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all columns."""
        return self.label, *self.dense, *self.features

    @classmethod
    def of(
        cls,
        path: object,
        schema: pa.Schema,
        format: LogFormat | None = None,
        words: dict[str, Any] | None = None,
    ) -> ClickColumns:
        """Those of a format, or where it names no categories by the types of a dataset's columns.

        Raises ValueError for a dataset without labels or without categories, and naming a column of another
        type.
        """
        format = format or LogFormat()
        own, found = {} if words is None else words, [name for name in schema.names if not is_metadata(name)]
        label = named(found, format.label[0], str(path)) if format.label else "label"
        if format.is_clicks:
            if len(format.label) != 1:
                raise ValueError(
                    f"a log of clicks has one label, and {len(format.label)} are named: name it (label=)"
                )
            dense, features = ([named(found, name, str(path)) for name in each]
                               for each in (format.dense, format.categories))  # fmt: skip
            return cls(label, tuple(dense), tuple(features), format, own)
        dense, features = [], []
        for name in found:
            kind = schema.field(name).type
            if name == label:
                continue
            if pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.scale > 0):
                dense.append(name)
            elif is_integer(kind) or (pa.types.is_string(kind) and format.ids != "integers"):
                features.append(name)
            else:
                raise ValueError(
                    f"{path}: column {name!r} is of type {kind}, expected integers for a category or "
                    "floating numbers for a dense feature; name the columns that are meant (label=, dense=, "
                    "categories=), and for words say ids=words or ids=hashed"
                )
        if label not in found or not features:
            raise ValueError(
                f"{path}: clicks need a column {label!r} and columns of integers, found "
                f"{', '.join(found) or 'no columns'}"
            )
        return cls(label, tuple(dense), tuple(features), format, own)

    def arrays(self, part: Part, table: pa.Table, order: Any = slice(None)) -> Columns:
        """The columns of rows, in an order; raises ValueError naming part, row and column of a bad value."""
        dense = np.empty((len(self.dense), len(table)), np.float32)
        for own, name in zip(dense, self.dense, strict=True):
            own[:] = self._dense(part, name, table.column(name))[order]
        ids = np.empty((len(self.features), len(table)), np.int64)
        for each, name in zip(ids, self.features, strict=True):
            each[:] = self._ids(part, name, table.column(name))[order]
        return self.labels(part, table)[order], dense, ids

    def kinds(self) -> list[int]:
        """Of the columns in text (`numba_text`)."""
        format, kind = self.format, numba_text
        label = kind.FLAG if format.label_threshold is None else kind.NUMBER
        dense = kind.COUNT if format.log_counts else kind.NUMBER
        ids = kind.INTEGER if format.ids == "integers" and not self.words else kind.SKIPPED
        features = [kind.HEXADECIMAL if name in format.hexadecimal else ids for name in self.features]
        return [label, *[dense] * len(self.dense), *features]

    def labels(self, part: Part, table: pa.Table) -> np.ndarray:
        """(n,) int64: the column of labels."""
        return flags(part, self.label, table.column(self.label), self.format.label_threshold)

    def _dense(self, part: Part, name: str, column: pa.ChunkedArray) -> np.ndarray:
        if not self.format.log_counts:
            values = plain(column)
            found = (
                numbers(part, name, values)
                if not pa.types.is_floating(values.type)
                else (values.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False))
            )
            with np.errstate(over="ignore"):
                found = found.astype(np.float32)
            if not np.isfinite(found).all():  # a missing value is NaN
                part.fail(name, values, ~np.isfinite(found), "a finite number of float32")
            return found
        values = plain(column)
        if pa.types.is_string(values.type):
            try:
                counts = values.cast(pa.int64())
            except pa.ArrowInvalid:
                number = pc.fill_null(pc.match_substring_regex(values, r"^-?[0-9]{1,18}$"), True)
                part.fail(name, values, ~number.to_numpy(zero_copy_only=False), "an integer or nothing")
        else:
            counts = values
            if not (
                is_integer(values.type) or pa.types.is_floating(values.type) or pa.types.is_null(values.type)
            ):
                part.fail_type(name, values.type, "numbers")
        counts = filled(counts, 0)
        if counts.type == pa.int64():
            whole = counts.to_numpy()
            logs = _LOGS.take(whole, mode="clip")
            if whole.max(initial=0) >= len(_LOGS):
                large = whole >= len(_LOGS)
                logs[large] = np.log1p(whole[large]).astype(np.float32)
            return logs
        found = counts.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        if not np.isfinite(found).all():
            part.fail(name, values, ~np.isfinite(found), "a finite number")
        return np.log1p(np.maximum(found, 0)).astype(np.float32)

    def _ids(self, part: Part, name: str, column: pa.ChunkedArray) -> np.ndarray:
        if name in self.format.hexadecimal:
            return _hexadecimal(part, name, plain(column))
        if self.format.ids == "integers" and name not in self.words:
            return integers(part, name, column, self.format.whole_floats)
        return word_ids(part, name, column, self.format.ids, self.words, name)


def _hexadecimal(part: Part, name: str, values: pa.Array) -> np.ndarray:
    """(n,) int64: integers from 0 on, or the numbers of hexadecimal digits; `MISSING` where there is none."""
    if is_integer(values.type) or pa.types.is_null(values.type):
        found = filled(values if values.type == pa.int64() else values.cast(pa.int64()), MISSING).to_numpy()
        if found.min(initial=0) < 0:
            part.fail(name, values, found < 0, "an integer from 0 on")
        return found
    if not pa.types.is_string(values.type):
        part.fail_type(name, values.type, "hexadecimal strings or integers")
    words = filled(values, "0")
    found = np.empty(len(words), np.int64)
    if len(words):
        _valid, ends, text = words.buffers()
        digits = np.frombuffer(text, np.uint8)
        offsets = np.frombuffer(ends, np.int32)[words.offset :][: len(words) + 1]
        digits.flags.writeable = offsets.flags.writeable = False  # one type for the kernel
        if (row := read_hexadecimal(digits, offsets, found)) < len(words):
            wrong = np.arange(len(words)) == row
            part.fail(name, values, wrong, "one to eight hexadecimal digits, or nothing")
    if values.null_count:
        found[values.is_null().to_numpy(zero_copy_only=False)] = MISSING
    return found


class Clicks(Log):
    """A log of clicks; vocabularies are those of categories."""

    def columns(self) -> ClickColumns:
        """The columns; the errors of `ClickColumns.of`, and ValueError for shards that do not agree."""
        if all(hasattr(file, "schema") for file in self.opened):
            schemas: list[pa.Schema] = [file.schema for file in self.opened]  # type: ignore[attr-defined]
            names = (*self.format.label, *self.format.dense, *self.format.categories)
            own = [named(schemas[0].names, name, self.opened[0].path) for name in names]
            wanted = own if self.format.is_clicks else None
            schema = common_schema([file.path for file in self.opened], schemas, wanted)
        elif self.format.is_clicks:
            schema = pa.schema([(name, pa.string()) for name in self.opened[0].names])
        else:
            raise ValueError(
                f"{self.name}: text has no types: name the columns of clicks (label=, dense=, categories=)"
            )
        return ClickColumns.of(self.name, schema, self.format, self.words)

    def parts(self, columns: ClickColumns) -> Iterator[tuple[Part, pa.Table]]:
        """The rows in parts, in order; raises ValueError for a file without a column."""
        for file in self.opened:
            found = [named(file.names, name, file.path) for name in columns.names]
            for part, table in tables_of(file, found, columns.kinds()):
                yield part, table.rename_columns(columns.names)

    def tables(self) -> Iterator[pa.Table]:
        """The rows in plain columns of one type each, as `ClickStream` takes them."""
        columns = self.columns()
        for part, table in self.parts(columns):
            labels, dense, ids = columns.arrays(part, table)
            made: dict[str, Any] = {columns.label: labels.astype(np.int8)}
            made |= zip(columns.dense, dense, strict=True)
            made |= zip(columns.features, ids, strict=True)
            yield pa.table(made)

    def read(self) -> ClickLog:
        """The whole log; raises the errors of `columns` and `parts`, and ValueError naming a bad value."""
        from tritonrec.data.vocabulary import kept_on_error

        columns = self.columns()
        with kept_on_error(columns.words):
            found = [columns.arrays(part, table) for part, table in self.parts(columns)]
        rows = sum(len(labels) for labels, _dense, _ids in found)
        if not rows:
            raise ValueError(f"{self.name}: holds no impressions")
        labels, dense, ids = (
            np.ascontiguousarray(np.concatenate(arrays, axis=-1).T) for arrays in zip(*found, strict=True)
        )
        return ClickLog(dense, ids, labels, columns.features, num_training_rows(rows))
