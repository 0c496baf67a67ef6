"""Values of Arrow columns as arrays: all spellings of a type are one type, and a bad value is named.

An integer may be of any width, a whole decimal, or text; text may be large, a view, a dictionary or
run-end encoded; lists may be large, views or of a fixed size; a time a timestamp of any unit and zone, a
date, a number or text. What loses something is an error: null, NaN, a fraction, more than int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MOST_WHOLE = 2.0**53
"""Floating numbers from here on are not all integers' own."""
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DECIMAL = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_ISO_ZONE = r"(Z|[+-][0-9]{2}:?[0-9]{2})$"
Column: TypeAlias = "pa.Array | pa.ChunkedArray"


@dataclass(frozen=True)
class Part:
    """Source of a table, for error messages: its first row's number, or that of each row."""

    path: Path | str
    unit: str
    first: int | np.ndarray | Callable[[int], int]

    def number(self, row: int) -> int:
        """Line or number of a row."""
        if isinstance(self.first, np.ndarray):
            return int(self.first[row])
        return row + self.first if isinstance(self.first, int) else self.first(row)

    def fail(self, column: str, values: Column, wrong: np.ndarray, expected: str) -> NoReturn:
        """Raise ValueError naming the first value that is wrong, (n,) bool."""
        row = int(wrong.nonzero()[0][0])
        try:
            value = values[row].as_py()
        except ValueError:  # nanoseconds, which Python's datetime lacks
            value = values[row]
        shown = "an empty field" if value is None or value == "" else repr(value)
        raise ValueError(f"{self.path}, {self.unit} {self.number(row)}: column {column} has {shown}, "
                         f"expected {expected}")  # fmt: skip

    def fail_type(self, column: str, kind: pa.DataType, expected: str) -> NoReturn:
        """Raise ValueError for a column of another type."""
        raise ValueError(f"{self.path}: column {column!r} is of type {kind}, expected {expected}")


def plain(values: Column) -> pa.Array:
    """The same values in the plain type of their kind."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        if isinstance(values, pa.ChunkedArray):  # of a type that has no larger offsets
            values = pa.concat_arrays([plain(chunk) for chunk in values.chunks])
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    kind = values.type
    if pa.types.is_dictionary(kind):
        return plain(values.dictionary).take(values.indices)
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(values))
    if is_list(kind):
        inner = plain_type(kind.value_type)
        return values if kind == pa.large_list(inner) else _large_list(values, inner)
    return values if kind == plain_type(kind) else values.cast(plain_type(kind))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The plain type of a kind."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if is_list(kind):
        return pa.large_list(plain_type(kind.value_type))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.string()
    return kind


def common_type(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
    """The plain type that takes the values of several, as of a column's shards; None for different kinds."""
    kinds = list(dict.fromkeys(map(plain_type, kinds)))
    if len(kinds) == 1:
        return kinds[0]
    if all(map(is_list, kinds)):
        inner = common_type([kind.value_type for kind in kinds])
        return inner and pa.large_list(inner)
    if all(map(is_integer, kinds)):
        return pa.int64()
    if all(is_integer(kind) or pa.types.is_string(kind) for kind in kinds):
        return pa.string()
    if all(map(pa.types.is_floating, kinds)):
        return pa.float64()
    if all(map(is_date, kinds)):
        return pa.timestamp("us")
    others = [kind for kind in kinds if not pa.types.is_null(kind)]  # a shard whose values are all missing
    return common_type(others) if len(others) < len(kinds) else None


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of lists."""
    return (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def _large_list(values: pa.Array, inner: pa.DataType) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(values), 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int64())
    mask = values.is_null() if values.null_count else None
    return pa.LargeListArray.from_arrays(offsets, plain(pc.list_flatten(values)).cast(inner), mask=mask)


def is_date(kind: pa.DataType) -> bool:
    """Whether a plain type holds dates."""
    return pa.types.is_date(kind) or pa.types.is_timestamp(kind)


def is_integer(kind: pa.DataType) -> bool:
    """Whether a plain type holds integers, as whole decimals do."""
    return pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale <= 0)


def integers(part: Part, name: str, values: Column, whole_floats: bool = False) -> np.ndarray:
    """(n,) int64: a column of integers, or of text that is plain integers.

    Raises ValueError naming the row of a null and of anything else, and the column of another type.
    """
    values = plain(values)
    kind, expected = values.type, "an int64"
    if kind == pa.int64() and not values.null_count:
        return values.to_numpy()
    if pa.types.is_null(kind) and len(values):
        part.fail(name, values, np.ones(len(values), bool), expected)
    if pa.types.is_string(kind):
        return _of_text(part, name, values)
    if pa.types.is_floating(kind):
        found = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
        wrong = ~(np.abs(found) < MOST_WHOLE) | (np.floor(found) != found)  # a missing value is NaN
        if wrong.any():
            part.fail(name, values, wrong, "an integer of less than 2**53")
        if not whole_floats:
            part.fail_type(
                name, kind, "integers: cast the column, or take whole numbers by whole_floats=true"
            )
        return found.astype(np.int64)
    if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind)):
        part.fail_type(name, kind, "integers" + (", or text of integers" if not is_list(kind) else ""))
    wrong = pc.is_null(values)
    try:
        found = values.cast(pa.int64())
    except pa.ArrowInvalid:
        fits = [value is None or (value == int(value) and -(2**63) <= value < 2**63)
                for value in values.to_pylist()]  # fmt: skip
        part.fail(name, values, ~np.array(fits, bool), expected)
    if values.null_count:
        part.fail(name, values, wrong.to_numpy(zero_copy_only=False), expected)
    return found.to_numpy()


def _of_text(part: Part, name: str, values: pa.Array) -> np.ndarray:
    # "007", "+7", "0x7" and "7 " are other words than "7": an integer is what is written as it is.
    try:
        found = values.cast(pa.int64())
        same = found.is_valid()
        for zero, width in (("0", 1), ("-0", 0)):  # what else the cast takes begins with these
            begins = pc.starts_with(values, zero)
            if pc.any(begins, min_count=0).as_py():
                short = pc.less_equal(pc.utf8_length(values), width)
                same = pc.and_(same, pc.fill_null(pc.or_(pc.invert(begins), short), False))
    except pa.ArrowInvalid:
        stripped = pc.utf8_trim_whitespace(values)
        if not values.equals(stripped):
            return _of_text(part, name, stripped)
        number = pc.fill_null(pc.match_substring_regex(values, r"^(0|-?[1-9][0-9]{0,18})$"), False)
        every = zip(number.to_pylist(), values.to_pylist(), strict=True)
        same = pa.array([ok and -(2**63) <= int(word) < 2**63 for ok, word in every])
    if not pc.all(same, min_count=0).as_py():
        wrong = ~same.to_numpy(zero_copy_only=False)
        part.fail(name, values, wrong, "an int64; ids that are words take ids=words or ids=hashed")
    return found.to_numpy()


def words(part: Part, name: str, values: Column) -> pa.Array:
    """(n,) text: a column of words, or of integers as they are written; names the row of a missing one."""
    values = plain(values)
    kind = values.type
    if not (pa.types.is_string(kind) or is_integer(kind) or pa.types.is_null(kind)):
        part.fail_type(name, kind, "words or integers")
    found = values if pa.types.is_string(kind) else values.cast(pa.string())
    found = pc.utf8_trim_whitespace(found)
    empty = pc.fill_null(pc.equal(found, ""), True)
    if pc.any(empty, min_count=0).as_py():
        part.fail(name, values, empty.to_numpy(zero_copy_only=False), "a word")
    return found


def numbers(part: Part, name: str, values: Column) -> np.ndarray:
    """(n,) float64: a column of finite numbers, or of text of these; names the row of anything else."""
    values = plain(values)
    expected = "a finite number"
    if pa.types.is_string(values.type):
        values = pc.utf8_trim_whitespace(values)
        try:
            found = values.cast(pa.float64())
        except pa.ArrowInvalid:
            found = pa.array([_number(word) for word in values.to_pylist()], pa.float64())
    elif pa.types.is_null(values.type) or is_number(values.type):
        found = values.cast(pa.float64(), safe=False)
    else:
        part.fail_type(name, values.type, "numbers")
    made = found.to_numpy(zero_copy_only=False)  # a missing value is NaN
    if not np.isfinite(made).all():
        part.fail(name, values, ~np.isfinite(made), expected)
    return made


def is_number(kind: pa.DataType) -> bool:
    """Whether a plain type holds numbers."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _number(word: str | None) -> float | None:
    try:
        return float(word) if word is not None and "_" not in word else None
    except ValueError:
        return None


def flags(part: Part, name: str, values: Column, threshold: float | None = None) -> np.ndarray:
    """(n,) int64 of 0 and 1: booleans, or numbers that are, or, with a `threshold`, whether they reach it."""
    values = plain(values)
    if threshold is not None and not pa.types.is_boolean(values.type):
        return (numbers(part, name, values) >= threshold).astype(np.int64)
    if pa.types.is_boolean(values.type):
        known = values.is_valid().to_numpy(zero_copy_only=False)
        found = pc.fill_null(values, False).to_numpy(zero_copy_only=False).astype(np.int64)
    elif pa.types.is_string(values.type):
        low = pc.utf8_lower(pc.utf8_trim_whitespace(values))
        place = pc.index_in(low, pa.array(["0", "1", "false", "true", "0.0", "1.0"]))
        known = place.is_valid().to_numpy(zero_copy_only=False)
        found = pc.fill_null(place, 0).to_numpy(zero_copy_only=False).astype(np.int64) % 2
    elif is_number(values.type) or pa.types.is_null(values.type):
        made = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        known, found = (made == 0) | (made == 1), np.nan_to_num(made, posinf=0, neginf=0).astype(np.int64)
    else:
        part.fail_type(name, values.type, "0 and 1, or booleans")
    if not known.all():
        part.fail(name, values, ~known, "0 or 1; other numbers take label_threshold=")
    return found


def lists(part: Part, name: str, values: Column) -> tuple[np.ndarray, np.ndarray]:
    """A column of lists of integers, or of dates in seconds: all values, and each list's length; int64.

    Raises ValueError naming the row of a null.
    """
    values = plain(values)
    if not is_list(values.type):
        part.fail_type(name, values.type, "lists of integers, a row for each sequence")
    if values.null_count:
        part.fail(name, values, values.is_null().to_numpy(zero_copy_only=False), "a list")
    lengths = pc.list_value_length(values).cast(pa.int64()).to_numpy()

    def row_of(value: int) -> int:
        return part.number(int(np.searchsorted(np.cumsum(lengths), value, side="right")))

    own, inner = Part(part.path, part.unit, row_of), values.flatten()
    found = times(own, name, inner).whole if is_date(inner.type) else integers(own, name, inner)
    return found.copy(), lengths.copy()


@dataclass(frozen=True)
class Times:
    """Times of some rows.

    Attributes:
        whole: (n,) int64, in the unit. fraction: (n,) float64 in [0, 1) that is cut off; None: none.
        is_dated: whether they are dates by themselves, so that their unit is certain.
    """

    whole: np.ndarray
    fraction: np.ndarray | None = None
    is_dated: bool = False


def times(part: Part, name: str, values: Column, unit: str = "", format: str = "") -> Times:
    """A column of times: numbers as they are; dates and text in `unit`, seconds by default, from 1970 (UTC).

    Raises ValueError naming the row of a missing time, and of one that is no time or beyond int64.
    """
    values = plain(values)
    kind = values.type
    if pa.types.is_string(kind):
        return _times_of_text(part, name, pc.utf8_trim_whitespace(values), unit, format)
    if is_date(kind):
        if values.null_count:
            part.fail(name, values, values.is_null().to_numpy(zero_copy_only=False), "a time")
        if pa.types.is_date32(kind):
            return _scaled(values.cast(pa.int32()).cast(pa.int64()).to_numpy() * 86_400, 1, unit)
        per_second = UNITS["ms" if pa.types.is_date64(kind) else kind.unit]
        return _scaled(values.cast(pa.int64()).to_numpy(), per_second, unit)
    if pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.scale > 0):
        return _rounded_down(part, name, values, values.cast(pa.float64()).to_numpy(zero_copy_only=False))
    if not (is_integer(kind) or pa.types.is_null(kind)):
        part.fail_type(name, kind, "times: numbers, timestamps, dates or text")
    return Times(integers(part, name, values))


def _times_of_text(part: Part, name: str, values: pa.Array, unit: str, format: str) -> Times:
    if not format:
        try:
            found = values.cast(pa.int64())
        except pa.ArrowInvalid:
            return _decimals_or_iso(part, name, values, unit)
        if found.null_count:
            part.fail(name, values, found.is_null().to_numpy(zero_copy_only=False), "a time")
        return Times(found.to_numpy())
    if "%f" in format:
        made = values.dictionary_encode()
        known = [_parsed(word, format) for word in made.dictionary.to_pylist()]
        found = pa.array(known, pa.int64()).take(made.indices)
    else:
        found = pc.strptime(values, format, "us", error_is_null=True).cast(pa.int64())
    if found.null_count:
        wrong = found.is_null().to_numpy(zero_copy_only=False)
        part.fail(name, values, wrong, f"a time of the format {format}")
    return _scaled(found.to_numpy(), UNITS["us"], unit)


def _parsed(word: str | None, format: str) -> int | None:
    """Microseconds."""
    try:
        found = datetime.strptime(word or "", format)
    except ValueError:
        return None
    since = (found if found.tzinfo else found.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 10**6 + since.microseconds


def _decimals_or_iso(part: Part, name: str, values: pa.Array, unit: str) -> Times:
    digits = pc.fill_null(pc.match_substring_regex(values, r"^-?[0-9]+$"), False)
    number = pc.fill_null(pc.match_substring_regex(values, _DECIMAL), False)
    if pc.any(number, min_count=0).as_py():
        if not pc.all(number).as_py():
            part.fail(name, values, ~number.to_numpy(zero_copy_only=False), "a number, as in other rows")
        whole = digits.to_numpy(zero_copy_only=False)
        exact = [int(word) if own else 0 for word, own in zip(values.to_pylist(), whole, strict=True)]
        beyond = np.array([not -(2**63) <= each < 2**63 for each in exact])
        if beyond.any():
            part.fail(name, values, beyond, "an int64")
        made = _rounded_down(part, name, values, np.array([float(word) for word in values.to_pylist()]))
        assert made.fraction is not None
        fraction = np.where(whole, 0.0, made.fraction)
        return Times(
            np.where(whole, np.array(exact, np.int64), made.whole), fraction if fraction.any() else None
        )
    # Arrow takes text with a zone for one type and text without for another, and some rows may have none.
    values = pc.replace_substring_regex(values, " ?(UTC|GMT)$", "Z")
    zoned = pc.fill_null(pc.match_substring_regex(values, _ISO_ZONE), False)
    date_only = pc.less_equal(pc.utf8_length(values), 10)
    zoned = pc.and_(zoned, pc.invert(pc.fill_null(date_only, False)))
    try:
        nothing = pa.scalar(None, pa.string())
        with_zone = pc.if_else(zoned, values, nothing).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        without = pc.if_else(zoned, nothing, values).cast(pa.timestamp("us")).cast(pa.int64())
    except pa.ArrowInvalid:
        wrong = np.array([not _is_iso(word) for word in values.to_pylist()])
        wrong = wrong if wrong.any() else np.ones(len(values), bool)
        part.fail(name, values, wrong, "a number or an ISO date; other dates take time_format=, as %d.%m.%Y")
    found = pc.coalesce(with_zone, without)
    if found.null_count:
        part.fail(name, values, found.is_null().to_numpy(zero_copy_only=False), "a time")
    return _scaled(found.to_numpy(), UNITS["us"], unit)


def _is_iso(word: str | None) -> bool:
    try:
        datetime.fromisoformat(word or "")
    except ValueError:
        return False
    return True


def _rounded_down(part: Part, name: str, values: pa.Array, found: np.ndarray) -> Times:
    whole = np.floor(found)
    wrong = ~((whole >= -(2.0**63)) & (whole < 2.0**63))
    if wrong.any():
        part.fail(name, values, wrong, "a finite time that fits into int64")
    fraction = found - whole
    return Times(whole.astype(np.int64), fraction if fraction.any() else None)


def _scaled(found: np.ndarray, per_second: int, unit: str) -> Times:
    """Times of `per_second` in `unit`; in seconds for none."""
    wanted = UNITS.get(unit, 1)
    if wanted >= per_second:
        limit = np.iinfo(np.int64).max // (wanted // per_second)
        if len(found) and int(np.abs(found).max()) > limit:
            raise ValueError(f"times do not fit into 64 bits as {unit}: choose a coarser time_unit")
        return Times(found * (wanted // per_second), None, True)
    ratio = per_second // wanted
    whole = found // ratio
    fraction = (found - whole * ratio) / ratio
    return Times(whole, fraction if fraction.any() else None, True)


def day_range(low: int, high: int, unit: str) -> str:
    """Two times as dates."""
    return f"{_date(low, unit)} to {_date(high, unit)}"


def _date(time: int, unit: str) -> str:
    """A time as a date, or as a year where it has none."""
    seconds = time / UNITS[unit]
    try:
        return datetime.fromtimestamp(seconds, UTC).date().isoformat()
    except (OverflowError, ValueError, OSError):
        year = 1970 + seconds / 31_556_952
        return f"the year {math.floor(year):,}".replace(",", "") if math.isfinite(year) else "never"


def found_unit(low: int, high: int) -> str:
    """The unit in which times between `low` and `high` are between 1990 and 2100; empty for none."""
    fits = [unit for unit, per in UNITS.items() if 631_152_000 * per <= low <= high < 4_102_444_800 * per]
    return fits[0] if fits else ""


def checked_unit(source: Any, low: int, high: int) -> str:
    """The unit of times between `low` and `high`, which nobody has named; seconds also from 1970 on.

    Raises ValueError where they have none.
    """
    unit = found_unit(low, high) or ("s" if 0 <= low <= high < 4_102_444_800 else "")
    if not unit:
        raise ValueError(
            f"{source}: times from {low} to {high} are of no one unit: as seconds they are "
            f"{day_range(low, high, 's')}; name it (time_unit=s, ms, us or ns, or step where they only order "
            "the events)"
        )
    return unit


def check_calendar(source: Any, low: int, high: int, unit: str) -> None:
    """Raise ValueError where times between `low` and `high` are no dates from 1900 to 2100."""
    if unit not in UNITS:
        raise ValueError(
            f"{source}: times have no unit, so they are no dates: name it (time_unit=s, ms, us or ns)"
        )
    seconds = low / UNITS[unit], high / UNITS[unit]
    other = found_unit(low, high)
    early = other not in ("", unit) and seconds[1] < 631_152_000
    if early or not -2_208_988_800 <= seconds[0] <= seconds[1] < 4_102_444_800:
        hint = ": name time_unit"
        if other:
            hint = f", and in {other} {day_range(low, high, other)}: name time_unit={other}"
        raise ValueError(f"{source}: times in {unit} are {day_range(low, high, unit)}{hint}")
