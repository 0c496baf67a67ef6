"""Values of Arrow columns as arrays, whatever the spelling of their types; a bad value is named.

All spellings of a type in Arrow are one plain type. An integer may be of any width or a whole decimal; text
may be large, a view, a dictionary or run-end encoded; lists may be large, views or of a fixed size. What
loses something is an error: null, NaN, a fraction, more than int64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Column: TypeAlias = "pa.Array | pa.ChunkedArray"
MOST_WHOLE_BITS = {16: 11, 32: 24, 64: 53}
"""By the bits of a floating number: from 2**n on several integers have one."""
_PLAIN = {kind().id for kind in (pa.int8, pa.int32, pa.int64, pa.float32, pa.float64, pa.string)}
"""The most frequent ones of those that stand for themselves."""
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_LISTS = {getattr(pa.lib, f"Type_{kind}LIST{view}") for kind in ("", "LARGE_") for view in ("", "_VIEW")}
_LISTS |= {pa.lib.Type_FIXED_SIZE_LIST}


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

    def plain(self, column: str, values: Column) -> pa.Array:
        """The values in the plain type of their kind; raises ValueError for bytes that are no text."""
        try:
            return plain(values)
        except pa.ArrowInvalid:
            wrong = np.array([not _is_text(value) for value in values.to_pylist()])
            if not wrong.any():
                raise
            self.fail(column, values, wrong, "UTF-8 text")

    def fail_type(self, column: str, kind: pa.DataType, expected: str) -> NoReturn:
        """Raise ValueError for a column of another type."""
        raise ValueError(f"{self.path}: column {column!r} is of type {kind}, expected {expected}")


def _is_text(value: object) -> bool:
    try:
        return not isinstance(value, bytes) or value.decode() is not None
    except UnicodeDecodeError:
        return False


def integers(part: Part, name: str, values: Column, whole_floats: bool = False) -> np.ndarray:
    """(n,) int64: a column of integers, or of text that is plain integers.

    Raises ValueError naming the row of a null and of anything else, and the column of another type.
    """
    values = part.plain(name, values)
    kind, expected = values.type, "an int64"
    if kind == pa.int64() and not values.null_count:
        return values.to_numpy()
    if pa.types.is_null(kind) and len(values):
        part.fail(name, values, np.ones(len(values), bool), expected)
    if pa.types.is_string(kind):
        if whole_floats:
            values = pc.replace_substring_regex(values, r"^(\s*-?[0-9]+)\.0*(\s*)$", r"\1\2")
        return _of_text(part, name, values)
    if pa.types.is_floating(kind):
        found = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
        bits = MOST_WHOLE_BITS[kind.bit_width]
        wrong = ~(np.abs(found) < 2**bits) | (np.floor(found) != found)  # a missing value is NaN
        if wrong.any():
            part.fail(name, values, wrong, f"an integer of less than 2**{bits}")
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
        advice = "ids that are words take ids=words or ids=hashed"
        if pc.all(pc.match_substring_regex(values.filter(wrong), r"^\s*-?[0-9]+\.0*\s*$")).as_py():
            advice = "whole numbers with a point take whole_floats=true"
        part.fail(name, values, wrong, f"an int64; {advice}")
    return found.to_numpy()


def words(part: Part, name: str, values: Column) -> pa.Array:
    """(n,) text: a column of words as they are, blanks included, or of integers as they are written.

    Names the row of a missing one, and of one that is blank.
    """
    values = part.plain(name, values)
    kind = values.type
    if not (pa.types.is_string(kind) or is_integer(kind) or pa.types.is_null(kind)):
        part.fail_type(name, kind, "words or integers")
    found = values if pa.types.is_string(kind) else values.cast(pa.string())
    empty = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(found), ""), True)
    if pc.any(empty, min_count=0).as_py():
        part.fail(name, values, empty.to_numpy(zero_copy_only=False), "a word")
    return found


def word_ids(
    part: Part, name: str, values: Column, ids: str, vocabularies: dict[str, Any], key: str
) -> np.ndarray:
    """(n,) int64: hashes of words, or their numbers in ``vocabularies[key]``, which is extended."""
    from tritonrec.data.vocabulary import Vocabulary, hashed_ids

    found = words(part, name, values)
    if ids == "hashed":
        return hashed_ids(found)
    return vocabularies.setdefault(key, Vocabulary()).encode(found, extend=True)


def numbers(part: Part, name: str, values: Column) -> np.ndarray:
    """(n,) float64: a column of finite numbers, or of text of these; names the row of anything else."""
    values = part.plain(name, values)
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


def _number(word: str | None) -> float | None:
    try:
        return float(word) if word is not None and "_" not in word else None
    except ValueError:
        return None


def flags(part: Part, name: str, values: Column, threshold: float | None = None) -> np.ndarray:
    """(n,) int64 of 0 and 1: booleans, or numbers that are, or, with a `threshold`, whether they reach it."""
    values = part.plain(name, values)
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


def check_folder(part: Part, name: str, values: Column, value: str) -> None:
    """Raise ValueError where a column differs from the name of a folder of it, ``name=value`` as of Hive."""
    values = part.plain(name, values)
    same = pa.array([False] * len(values))
    with suppress(pa.ArrowException):  # of a type that has no such value
        expected = pa.scalar(None if value == HIVE_NULL else value, pa.string()).cast(values.type)
        same = pc.equal(values, expected) if expected.is_valid else pc.is_null(values)
    wrong = ~np.asarray(pc.fill_null(same, False))
    if wrong.any():
        part.fail(name, values, wrong, f"{value!r}, as its folder {name}={value} says: one of them is wrong")


def plain(values: Column) -> pa.Array:
    """The same values in the plain type of their kind."""
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()  # which copies
        if isinstance(values, pa.ChunkedArray):  # of a type that has no larger offsets
            values = pa.concat_arrays([plain(chunk) for chunk in values.chunks])
    if values.type.id in _PLAIN:
        return values
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


def filled(values: pa.Array, value: object) -> pa.Array:
    """`values` with `value` in the place of missing ones; itself where there are none."""
    return pc.fill_null(values, value) if values.null_count else values


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
        zones = {getattr(kind, "tz", None) is not None for kind in kinds}
        return pa.timestamp("us", "UTC" if zones.pop() else None) if len(zones) == 1 else None
    others = [kind for kind in kinds if not pa.types.is_null(kind)]  # a shard whose values are all missing
    return common_type(others) if len(others) < len(kinds) else None


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of lists."""
    return kind.id in _LISTS


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


def is_number(kind: pa.DataType) -> bool:
    """Whether a plain type holds numbers."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
