"""JSON lines as tables (`pyarrow.json`), a block at a time."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.json as pjson

from tritonrec.data import text_tables
from tritonrec.data.text_tables import SHOWN, Block, TextFile
from tritonrec.data.values import Part

FIRST_BYTES, FIRST_LINES = 1 << 18, 1000
"""Of a file, where its fields are found: a field may be missing in the first object."""


TWICE = type("Twice", (), {"__str__": lambda _: "a field twice"})()
"""Value of a field that an object has twice."""


class JsonFile(TextFile):
    """An object a line; also as Python prints dictionaries, as in the older files of UCSD."""

    @cached_property
    def first(self) -> dict[str, Any]:
        """The fields of the first objects, with the first value of each that is not null."""
        found: dict[str, Any] = {}
        for block in self.blocks(FIRST_BYTES):
            lines = block.data.split(b"\n")[:FIRST_LINES]
            for number, text in enumerate(lines, block.line):
                if text.strip():
                    for name, value in self._object(text, number).items():
                        if found.get(name) is None:
                            found[name] = value
            if found:
                return found
        raise ValueError(f"{self.path}: the file is empty")

    def _object(self, line: bytes, number: int) -> dict[str, Any]:
        text = self.decoded(line, number).rstrip("\r")
        found = self._load(text, number)
        if not isinstance(found, dict):
            raise ValueError(f"{self.path}, line {number}: expected an object a line, got {text[:SHOWN]!r}")
        return found

    @cached_property
    def is_python(self) -> bool:
        """Whether lines are printed dictionaries of Python."""
        return re.match(r"\s*\{\s*u?'", self.first_line()[1]) is not None

    @property
    def names(self) -> list[str]:
        """Of the first objects, in the order in which they appear; objects behind them may have more."""
        return list(self.first)

    def booleans(self) -> list[str]:
        """Fields that are true or false in the first objects."""
        return [name for name, value in self.first.items() if isinstance(value, bool)]

    def tables(self, columns: Sequence[str]) -> Iterator[tuple[Part, pa.Table]]:
        """The fields, null where an object has none; raises ValueError naming the line."""
        kinds: dict[type, pa.DataType] = {
            str: pa.string(),
            int: pa.int64(),
            float: pa.float64(),
            bool: pa.bool_(),
        }
        known = {name: kinds.get(type(self.first.get(name))) for name in columns}
        schema = pa.schema([(name, kind) for name, kind in known.items() if kind is not None])
        parse = pjson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        is_plain = not self.is_python and len(schema) == len(columns)
        for block in self.blocks(text_tables.BLOCK_BYTES):
            if not block.data.strip():
                continue
            table = self._arrow(block, parse, columns) if is_plain else None
            yield block.part(), self._slow(block, columns) if table is None else table

    def _arrow(self, block: Block, parse: pjson.ParseOptions, columns: Sequence[str]) -> pa.Table | None:
        """The block by Arrow; None where types are not those of the first line, or lines are none."""
        read = pjson.ReadOptions(use_threads=False, block_size=len(block.data) + 1)
        try:
            table = pjson.read_json(pa.py_buffer(block.data), read, parse)
        except pa.ArrowException:
            return None
        lines = sum(bool(text.strip()) for text in block.data.split(b"\n"))
        return table.select(list(columns)) if len(table) == lines else None

    def _slow(self, block: Block, columns: Sequence[str]) -> pa.Table:
        """The block line by line."""
        found: list[list[Any]] = [[] for _ in columns]
        for number, text in enumerate(block.data.split(b"\n"), block.line):
            if text.strip():
                value = self._object(text, number)
                for own, name in zip(found, columns, strict=True):
                    own.append(value.get(name))
                    if own[-1] is TWICE:
                        raise ValueError(f"{self.path}, line {number}: the object has {name!r} twice")
        line_of = block.line_of
        return pa.table({name: self._array(name, own, line_of)
                         for name, own in zip(columns, found, strict=True)})  # fmt: skip

    def _array(self, name: str, values: list[Any], line_of: Callable[[int], int]) -> pa.Array:
        """Values of JSON; text and integers, and integers beyond 64 bits, as text."""
        try:
            return pa.array(values)
        except UnicodeEncodeError as error:
            row = next(at for at, value in enumerate(values) if value == error.object)
            raise ValueError(
                f"{self.path}, line {line_of(row)}: column {name} is no text: {error}"
            ) from error
        except (pa.ArrowException, OverflowError):
            for row, value in enumerate(values):
                if value is not None and type(value) not in (str, int):
                    shown = json.dumps(value, default=str)
                    raise ValueError(
                        f"{self.path}, line {line_of(row)}: column {name} has {shown}, and "
                        "values of another type in other lines: write it alike"
                    ) from None
            return pa.array([None if value is None else str(value) for value in values])

    def _load(self, text: str, line: int) -> Any:
        load: Callable[[str], Any] = partial(json.loads, object_pairs_hook=_once)
        if re.match(r"\s*\{\s*u?'", text):
            load = ast.literal_eval
        try:
            return load(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"{self.path}, line {line}: no JSON object: {error}; expected one a line, "
                f"got {text[:SHOWN]!r}"
            ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a field that it has twice is `TWICE`: some readers take the first, and some the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        found |= {name: TWICE for name in found if names.count(name) > 1}
    return found
