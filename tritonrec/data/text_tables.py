"""Delimited text and JSON lines as tables (`pyarrow.csv`, `pyarrow.json`), a block at a time.

A file is read in blocks of whole lines, so memory is that of a block, and an error names its line. Fields are
kept as text; `tritonrec.data.values` says what they may be.
"""

from __future__ import annotations

import ast
import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.json as pjson

from tritonrec.data.log_format import NONE, LogFormat, is_header, is_time
from tritonrec.data.numba_text import NUMBER, SKIPPED, read_fields
from tritonrec.data.values import Part

if TYPE_CHECKING:
    import pyarrow.fs as pafs

Item = TypeVar("Item")
BLOCK_BYTES = 1 << 20
"""Of text that are parsed at once."""
SEPARATOR = "\x1f"
"""Stands for a delimiter of several characters."""
SHOWN = 100
"""Characters of a line in an error."""
_NO_TEXT = {
    b"\x1f\x8b": "gzip, whose name ends in .gz", b"\x28\xb5\x2f\xfd": "Zstandard, whose name ends in .zst",
    b"PK\x03\x04": "an archive of zip or a workbook", b"\xfd7zXZ": "xz", b"PAR1": "Parquet",
    b"ARROW1\0\0": "Arrow", b"\xff\xff\xff\xff": "a stream of Arrow", b"FEA1\0": "the old Feather",
    b"Obj\x01": "Avro", b"\x89HDF": "HDF5", b"SQLite format 3\0": "a database of SQLite",
    b"BZh91AY&SY": "bzip2, whose name ends in .bz2",
}  # fmt: skip
UNREADABLE = (pa.ArrowException, OSError, UnicodeError)
"""Errors of a file that cannot be read."""


@dataclass(frozen=True)
class Block:
    """Whole lines of a file, the first one by its number from 1."""

    path: str
    line: int
    data: bytes
    quote: bytes = b""

    @cached_property
    def ends(self) -> int:
        """Ends of lines."""
        return int(np.count_nonzero(np.frombuffer(self.data, np.uint8) == ord("\n")))

    def line_of(self, row: int) -> int:
        """The line at which a row begins; blank lines are no rows."""
        at, open_quote = -1, False
        for number, text in enumerate(self.data.split(b"\n")):
            at += bool(text.strip(b"\r")) and not open_quote
            if at == row:
                return self.line + number
            open_quote ^= bool(self.quote) and text.count(self.quote) % 2 == 1
        return self.line

    def part(self) -> Part:
        """The block as a source of rows."""
        return Part(self.path, "line", self.line_of)

    def fail(self, row: int, message: str) -> NoReturn:
        """Raise ValueError for a row."""
        raise ValueError(f"{self.path}, line {self.line_of(row)}: {message}")


class TextFile:
    """A file of text; `names` are those of its columns, and `tables` has the rows."""

    def __init__(self, filesystem: pafs.FileSystem, path: str, format: LogFormat) -> None:
        self.filesystem, self.path, self.format = filesystem, path, format

    def blocks(self, size: int, quote: bytes = b"") -> Iterator[Block]:
        """The lines in blocks of about `size` bytes; fields of several lines are not cut."""
        rest, line = [], 1
        utf8 = self.format.encoding.lower().replace("_", "-") in ("utf-8", "utf8")
        try:
            with self.filesystem.open_input_stream(self.path, compression="detect") as stream:
                first = True
                while data := stream.read(size):
                    if first:
                        if kind := next(
                            (_NO_TEXT[magic] for magic in _NO_TEXT if data.startswith(magic)), ""
                        ):
                            raise ValueError(f"{self.path}: by its first bytes no text but {kind}")
                        data = data.removeprefix(b"\xef\xbb\xbf")
                    first = False
                    end = data.rfind(b"\n") + 1
                    if not end:
                        rest.append(data)
                        continue
                    whole = b"".join([*rest, memoryview(data)[:end]])
                    if quote and self.format.multiline:
                        whole, kept = _even(whole, quote)
                        rest = [kept, data[end:]]
                        if not whole:
                            continue
                    else:
                        rest = [data[end:]]
                    block = Block(self.path, line, whole if utf8 else self._as_utf8(whole, line), quote)
                    line += block.ends
                    yield block
                if last := b"".join(rest):
                    yield Block(self.path, line, last if utf8 else self._as_utf8(last, line), quote)
        except UNREADABLE as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _as_utf8(self, data: bytes, line: int) -> bytes:
        try:
            return data.decode(self.format.encoding).encode()
        except UnicodeError as error:
            raise ValueError(
                f"{self.path}, from line {line}: not {self.format.encoding} text: {error}"
            ) from error

    def first_line(self) -> tuple[int, str]:
        """Number and text of the first line that is not blank; ValueError for an empty file."""
        for block in self.blocks(1 << 14):
            for number, text in enumerate(block.data.split(b"\n"), block.line):
                if text.strip():
                    return number, self.decoded(text, number).rstrip("\r")
        raise ValueError(f"{self.path}: the file is empty")

    def decoded(self, text: bytes, line: int) -> str:
        """The text of a line; raises ValueError where it is not in the encoding."""
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path}, line {line}: not UTF-8 text, name its encoding= ({error})"
            ) from error


def _even(data: bytes, quote: bytes) -> tuple[bytes, bytes]:
    """Whole lines up to the last one that ends outside of quotes, and the lines after it."""
    end = len(data)
    while end and data.count(quote, 0, end) % 2:
        end = data.rfind(b"\n", 0, end - 1) + 1
    return data[:end], data[end:]


def ahead(every: Iterator[Item]) -> Iterator[Item]:
    """The same, the next one made on another thread meanwhile, if there are two."""
    end = object()
    two = [item for item in (next(every, end), next(every, end)) if item is not end]
    more = len(two) == 2  # of a file of one block a thread would take longer than the rows
    while two:
        yield two.pop(0)  # type: ignore[misc]
    if not more:
        return
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, every, end)
        while (found := coming.result()) is not end:
            coming = pool.submit(next, every, end)
            yield found  # type: ignore[misc]


class CsvFile(TextFile):
    """Lines of fields between delimiters."""

    @cached_property
    def layout(self) -> tuple[list[str], bool, str, str]:
        """Names, whether the first line has them, delimiter and quote; raises ValueError showing the line."""
        format = self.format
        line, text = self.first_line()
        if "\r" in text:
            raise ValueError(f"{self.path}, line {line}: lines end with \\r alone: end them with \\n")
        delimiter = format.delimiter_text or max(",\t;", key=text.count)
        if not format.delimiter and not text.count(delimiter):
            raise ValueError(
                f"{self.path}, line {line}: no comma, tab or semicolon between columns in {text[:SHOWN]!r}: "
                "name the delimiter="
            )
        spaced = delimiter in ("\t", "blanks", " ") or len(delimiter) > 1
        quote = ("" if spaced else '"') if format.quote == "auto" else format.quote.replace(NONE, "")
        fields = _fields(text, delimiter, quote)
        if format.columns:
            same = [field.strip() for field in fields] == list(format.columns)
            has_header = format.header == "yes" or (format.header == "auto" and same)
            names = list(format.columns)
            if not has_header and format.header == "auto" and is_header(fields, LogFormat()):
                raise ValueError(
                    f"{self.path}, line {line}: columns are named, and the first line looks like a header: "
                    f"{text[:SHOWN]!r}. Say header=yes or header=no"
                )
            if len(fields) != len(names):
                raise ValueError(
                    f"{self.path}, line {line}: {len(fields)} columns, but {len(names)} are named "
                    f"({', '.join(names)}): {text[:SHOWN]!r}"
                )
        else:
            has_header, names = True, [field.strip() for field in fields]
            if format.header == "no" or (format.header == "auto" and not is_header(names, format)):
                raise ValueError(
                    f"{self.path}, line {line}: the first line is no header that names the columns, and what "
                    f"stands where is not guessed: {text[:SHOWN]!r}. Name the columns in their order, as "
                    "columns=user,item,rating,timestamp; or header=yes and the columns by their names "
                    "(user=, item=, timestamp=)"
                )
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ValueError(f"{self.path}, line {line}: two columns are named {min(twice)!r}")
        return names, has_header, delimiter, quote

    @property
    def names(self) -> list[str]:
        """Of the columns, in their order."""
        return self.layout[0]

    def booleans(self) -> list[str]:
        """Text has none by type."""
        return []

    def tables(self, columns: Sequence[str], kinds: Sequence[int] = ()) -> Iterator[tuple[Part, pa.Table]]:
        """The columns as text, with nulls for missing fields; raises ValueError naming the line.

        Of `kinds` (`numba_text`) they are numbers, in blocks where all of them are written as most are. The
        next block is read and parsed on another thread.
        """
        return ahead(self._tables(columns, kinds))

    def _tables(self, columns: Sequence[str], kinds: Sequence[int]) -> Iterator[tuple[Part, pa.Table]]:
        names, has_header, delimiter, quote = self.layout
        missing = ["", *self.format.missing]
        convert = pcsv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), include_columns=list(columns),
            null_values=missing, strings_can_be_null=True,
        )  # fmt: skip
        is_long = len(delimiter.encode()) > 1
        bad: list[pcsv.InvalidRow] = []

        def refuse(row: pcsv.InvalidRow) -> str:
            bad.append(row)
            return "error"

        parse = pcsv.ParseOptions(
            delimiter=SEPARATOR if is_long else delimiter, quote_char=quote or False,
            newlines_in_values=True, invalid_row_handler=refuse,
        )  # fmt: skip
        # What divides fields is no part of a number.
        are_numbers = all(kinds) and len(set(columns)) == len(kinds) and not self.format.missing
        are_numbers &= set(delimiter + quote).isdisjoint("0123456789abcdefABCDEF-.")
        above = b""
        for block in self.blocks(BLOCK_BYTES, quote.encode()):
            if not block.data.endswith(b"\n") and is_time(names[-1], self.format):
                with suppress(csv.Error):  # what it says is an error below, or a long field
                    _check_whole(block, above.decode(errors="replace"), delimiter, quote)
            above = block.data[-TAIL_BYTES:]
            if has_header:
                block, has_header = _without_first(block), False
            if not block.data.strip():
                continue
            if are_numbers and (made := _numbers(block, names, delimiter, columns, kinds)) is not None:
                yield block.part(), made
                continue
            data = _one_character(block, delimiter) if is_long else block.data
            read = pcsv.ReadOptions(column_names=names, use_threads=False, block_size=len(data) + 1)
            try:
                table = pcsv.read_csv(pa.py_buffer(data), read, parse, convert)
            except pa.ArrowException as error:
                if bad:
                    row, width = (bad[0].number or 1) - 1, len(names)
                    block.fail(row, f"{bad[0].actual_columns} columns, but {width} are expected: "
                               f"{bad[0].text[:SHOWN]!r}")  # fmt: skip
                for number, text in enumerate(block.data.split(b"\n"), block.line):
                    self.decoded(text, number)
                raise ValueError(f"{self.path}, from line {block.line}: {error}") from error
            if not self.format.multiline:
                _check_lines(block, len(table))
            yield block.part(), table


def _numbers(
    block: Block, names: list[str], delimiter: str, columns: Sequence[str], kinds: Sequence[int]
) -> pa.Table | None:
    """The columns in one pass; None where a field is not written as most of its kind are."""
    text = block.data if block.data.endswith(b"\n") else block.data + b"\n"
    made = np.empty((len(columns), block.ends + 1), np.int64)
    floats, place = made.view(np.float64), {name: at for at, name in enumerate(columns)}
    own = [(kinds[place[name]], place[name]) if name in place else (SKIPPED, -1) for name in names]
    rows = read_fields(
        *(np.frombuffer(each, np.uint8) for each in (text, delimiter.encode())),
        ord(block.quote or b"\0"), *np.array(own).T.copy(), made, floats,
    )  # fmt: skip
    if rows < 0:
        return None
    pairs = zip(columns, kinds, strict=True)
    return pa.table({name: (floats if kind == NUMBER else made)[place[name], :rows] for name, kind in pairs})


def _fields(text: str, delimiter: str, quote: str) -> list[str]:
    if delimiter == "blanks":
        return text.split()
    if quote and len(delimiter) == 1:
        return next(csv.reader([text], delimiter=delimiter, quotechar=quote))
    return text.split(delimiter)


def _without_first(block: Block) -> Block:
    """The block without its first line that is not blank."""
    end = re.match(rb"\s*[^\n]*\n?", block.data).end()  # type: ignore[union-attr]
    return Block(block.path, block.line + block.data.count(b"\n", 0, end), block.data[end:], block.quote)


def _one_character(block: Block, delimiter: str) -> bytes:
    """The lines with one character in the place of a delimiter of several."""
    if SEPARATOR.encode() in block.data:
        raise ValueError(f"{block.path}, from line {block.line}: the text has the character {SEPARATOR!r}")
    if delimiter == "blanks":
        return re.sub(rb"[ \t]+", SEPARATOR.encode(), re.sub(rb"(?m)^[ \t]+|[ \t]+(?=\r?$)", b"", block.data))
    return block.data.replace(delimiter.encode(), SEPARATOR.encode())


def _check_whole(block: Block, above: str, delimiter: str, quote: str) -> None:
    """Raise ValueError for a time at the end of a file, without an end of line, that looks cut off."""
    others = [
        _fields(line.rstrip("\r"), delimiter, quote) for line in above.split("\n")[1:-1] if line.strip()
    ]
    last = _fields(block.data.decode(errors="replace"), delimiter, quote)
    whole = [len(fields[-1]) for fields in others if len(fields) == len(last)]
    if len(whole) > 1 and 0 < len(last[-1]) < min(whole):
        raise ValueError(
            f"{block.path}, line {block.line}: the file ends in the middle of a time, it seems: {last[-1]!r} "
            "is shorter than those above and has no end of line. If it is whole, end its line"
        )


def _check_lines(block: Block, rows: int) -> None:
    """Raise ValueError where a quoted field has several lines: most often a quote without its partner."""
    lines = block.ends + (not block.data.endswith(b"\n"))
    if lines != rows:
        lines = sum(bool(text.strip(b"\r")) for text in block.data.split(b"\n"))
    if lines == rows:
        return
    if b"\r" in block.data.replace(b"\r\n", b""):
        at = next(i for i, text in enumerate(block.data.split(b"\n")) if b"\r" in text.removesuffix(b"\r"))
        raise ValueError(f"{block.path}, line {block.line + at}: \\r within a line: end lines with \\n")
    odd = (bool(block.quote) and text.count(block.quote) % 2 for text in block.data.split(b"\n"))
    number = block.line + next((at for at, is_odd in enumerate(odd) if is_odd), 0)
    raise ValueError(
        f"{block.path}, line {number}: a field in quotes goes on in the next line: quote=none where "
        "quotes are plain characters, multiline=true where fields may have several lines"
    )


TAIL_BYTES = 1 << 13
"""Of the lines before the last one, to which it is compared."""

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
        for block in self.blocks(BLOCK_BYTES):
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
