"""Logs of events, whole and in parts: one reader for files of every kind and for frames in memory.

Columns are found by `LogFormat`; in Parquet and JSON each column of booleans is feedback where no label is
named. What was inferred is checked over the whole log at its end: so a log in parts is refused where the
whole one is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tritonrec.data import values
from tritonrec.data.interactions import Interactions, ItemGenres, UserFeatures
from tritonrec.data.log_files import PACKED, below_folder
from tritonrec.data.log_format import NONE, LogFormat, find_columns, is_rating, named
from tritonrec.data.numba_text import FLAG, INTEGER, NUMBER, SKIPPED
from tritonrec.data.parquet import FRACTION, TIME_UNIT, concat
from tritonrec.data.tables import File, Log, ParquetFile, tables_of
from tritonrec.data.times import UNITS, checked_unit, found_unit, times
from tritonrec.data.values import Part, is_list, plain

if TYPE_CHECKING:
    from tritonrec.data.vocabulary import Vocabulary

Features = tuple[UserFeatures | None, ItemGenres | None]
ROW_BYTES = 16
"""Of a short line; a fifth of it where the file is compressed."""
MOST_RATING = 1e5
FEW, MOST_RATED = 10, 10
"""So many rows with times from 1 to this alone have no times: they look like ratings."""


class EventLog(Log):
    """A log of events; vocabularies are those of ``"user"`` and ``"item"``."""

    @cached_property
    def files(self) -> list[str]:
        """Of everything that is read; where one changes, the log has changed."""
        if self.place is None:
            return []
        return [*self.place.files, *self._beside.files_beside(self.place)]

    @property
    def _beside(self) -> Any:
        """The module that reads features beside the log."""
        from tritonrec.data import kuairand, parquet

        return kuairand if self.preset and self.preset.features else parquet

    def rows(self) -> int:
        """The number of rows of a log in files; of text an estimate, rather too large."""
        assert self.place is not None
        rows = 0
        for file in self.opened:
            if isinstance(file, ParquetFile):
                rows += file.footer[1].num_rows
            else:
                size = self.place.filesystem.get_file_info(file.path).size or 0
                rows += 1 + size * (5 if file.path.endswith(PACKED) else 1) // ROW_BYTES
        return rows

    def features(self) -> Features:
        """Features of users and items that are beside the log; None for those that are not there."""
        if self.place is None:
            return None, None
        return self._beside.features_beside(self.place)

    def read(self) -> Interactions:
        """The whole log with its features; raises the errors of `parts`."""
        from tritonrec.data.vocabulary import kept_on_error

        users, genres = self.features()
        with kept_on_error(self.words):
            found = list(self.parts())
        unit = self._unit
        return replace(concat(found), user_features=users, genres=genres, time_unit=unit, words=self.words)

    def parts(self) -> Iterator[Interactions]:
        """The log in parts, in order, without features.

        Raises ValueError naming file, line or row, and column of what is no id, time, rating or label; at the
        end ValueError for a log without rows, and for values that contradict what they were taken for.
        """
        self._take_words_beside()
        seen = _Seen()
        self._unit: str = self.format.unit
        roles = [self._columns(file) for file in self.opened]
        for file, columns in zip(self.opened, roles, strict=True):
            if set(columns) != set(roles[0]):
                raise ValueError(
                    f"{file.path}: has the columns {', '.join(sorted(columns))}, but {self.opened[0].path} "
                    f"has {', '.join(sorted(roles[0]))}"
                )
            kinds = self._kinds(columns)
            for number, (part, table) in enumerate(tables_of(file, list(kinds), list(kinds.values()))):
                if self.preset and self.preset.item_length and not number:
                    _check_order(file.path, table, columns, self.preset.item_length)
                for name, value in self._folders(file):
                    if name in table.column_names:
                        values.check_folder(part, name, table.column(name), value)
                yield self._part(part, table, columns, seen)
        if not seen.rows:
            raise ValueError(f"{self.name}: holds no interactions")
        self._unit = self._checked(seen, roles[0])

    def _columns(self, file: File) -> dict[str, str]:
        """Columns by their roles: those of `find_columns`, and a task's name for each of feedback."""
        typed = isinstance(file, ParquetFile)
        if typed and file.names.count("item") == 1 and is_list(file.schema.field("item").type):  # type: ignore[attr-defined]
            raise ValueError(
                f"{file.path}: column 'item' holds lists: sequences, which models of the next item stream"
            )
        folders = [name for name, _ in self._folders(file) if name not in file.names]
        try:
            found = find_columns(file.names, self.format, file.path, file.booleans())
            if FRACTION in file.names:
                found["fraction"] = FRACTION
            labels = self.format.labels
            if labels:
                every = [each.names for each in self.opened]
                for label in labels:
                    shared = [w for w in label.split("|") if all(w in names for names in every)] or [label]
                    name = named(file.names, shared[0], file.path)
                    found[f"task {name}"] = name
            elif not self.format.label:
                found |= {f"task {name}": name for name in file.booleans() if name not in found.values()}
        except ValueError as error:
            raise ValueError(f"{error}{_not_read(folders)}") from error
        if "rating" not in found and self.format.rating != NONE and any(map(is_rating, folders)):
            raise ValueError(f"{file.path}: no column that is the rating{_not_read(folders)}; or rating=none")
        for name in found.values():
            if file.names.count(name) > 1:
                raise ValueError(f"{file.path}: two columns are named {name!r}")
        return found

    def _folders(self, file: File) -> list[tuple[str, str]]:
        """Columns and their values that stand in names of folders, as ``rating=5``."""
        below = [] if self.place is None else below_folder(self.place.root, file.path).split("/")[:-1]
        return [
            (name, unquote(value)) for name, sign, value in (part.partition("=") for part in below) if sign
        ]

    def _kinds(self, columns: dict[str, str]) -> dict[str, int]:
        """Of columns in text (`numba_text`), the narrower one where a column has two roles."""
        format = self.format
        kinds: dict[str, int] = {}
        label = FLAG if format.label_threshold is None else NUMBER
        known = {"rating": NUMBER} if format.time_format else {"rating": NUMBER, "timestamp": INTEGER}
        if format.ids == "integers" and self.words.keys() <= self._beside_words.keys():
            known |= {"user": INTEGER, "item": INTEGER}
        for role, name in columns.items():
            kind = label if role.startswith("task ") else known.get(role, SKIPPED)
            two = kind, kinds.get(name, kind)
            kinds[name] = max(two) if all(two) else SKIPPED
        return kinds

    def _part(self, part: Part, table: pa.Table, columns: dict[str, str], seen: _Seen) -> Interactions:
        format = self.format
        if format.drop_missing:
            part, table = _without_missing(part, table, [columns[r] for r in _NEEDED if r in columns], format)
        extra: dict[str, np.ndarray] = {}
        if "shown" in columns:
            part, table, extra["click"] = _each_shown(part, table, columns["shown"])
            columns = columns | {"item": columns["shown"]}
        get = {role: table.column(name) for role, name in columns.items()}
        user, item = (self._ids(part, role, columns[role], get[role]) for role in ("user", "item"))
        fraction = None
        if "timestamp" in columns:
            found = times(part, columns["timestamp"], get["timestamp"], format.unit, format.time_format)
            time, fraction = found.whole, found.fraction
            unit = None if found.is_dated else _unit_of(table, columns["timestamp"])
            # a unit that is named is that of all shards
            seen.kinds.add(f"times in {unit}" if unit and not format.unit else found.kind)
            if found.is_dated:
                seen.has_unit, self._unit = True, self._unit or "s"
            elif unit is not None:
                if format.unit in UNITS and unit in UNITS and format.unit != unit:
                    raise ValueError(
                        f"{part.path}: column {columns['timestamp']!r} has times in {unit}, as its converter "
                        f"wrote, and time_unit={format.unit} is named: leave it out, or convert the log again"
                    )
                seen.has_unit, self._unit = True, self._unit or unit
        else:
            time = np.arange(seen.rows, seen.rows + len(user))
        if "fraction" in columns:
            fraction = values.numbers(part, columns["fraction"], get["fraction"])
        if "order" in columns and fraction is not None:
            raise ValueError(
                f"{part.path}: order= orders events of one time, and times of column "
                f"{columns['timestamp']!r} have fractions that do so: take a finer time_unit, or no order="
            )
        if "order" in columns:
            fraction = _order(part, columns["order"], get["order"])
        rating = None
        if "rating" in columns:
            rating = values.numbers(part, columns["rating"], get["rating"])
        tasks = {
            name: values.flags(part, name, get[role], format.label_threshold)
            for role, name in columns.items() if role.startswith("task ")
        }  # fmt: skip
        if format.label_threshold is not None and not format.labels and rating is not None:
            tasks["click"] = (rating >= format.label_threshold).astype(np.int64)
        seen.add(time, rating)
        return Interactions(user, item, time, rating, extra | tasks, fraction=fraction)

    @cached_property
    def _beside_words(self) -> dict[str, Vocabulary]:
        """Of a converted log, whose ids are the numbers of words."""
        from tritonrec.data.vocabulary import words_of

        place = self.place
        return words_of(place.root, place.filesystem) if place is not None and place.is_folder else {}

    def _take_words_beside(self) -> None:
        """Add them to the words, and where these have some already, compare."""
        for role, own in self._beside_words.items():
            if self.format.ids != "integers":
                raise ValueError(f"{self.name}: its ids are numbers of words already: leave out ids=")
            given = self.words.setdefault(role, own)
            shorter, longer = sorted((given, own), key=len)
            longer.check_extends(shorter, role)
            if longer is own and given is not own:
                given.load_state_dict(own.state_dict())

    def _ids(self, part: Part, role: str, name: str, column: pa.ChunkedArray) -> np.ndarray:
        """(n,) int64. The one place where words become ids."""
        if self.format.ids == "integers" and (role not in self.words or role in self._beside_words):
            return values.integers(part, name, column, self.format.whole_floats)
        return values.word_ids(part, name, column, self.format.ids, self.words, role)

    def _checked(self, seen: _Seen, columns: dict[str, str]) -> str:
        """The unit of the times; raises ValueError where inferred columns have values of another kind."""
        format = self.format
        if "rating" in columns and not format.rating and not format.columns and seen.rating > MOST_RATING:
            raise ValueError(
                f"{self.name}: column {columns['rating']!r} has values up to {seen.rating:.10g}, which look "
                f"like no ratings: name the columns that are meant (rating={columns['rating']} for this one)"
            )
        if "timestamp" not in columns:
            return "step"
        if len(seen.kinds) > 1:
            raise ValueError(
                f"{self.name}: column {columns['timestamp']!r} has {' and '.join(sorted(seen.kinds))}: "
                "write it alike"
            )
        if self._unit or seen.has_unit:
            other = found_unit(seen.low, seen.high)
            if self.preset and self._unit == self.preset.format.unit and other not in ("", self._unit):
                raise ValueError(
                    f"{self.name}: times from {seen.low} to {seen.high} are in {other}, and files of this "
                    f"log have {self._unit}: name time_unit={other}"
                )
            return self._unit
        if seen.rows >= FEW and 1 <= seen.low <= seen.high <= MOST_RATED:
            raise ValueError(
                f"{self.name}: column {columns['timestamp']!r} has times from {seen.low} to {seen.high} "
                "only, which look like ratings: name the columns that are meant (timestamp=), or "
                "time_unit=step where they only order the events"
            )
        return checked_unit(f"{self.name}: column {columns['timestamp']!r}", seen.low, seen.high)


_NEEDED = ("user", "item", "timestamp")


@dataclass
class _Seen:
    """What the parts of a log had so far."""

    rows: int = 0
    low: int = 0
    high: int = 0
    rating: float = 0.0
    has_unit: bool = False
    kinds: set[str] = field(default_factory=set)  # of times

    def add(self, time: np.ndarray, rating: np.ndarray | None) -> None:
        """Take a part into account."""
        if len(time):
            low, high = int(time.min()), int(time.max())
            self.low, self.high = (min(low, self.low), max(high, self.high)) if self.rows else (low, high)
            if rating is not None:
                self.rating = max(self.rating, float(np.abs(rating).max()))
        self.rows += len(time)


def _not_read(folders: list[str]) -> str:
    """What an error says of columns that stand in folders alone."""
    if not folders:
        return ""
    return (
        f"; {', '.join(folders)} stands in names of folders, which are no columns here: load "
        "pyarrow.dataset.dataset(path, partitioning='hive'), or write the column into the files"
    )


def _unit_of(table: pa.Table, name: str) -> str | None:
    """The unit that the converter has written beside a column."""
    about = table.schema.field(name).metadata or {}
    return about[TIME_UNIT].decode() if TIME_UNIT in about else None


def _check_order(path: str, table: pa.Table, columns: dict[str, str], item_length: int) -> None:
    """Raise ValueError where users' ids have the length of items' ids, and items' ids another."""
    ids = [plain(table.column(columns[role])) for role in ("user", "item")]
    if not len(table) or not all(pa.types.is_string(each.type) for each in ids):
        return
    users, items = (pc.mean(pc.equal(pc.utf8_length(each), item_length)).as_py() or 0 for each in ids)
    if users > 0.9 and items < 0.1:
        raise ValueError(
            f"{path}: an item's id has {item_length} characters in this log, and here a user's has: user and "
            "item are the other way round; take the preset of the file's year, or name the columns (columns=)"
        )


def _without_missing(
    part: Part, table: pa.Table, names: list[str], format: LogFormat
) -> tuple[Part, pa.Table]:
    """The rows that have a value in each of some columns."""
    there = np.ones(len(table), bool)
    for name in names:
        column = part.plain(name, table.column(name))
        missing = pc.is_null(column, nan_is_null=True)
        if pa.types.is_string(column.type):
            empty = pc.is_in(pc.utf8_trim_whitespace(column), pa.array(["", *format.missing]))
            missing = pc.or_(missing, pc.fill_null(empty, True))
        there &= ~missing.to_numpy(zero_copy_only=False)
    if there.all():
        return part, table
    rows = there.nonzero()[0]
    return Part(part.path, part.unit, lambda row: part.number(int(rows[row]))), _taken(part, table, rows)


def _taken(part: Part, table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Some rows, in plain types: Arrow takes none of views and runs."""
    columns = [part.plain(each.name, table.column(each.name)) for each in table.schema]
    fields = [each.with_type(own.type) for each, own in zip(table.schema, columns, strict=True)]
    return pa.table(columns, pa.schema(fields)).take(rows)


def _each_shown(part: Part, table: pa.Table, name: str) -> tuple[Part, pa.Table, np.ndarray]:
    """A row for each ITEM-LABEL word of a column, the item in its place, and the labels."""
    column = pc.fill_null(plain(table.column(name)), "")
    lists = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(column))
    rows, words = pc.list_parent_indices(lists).to_numpy(), pc.list_flatten(lists)
    there = pc.not_equal(words, "").to_numpy(zero_copy_only=False)
    rows, words = rows[there], words.filter(pa.array(there))
    number = part.number
    table = _taken(part, table, rows)
    part = Part(part.path, part.unit, lambda row: number(int(rows[row])))
    found = pc.extract_regex(words, r"^(?P<item>.+)-(?P<label>[01])$")
    if found.null_count:
        part.fail(name, words, found.is_null().to_numpy(zero_copy_only=False), "words ITEM-0 or ITEM-1")
    label = pc.equal(pc.struct_field(found, "label"), "1").to_numpy(zero_copy_only=False).astype(np.int64)
    return part, table.set_column(table.column_names.index(name), name, pc.struct_field(found, "item")), label


def _order(part: Part, name: str, column: pa.ChunkedArray) -> np.ndarray:
    """Integers from 0 on as fractions of their order."""
    found = values.integers(part, name, column)
    wrong = (found < 0) | (found >= 2**53)
    if wrong.any():
        part.fail(name, column, wrong, "an integer from 0 to 2**53")
    return found / 2.0**53
