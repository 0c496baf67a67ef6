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
from pathlib import Path
from typing import NoReturn

import numpy as np

from tritonrec.data.interactions import Interactions

_NAMES = {
    "user": ("user", "userid", "uid", "customer"),
    "item": ("item", "itemid", "iid", "movie", "movieid", "video", "videoid", "product", "productid"),
    "timestamp": ("timestamp", "time", "ts", "unixtime", "timems"),
    "rating": ("rating", "score", "stars"),
}
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_INT64 = range(-(2**63), 2**63)


def read(path: Path | str) -> Interactions:
    """Read a log; the format is described in the module's docstring.

    Raises FileNotFoundError for a missing file, and ValueError naming file, line and column of a bad field.
    """
    path = Path(path)
    columns: dict[str, int] = {}
    users: list[str] = []
    items: list[str] = []
    times: list[int] = []
    fractions: list[float] = []
    ratings: list[float] = []
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = _delimiter(path, next((text for text in file if text.strip()), ""))
            file.seek(0)
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            width = 0
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
                users.append(_identifier(path, line, "user", fields[columns["user"]]))
                items.append(_identifier(path, line, "item", fields[columns["item"]]))
                time, fraction = _timestamp(path, line, fields[columns["timestamp"]])
                times.append(time)
                fractions.append(fraction)
                if "rating" in columns:
                    ratings.append(_rating(path, line, fields[columns["rating"]]))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error
    except csv.Error as error:
        raise ValueError(f"{path}, after line {line}: {error}") from error
    if not users:
        raise ValueError(f"{path}: holds no interactions")

    timestamp = np.array(times, dtype=np.int64)
    rows_in_time = np.lexsort((np.array(fractions), timestamp)) if any(fractions) else slice(None)
    return Interactions(
        _identifiers(users)[rows_in_time],
        _identifiers(items)[rows_in_time],
        timestamp[rows_in_time],
        np.array(ratings, dtype=np.float64)[rows_in_time] if "rating" in columns else None,
    )


def _fail(path: Path, line: int, message: str) -> NoReturn:
    raise ValueError(f"{path}, line {line}: {message}")


def _delimiter(path: Path, first_line: str) -> str:
    if not first_line:
        raise ValueError(f"{path}: the file is empty")
    best = max(",\t;", key=first_line.count)
    if first_line.count(best) == 0:
        _fail(path, 1, f"no comma, tab or semicolon between columns in {first_line.strip()[:60]!r}")
    return best


def _columns(path: Path, line: int, fields: list[str]) -> tuple[dict[str, int], bool]:
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
    for at, field in enumerate(fields):
        plain = field.strip().lower().partition(":")[0].replace("_", "").replace(" ", "")
        for name, known in _NAMES.items():
            if plain in known:
                if name in columns:
                    _fail(path, line, f"two columns for {name}: {fields[columns[name]]!r} and {field!r}")
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


def _identifier(path: Path, line: int, column: str, field: str) -> str:
    field = field.strip()
    if not field:
        _fail(path, line, f"column {column}: the id is empty")
    return field


def _identifiers(values: list[str]) -> np.ndarray:
    """(N,) int64: the numbers themselves, or the number of each string in the order of first occurrence."""
    # Python reads "007", "+7" and "1_0" as numbers, but they are other ids than 7 and 10.
    if all(_INTEGER.fullmatch(value) and int(value) in _INT64 for value in values):
        return np.array([int(value) for value in values], dtype=np.int64)
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def _timestamp(path: Path, line: int, field: str) -> tuple[int, float]:
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


def _rating(path: Path, line: int, field: str) -> float:
    try:
        value = float(field)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        _fail(path, line, f"column rating: {field.strip()!r} is not a finite number")
    return value
