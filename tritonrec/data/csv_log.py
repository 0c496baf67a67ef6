"""Any interaction log as text: one row a line, columns user, item, timestamp and maybe rating.

The first line decides between comma, tab and semicolon. A first line without any number is a header, with
columns in any order and others between them; without a header the order is fixed::

    user_id:token   item_id:token   rating:float   timestamp:float
    196             242             3              881250949

    196,242,881250949,3

Names match regardless of case, ``_id`` and a suffix after a colon. A column of plain int64 numbers is taken
as ids. The values of any other column are strings, numbered 0, 1, 2, ... in the order of their first
occurrence, so the ids stay the same when rows are appended. Timestamps are integers or decimals; decimals
order the rows exactly and are then rounded down.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NoReturn

import numpy as np

from tritonrec.data.interactions import Interactions
from tritonrec.data.text_files import opened

PART_ROWS = 1 << 15

_NAMES = {
    "user": ("user", "userid", "uid", "customer"),
    "item": ("item", "itemid", "iid", "movie", "movieid", "video", "videoid", "product", "productid"),
    "timestamp": ("timestamp", "time", "ts", "unixtime", "timems"),
    "rating": ("rating", "score", "stars"),
}
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_INT64 = range(-(2**63), 2**63)


def read(path: Path | str) -> Interactions:
    """Read a log, local or at a URL, compressed (.gz, .bz2, .zst, .lz4) or not; its format is drawn above.

    Raises FileNotFoundError for a missing file, and ValueError naming file, line and column of a bad field.
    """
    (rows,) = _chunks(path, sys.maxsize)
    log = _log(rows, _Numbering.of([rows]))
    if log.fraction is None:
        return log
    order = np.lexsort((log.fraction, log.timestamp))
    rating = None if log.rating is None else log.rating[order]
    return Interactions(log.user[order], log.item[order], log.timestamp[order], rating)


def parts(path: Path | str) -> Iterator[Interactions]:
    """The log in parts, in the order of its lines; raises the errors of `read`.

    The file is read twice: whether ids are words is known at its end. In memory are a part, and the distinct
    words where there are any. Rows of one timestamp whose decimals differ have them as ``fraction``.
    """
    numbering = _Numbering.of(_chunks(path, PART_ROWS))
    for rows in _chunks(path, PART_ROWS):
        yield _log(rows, numbering)


@dataclass
class _Rows:
    """Fields of some lines; `ratings` is empty for a log without them."""

    users: list[str] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    fractions: list[float] = field(default_factory=list)
    ratings: list[float] = field(default_factory=list)


@dataclass
class _Numbering:
    """Numbers of the words of each column, None for plain numbers, and whether timestamps have decimals."""

    users: dict[str, int] | None
    items: dict[str, int] | None
    fractions: bool

    @classmethod
    def of(cls, chunks: Iterable[_Rows]) -> _Numbering:
        """Of a whole log, without numbers yet."""
        users = items = True
        fractions = False
        for rows in chunks:
            users = users and _are_integers(rows.users)
            items = items and _are_integers(rows.items)
            fractions = fractions or any(rows.fractions)
        return cls(None if users else {}, None if items else {}, fractions)


def _log(rows: _Rows, numbering: _Numbering) -> Interactions:
    return Interactions(
        _identifiers(rows.users, numbering.users),
        _identifiers(rows.items, numbering.items),
        np.array(rows.times, dtype=np.int64),
        np.array(rows.ratings, dtype=np.float64) if rows.ratings else None,
        fraction=np.array(rows.fractions) if numbering.fractions else None,
    )


def _chunks(path: Path | str, most: int) -> Iterator[_Rows]:
    """The rows of a file, `most` at a time; at least one."""
    columns: dict[str, int] = {}
    chunk, line, width, found = _Rows(), 1, 0, False
    try:
        with opened(path) as file:
            blank, first = [], ""
            for first in file:
                if first.strip():
                    break
                blank.append(first)
            delimiter = _delimiter(path, first if first.strip() else "")
            rows = csv.reader(chain(blank, [first], file), delimiter=delimiter, strict=True)
            for fields in rows:
                line = rows.line_num
                if not any(field.strip() for field in fields):
                    continue
                if not columns:
                    columns, is_header = _columns(path, line, fields)
                    width = len(fields)
                    if is_header:
                        continue
                if len(fields) != width:
                    _fail(path, line, f"{len(fields)} columns, but the first line has {width}")
                chunk.users.append(_identifier(path, line, "user", fields[columns["user"]]))
                chunk.items.append(_identifier(path, line, "item", fields[columns["item"]]))
                time, fraction = _timestamp(path, line, fields[columns["timestamp"]])
                chunk.times.append(time)
                chunk.fractions.append(fraction)
                if "rating" in columns:
                    chunk.ratings.append(_rating(path, line, fields[columns["rating"]]))
                if len(chunk.users) == most:
                    yield chunk
                    chunk, found = _Rows(), True
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error
    except csv.Error as error:
        raise ValueError(f"{path}, after line {line}: {error}") from error
    if chunk.users:
        yield chunk
    elif not found:
        raise ValueError(f"{path}: holds no interactions")


def _fail(path: Path | str, line: int, message: str) -> NoReturn:
    raise ValueError(f"{path}, line {line}: {message}")


def _delimiter(path: Path | str, first_line: str) -> str:
    if not first_line:
        raise ValueError(f"{path}: the file is empty")
    best = max(",\t;", key=first_line.count)
    if first_line.count(best) == 0:
        _fail(path, 1, f"no comma, tab or semicolon between columns in {first_line.strip()[:60]!r}")
    return best


def _columns(path: Path | str, line: int, fields: list[str]) -> tuple[dict[str, int], bool]:
    """Position of each column, and whether the first row is a header."""
    if any(_is_number(field) for field in fields):
        if len(fields) not in (3, 4):
            _fail(
                path,
                line,
                f"{len(fields)} columns and no header: expected user, item, timestamp and maybe rating, "
                "or a header that names them",
            )
        return {name: at for at, name in enumerate(list(_NAMES)[: len(fields)])}, False
    columns: dict[str, int] = {}
    for at, heading in enumerate(fields):
        plain = heading.strip().lower().partition(":")[0].replace("_", "").replace(" ", "")
        for name, known in _NAMES.items():
            if plain in known:
                if name in columns:
                    _fail(path, line, f"two columns for {name}: {fields[columns[name]]!r} and {heading!r}")
                columns[name] = at
    missing = [name for name in ("user", "item", "timestamp") if name not in columns]
    if missing:
        _fail(
            path,
            line,
            f"the header has no column {' and no column '.join(missing)}: found {', '.join(fields)}",
        )
    return columns, True


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _identifier(path: Path | str, line: int, column: str, field: str) -> str:
    field = field.strip()
    if not field:
        _fail(path, line, f"column {column}: the id is empty")
    return field


def _are_integers(values: list[str]) -> bool:
    """Whether all are plain int64 numbers."""
    # Python reads "007", "+7" and "1_0" as numbers, but they are other ids than 7 and 10.
    return all(_INTEGER.fullmatch(value) and int(value) in _INT64 for value in values)


def _identifiers(values: list[str], numbers: dict[str, int] | None) -> np.ndarray:
    """(N,) int64: the numbers themselves, or the number of each string in the order of first occurrence."""
    if numbers is None:
        return np.array([int(value) for value in values], dtype=np.int64)
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def _timestamp(path: Path | str, line: int, field: str) -> tuple[int, float]:
    """A timestamp rounded down to an integer, and the fraction that was cut off."""
    field = field.strip()
    if _INTEGER.fullmatch(field):
        whole, fraction = int(field), 0.0
    else:
        try:
            value = float(field)
            whole, fraction = math.floor(value), value - math.floor(value)
        except (ValueError, OverflowError):
            _fail(path, line, f"column timestamp: {field!r} is not a number")
    if whole not in _INT64:
        _fail(path, line, f"column timestamp: {field} does not fit into 64 bits")
    return whole, fraction


def _rating(path: Path | str, line: int, field: str) -> float:
    try:
        value = float(field)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        _fail(path, line, f"column rating: {field.strip()!r} is not a finite number")
    return value
