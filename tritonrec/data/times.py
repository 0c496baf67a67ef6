"""Columns of times, and of lists of integers or times, as arrays; a bad value is named.

A time is a number, a timestamp of any unit and zone, a date, or text.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritonrec.data.values import MOST_WHOLE_BITS, Column, Part, integers, is_date, is_integer, is_list

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DECIMAL = r"^-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_ISO_ZONE = r"^.{11,}(Z|[+-][0-9]{2}(:?[0-9]{2})?)$"
_SPELLED_OUT = {
    "%D": "%m/%d/%y", "%e": "%d", "%F": "%Y-%m-%d", "%h": "%b", "%k": "%H", "%l": "%I", "%R": "%H:%M",
    "%r": "%I:%M:%S %p", "%T": "%H:%M:%S",
}  # fmt: skip
"""Directives of Arrow in those of Python, which knows the calendar."""
_SOME_DAY = datetime(2023, 8, 17, 16, 5, 9, tzinfo=UTC)


@dataclass(frozen=True)
class Times:
    """Times of some rows.

    Attributes:
        whole: (n,) int64, in the unit. fraction: (n,) float64 in [0, 1) that is cut off; None: none.
        is_dated: whether they are dates by themselves, so that their unit is certain. is_zoned: of dates,
            whether they say of which zone they are.
    """

    whole: np.ndarray
    fraction: np.ndarray | None = None
    is_dated: bool = False
    is_zoned: bool = False

    @property
    def kind(self) -> str:
        """In words; times of several kinds do not say in which order they are."""
        return f"dates with{'' if self.is_zoned else 'out'} a zone" if self.is_dated else "numbers"


def times(part: Part, name: str, values: Column, unit: str = "", format: str = "") -> Times:
    """A column of times: numbers as they are; dates and text in `unit`, seconds by default, from 1970 (UTC).

    Raises ValueError naming the row of a missing time, and of one that is no time or beyond int64.
    """
    values = part.plain(name, values)
    if format and is_integer(values.type):  # 20240501 for %Y%m%d
        values = values.cast(pa.string())
    kind = values.type
    if pa.types.is_string(kind):
        return _times_of_text(part, name, pc.utf8_trim_whitespace(values), unit, format)
    if is_date(kind):
        if values.null_count:
            part.fail(name, values, values.is_null().to_numpy(zero_copy_only=False), "a time")
        if pa.types.is_date32(kind):
            seconds = values.cast(pa.int32()).cast(pa.int64()).to_numpy() * 86_400
            return _scaled(part, name, values, seconds, 1, unit)
        per_second = UNITS["ms" if pa.types.is_date64(kind) else kind.unit]
        zoned = getattr(kind, "tz", None) is not None
        return _scaled(part, name, values, values.cast(pa.int64()).to_numpy(), per_second, unit, zoned)
    if pa.types.is_floating(kind) or (pa.types.is_decimal(kind) and kind.scale > 0):
        found = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
        bits = MOST_WHOLE_BITS.get(kind.bit_width, 53)
        # A float32 of 1.5e9 stands for 128 seconds, whose order is lost.
        if (wrong := np.isfinite(found) & (np.abs(found) >= 2**bits)).any():
            part.fail(name, values, wrong, f"a time of less than 2**{bits}: larger floats fall together")
        return _rounded_down(part, name, values, found)
    if not (is_integer(kind) or pa.types.is_null(kind)):
        part.fail_type(name, kind, "times: numbers, timestamps, dates or text")
    return Times(integers(part, name, values))


def _times_of_text(part: Part, name: str, values: pa.Array, unit: str, format: str) -> Times:
    if not format:
        found = _cast(values, pa.int64())
        if found is None:
            return _decimals_or_iso(part, name, values, unit)
        if found.null_count:
            part.fail(name, values, found.is_null().to_numpy(zero_copy_only=False), "a time")
        if pc.any(pc.match_substring(values, "x", ignore_case=True), min_count=0).as_py():
            # Arrow takes 0x10 for 16
            return _decimals_or_iso(part, name, values, unit)
        return Times(found.to_numpy())
    day = _by_format(pa.array([_SOME_DAY.strftime(format)]), format)[0].as_py()
    if day is not None and abs(day // 10**6 - _SOME_DAY.timestamp()) > 366 * 86_400:
        raise ValueError(
            f"{part.path}: time_format={format} reads no year, and days of all years fall together"
        )
    found = _by_format(values, format)
    if found.null_count:
        wrong = found.is_null().to_numpy(zero_copy_only=False)
        part.fail(name, values, wrong, f"a time of the format {format}")
    zoned = "%z" in format or "%Z" in format
    return _scaled(part, name, values, found.to_numpy(), UNITS["us"], unit, zoned)


def _by_format(values: pa.Array, format: str) -> pa.Array:
    """(n,) microseconds, int64; null for no time of the format."""
    spelled = re.sub("%.", lambda own: _SPELLED_OUT.get(own[0], own[0]), format)
    # Arrow lacks the first three, and takes day 366 of any year
    if any(each in format for each in ("%f", "%Z", "%G", "%j")):
        return _each_parsed(values, spelled)
    made = pc.strptime(values, format, "us", error_is_null=True)
    found = made.cast(pa.int64())
    if "%d" in spelled and _is_known(spelled):  # Arrow takes February 31 for March 2
        early = pc.and_(pc.less_equal(pc.day(made), 3), pc.match_substring_regex(values, "29|3[01]"))
        early = pc.fill_null(early, False)
        checked = _each_parsed(values.filter(early), spelled)
        found = pc.replace_with_mask(found, early, checked)
    return found


def _is_known(format: str) -> bool:
    """Whether Python's directives are those of a format."""
    try:
        return datetime.strptime(_SOME_DAY.strftime(format), format) is not None
    except ValueError:
        return False


def _each_parsed(values: pa.Array, format: str) -> pa.Array:
    """(n,) microseconds by Python's strptime, which is slower and knows the calendar; null for no time."""
    made = values.dictionary_encode()
    known = [_parsed(word, format) for word in made.dictionary.to_pylist()]
    return pa.array(known, pa.int64()).take(made.indices)


def _parsed(word: str | None, format: str) -> int | None:
    """Microseconds."""
    if "%Z" in format and not re.search(r"\b(UTC|GMT|Z)\b", word or ""):  # other names have no one offset
        return None
    try:
        found = datetime.strptime(word or "", format)
    except ValueError:
        return None
    if "%j" in format and time.strptime(word or "", format).tm_yday != found.timetuple().tm_yday:
        return None  # 366 of a year of 365
    since = (found if found.tzinfo else found.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 10**6 + since.microseconds


def _decimals_or_iso(part: Part, name: str, values: pa.Array, unit: str) -> Times:
    for zone in (None, "UTC"):  # as most are written, which takes a tenth of the time of the searches below
        if (made := _cast(values, pa.timestamp("us", zone))) is not None and not made.null_count:
            return _scaled(part, name, values, made.to_numpy(), UNITS["us"], unit, zone is not None)
    digits = pc.fill_null(pc.match_substring_regex(values, r"^-?[0-9]+$"), False)
    number = pc.fill_null(pc.match_substring_regex(values, _DECIMAL), False)
    if pc.any(number, min_count=0).as_py():
        if not pc.all(number).as_py():
            part.fail(name, values, ~number.to_numpy(zero_copy_only=False), "a number, as in other rows")
        whole = digits.to_numpy(zero_copy_only=False)
        try:  # by float64 alone integers from 2**53 on would be others
            exact = pc.if_else(digits, values, "0").cast(pa.int64()).to_numpy()
        except pa.ArrowInvalid:
            beyond = [own and not -(2**63) <= int(word) < 2**63
                      for own, word in zip(whole, values.to_pylist(), strict=True)]  # fmt: skip
            part.fail(name, values, np.array(beyond), "an int64")
        made = _rounded_down(part, name, values, values.cast(pa.float64()).to_numpy())
        cut = np.zeros(len(whole)) if made.fraction is None else made.fraction
        fraction = np.where(whole, 0.0, cut)
        return Times(np.where(whole, exact, made.whole), fraction if fraction.any() else None)
    # Arrow takes text with a zone for one type and text without for another.
    values = pc.replace_substring_regex(values, " ?(UTC|GMT)$", "Z")
    zoned = pc.fill_null(pc.match_substring_regex(values, _ISO_ZONE), False).to_numpy(zero_copy_only=False)
    given = values.is_valid().to_numpy(zero_copy_only=False)
    first = bool(zoned[given][:1].any())
    if (other := given & (zoned != first)).any():
        part.fail(name, values, other, f"a time with{'' if first else 'out'} a zone, as in other rows")
    for digits_of in ("us", "ns"):
        if (found := _cast(values, pa.timestamp(digits_of, "UTC" if first else None))) is not None:
            break
    else:
        wrong = np.array([not _is_iso(word) for word in values.to_pylist()])
        wrong = wrong if wrong.any() else np.ones(len(values), bool)
        part.fail(name, values, wrong, "a number or an ISO date; other dates take time_format=, as %d.%m.%Y")
    if found.null_count:
        part.fail(name, values, found.is_null().to_numpy(zero_copy_only=False), "a time")
    return _scaled(part, name, values, found.to_numpy(), UNITS[digits_of], unit, first)


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """(n,) int64 of texts that are all of a kind; None where one is not, which mostly the first one tells.

    Arrow writes an error for every text that is wrong, which takes thirty times as long as a cast.
    """
    try:
        values[:1].cast(kind)
        return values.cast(kind).cast(pa.int64())
    except pa.ArrowInvalid:
        return None


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


def _scaled(
    part: Part, name: str, values: pa.Array, found: np.ndarray, per: int, unit: str, zoned: bool = False
) -> Times:
    """Times, so many `per` second, in `unit`; in seconds for none."""
    wanted = UNITS.get(unit, 1)
    if wanted >= per:
        limit = np.iinfo(np.int64).max // (wanted // per)
        wrong = (found > limit) | (found < -limit)
        if wrong.any():
            part.fail(
                name, values, wrong, f"a time that fits into 64 bits as {unit}: take a coarser time_unit"
            )
        return Times(found * (wanted // per), None, True, zoned)
    ratio = per // wanted
    whole = found // ratio
    fraction = (found - whole * ratio) / ratio
    return Times(whole, fraction if fraction.any() else None, True, zoned)


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


def _is_written(time: int, format: str) -> bool:
    """Whether a number is a date of our times in this format, as 20240501."""
    try:
        date = datetime.strptime(str(time), format)
        return 1990 <= date.year < 2100 and date.strftime(format) == str(time)
    except ValueError:
        return False


def _look(low: int, high: int) -> str:
    """What times between `low` and `high` look like rather than seconds, with what to do, or nothing."""
    for format in ("%Y%m%d%H", "%Y%m%d", "%Y%m", "%y%m%d%H", "%y%m%d", "%Y"):
        if _is_written(low, format) and _is_written(high, format):
            return f"dates of the format {format}: say time_format={format}"
    for name, per_day in (("days", 1), ("hours", 24), ("minutes", 1440)):
        # From 1990 to 2100, of days also those since 1900, which spreadsheets count.
        if 7305 * per_day <= low <= high < (73_051 if per_day == 1 else 47_482 * per_day):
            return f"{name} since 1970: multiply by {86_400 // per_day}, say time_unit=step if they order"
    return ""


def checked_unit(source: Any, low: int, high: int) -> str:
    """The unit of times between `low` and `high`, which nobody has named; seconds also from 1970 on.

    Raises ValueError where they have none, or may have another.
    """
    if look := _look(low, high):
        raise ValueError(
            f"{source}: times from {low} to {high} look like {look}, or time_unit=s where they are seconds"
        )
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


def lists(part: Part, name: str, values: Column) -> tuple[np.ndarray, np.ndarray]:
    """A column of lists of integers, or of dates in seconds: all values, and each list's length; int64.

    Raises ValueError naming the row of a null.
    """
    values = part.plain(name, values)
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
