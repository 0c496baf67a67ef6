"""How a log is written: its columns by name, how text is divided, what its times mean.

::

    LogFormat(user="uid", item="asin", timestamp="when", time_unit="ms", ids="words")
    csv:ratings.csv?user=uid&item=asin&timestamp=when&time_unit=ms&ids=words

What is not named is taken from a header, or from the names of columns, and checked; `LogFormat` never guesses
what a column means by its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints
from urllib.parse import quote, unquote

from tritonrec.settings import setting, typed

Ids = Literal["integers", "words", "hashed"]
Header = Literal["auto", "yes", "no"]
TimeUnit = Literal["auto", "s", "ms", "us", "ns", "step"]
SAFE = ":/ "
"""Characters that stand as they are in the settings of a source."""
NONE = "none"
"""In the place of a column's name: there is no such column, even where one looks like it."""

DELIMITERS = {"comma": ",", "tab": "\t", "semicolon": ";", "pipe": "|", "space": " ", "blanks": "blanks"}
"""Delimiters by name, since a shell or a source string may not take them as they are."""


@typed
@dataclass(frozen=True)
class LogFormat:
    """The format of a log; everything has a default, and the names of a header do for the most part.

    A name of a column matches exactly, or without regard to case and to a suffix after a colon
    (``user_id:token``); of ``long_view|is_like`` the first one that all files have is taken.

    Args:
        user, item, timestamp, rating: columns. ``"none"`` for a log without timestamps, whose order of rows
            is the order of time, and to leave out ratings.
        time_unit: of times that are numbers, and that dates are converted to: s, ms, us, ns, or ``"step"``
            where times only order the events. Found by default, in which all times are from 1990 (s: 1970) to
            2100.
        time_format: of times that are text, as ``%d.%m.%Y %H:%M``; numbers and ISO by default.
        order: a column of integers from 0 on that orders the events of one time.
        label: columns of labels, a task each; of clicks one. By default the columns of booleans; ``"none"``
            for no tasks.
        label_threshold: a label, or else a rating (task ``click``), of at least this is 1, a smaller one 0.
        ids: ``integers``; ``words`` are numbered in a `Vocabulary`; ``hashed`` words are 64-bit hashes.
        whole_floats: take ids that are floating numbers without a fraction.
        dense, categories: columns of clicks; with categories a log is one of clicks.
        hexadecimal: categories that are words of up to eight hexadecimal digits, or missing; they are
            numbers.
        log_counts: a dense x becomes log(1 + max(x, 0)), a missing one 0.
        shown: a column of ITEM-LABEL words between spaces, each an event with the task ``click``.
        columns: names of all columns in their order, where text has no header.
        header: whether the first line names the columns: yes, no, or auto.
        delimiter: between columns: any text, tab, comma, semicolon, pipe, space, or blanks for any number of
            spaces and tabs; by default the most frequent of comma, tab and semicolon in the first line.
        quote: around fields; none; by default ``"`` with commas, semicolons and pipes, none with others.
        multiline: fields in quotes may have several lines.
        missing: fields that say that a value is missing, beside empty ones.
        drop_missing: rows without user, item or time are left out, and no error.
        encoding: of text.

    Raises ValueError for settings that contradict each other.
    """

    user: str = setting("", "Column of users.", option="user_column")
    item: str = setting("", "Column of items.", option="item_column")
    timestamp: str = setting(
        "", "Column of times; none: rows are in the order of time.", option="time_column"
    )
    time_unit: TimeUnit = setting(
        "auto", "Unit of times: s, ms, us, ns; step: they only order. Found by default."
    )
    time_format: str = setting("", "Format of times that are text, as %d.%m.%Y; ISO by default.")
    order: str = ""
    rating: str = setting("", "Column of ratings; none: leave them out.", option="rating_column")
    label: tuple[str, ...] = setting((), "Columns of labels, a task each.", option="label_columns")
    label_threshold: float | None = setting(None, "A label, or else a rating, of at least this is a click.")
    ids: Ids = setting("integers", "words: ids are numbered in a vocabulary; hashed: their 64-bit hashes.")
    whole_floats: bool = False
    dense: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    hexadecimal: tuple[str, ...] = ()
    log_counts: bool = False
    shown: str = ""
    columns: tuple[str, ...] = setting((), "Names of all columns, where text has no header.")
    header: Header = "auto"
    delimiter: str = setting("", "Between columns of text, as tab or ::.")
    quote: str = "auto"
    multiline: bool = False
    missing: tuple[str, ...] = ()
    drop_missing: bool = setting(False, "Leave out rows without user, item or time.")
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        for name in ("user", "item"):
            if getattr(self, name) == NONE:
                raise ValueError(f"a log has a column of {name}s: {name} cannot be 'none'")
        named = [name for name in (self.user, self.item, self.timestamp) if name not in ("", NONE)]
        if len(set(named)) < len(named):
            raise ValueError(f"user, item and timestamp must be different columns, got {', '.join(named)}")
        if NONE in self.label and len(self.label) > 1:
            raise ValueError(f"label is 'none' or names of columns, got {', '.join(self.label)}")
        roles = (*self.label, *self.dense, *self.categories)
        if len(set(roles)) < len(roles):
            raise ValueError(
                f"a column is a label, dense or a category, and one of these: got {', '.join(roles)}"
            )
        if len(set(self.columns)) < len(self.columns):
            raise ValueError(f"columns must have different names, got {', '.join(self.columns)}")
        if self.label_threshold is not None and not math.isfinite(self.label_threshold):
            raise ValueError(f"label_threshold must be finite, got {self.label_threshold}")
        if self.time_format and self.time_unit == "step":
            raise ValueError(
                "time_format says how dates are written, and time_unit='step' that there are none"
            )
        if self.quote not in ("auto", NONE) and len(self.quote.encode()) != 1:
            raise ValueError(f"quote must be one character or none, got {self.quote!r}")
        if not self.delimiter_text and self.delimiter:
            raise ValueError(f"delimiter must be a text, got {self.delimiter!r}")
        try:
            has_lines = "\n\n".encode(self.encoding).endswith(b"\n\n")  # a mark may stand in front
        except LookupError as error:
            raise ValueError(f"unknown encoding {self.encoding!r}") from error
        if not has_lines:
            raise ValueError(f"lines of {self.encoding} do not end with one byte: write the text as UTF-8")

    @property
    def is_clicks(self) -> bool:
        """Whether the log is one of clicks, a `ClickLog`."""
        return bool(self.categories)

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns of labels that are named."""
        return () if self.label == (NONE,) else self.label

    @property
    def unit(self) -> str:
        """The unit of times; empty where it is to be found."""
        return "" if self.time_unit == "auto" else self.time_unit

    @property
    def delimiter_text(self) -> str:
        """The delimiter itself."""
        return DELIMITERS.get(self.delimiter, self.delimiter.replace("\\t", "\t"))

    def over(self, other: LogFormat) -> LogFormat:
        """`other` with what is set here."""
        return replace(other, **self.changes())

    def changes(self) -> dict[str, Any]:
        """The settings that are not the default."""
        default = LogFormat()
        every = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in every if value != getattr(default, name)}

    def query(self) -> str:
        """The changed settings as they stand in a source: ``user=uid&time_unit=ms``."""
        return _query(self.changes())

    @classmethod
    def parse(cls, query: str) -> LogFormat:
        """The settings of ``user=uid&time_unit=ms``; lists between commas, ``%26`` for an ``&``.

        Raises ValueError naming a setting that is unknown or has another kind of value.
        """
        return cls(**_settings(query))


_NAMES = tuple(each.name for each in fields(LogFormat))
_QUERY = re.compile(r"(.+)\?([A-Za-z_]+=.*)", re.DOTALL)


def with_query(source: str) -> tuple[str, dict[str, Any]]:
    """A source without the settings behind its last ``?``, and these, also those that say the default.

    A ``?`` is also a wildcard and stands in URLs, so settings have known names; the path of a file that
    exists is a path. Raises ValueError naming an unknown setting.
    """
    found = _QUERY.fullmatch(source)
    if not found or Path(source).is_file() or Path(source.partition(":")[2]).is_file():
        return source, {}
    path, query = found.groups()
    unknown = [name for name, _word in _pairs(query) if name not in _NAMES]
    if unknown and "://" in path:
        return source, {}
    if unknown:
        raise ValueError(f"{source}: no setting {unknown[0]!r} of a format; known are {', '.join(_NAMES)}")
    return path, _settings(query)


def described(source: str, format: LogFormat) -> str:
    """A source with the settings of a format behind it; those that it has already win."""
    path, own = with_query(source)
    merged = _query(format.changes() | own)
    return f"{path}?{merged}" if merged else path


def _query(settings: dict[str, Any]) -> str:
    words = {name: value if isinstance(value, tuple) else [str(value)] for name, value in settings.items()}
    return "&".join(f"{name}={','.join(quote(w, safe=SAFE) for w in own)}" for name, own in words.items())


def _settings(query: str) -> dict[str, Any]:
    pairs = _pairs(query)
    names = [name for name, _word in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} stands in the settings twice: {query}")
    return {name: _value(name, word) for name, word in pairs}


def _pairs(query: str) -> list[tuple[str, str]]:
    """Names and words, which are still quoted."""
    return [(name, word) for name, _, word in (pair.partition("=") for pair in query.split("&"))]


def _value(name: str, quoted: str) -> Any:
    hints = get_type_hints(LogFormat)
    if name not in hints:
        raise ValueError(f"no setting {name!r} of a format; known are {', '.join(_NAMES)}")
    kind, word = hints[name], unquote(quoted)
    if kind is bool:
        if word.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise ValueError(f"{name} takes true or false, got {word!r}")
        return word.lower() in ("true", "yes", "1")
    if kind is str:
        return word
    if choices := [each for each in get_args(kind) if isinstance(each, str)]:
        if word not in choices:
            raise ValueError(f"{name} takes one of {', '.join(choices)}, got {word!r}")
        return word
    if kind == tuple[str, ...]:
        return tuple(unquote(part).strip() for part in quoted.split(",")) if word else ()
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{name} takes a number, got {word!r}") from None


KNOWN = {
    "user": ("user", "userid", "uid", "customer", "customerid", "reviewer", "reviewerid", "visitorid"),
    "item": (
        "item", "itemid", "iid", "movie", "movieid", "video", "videoid", "product", "productid", "asin",
        "book", "bookid",
    ),
    "timestamp": ("timestamp", "time", "ts", "unixtime", "unixreviewtime", "timems", "datetime"),
    "rating": ("rating", "score", "stars", "overall"),
}  # fmt: skip
"""Names of columns in a header that say what they are, without regard to case, ``_``, ``-`` and spaces."""


def find_columns(
    names: list[str], format: LogFormat, source: str, flags: Collection[str] = ()
) -> dict[str, str]:
    """The column of each role that a log of events has, by the names of its columns.

    Roles are user, item (or shown), timestamp, rating, order, and each label. Columns of booleans, `flags`,
    are no ratings unless they are named. Raises ValueError naming `source` where a column is not there, and
    where two could be meant.
    """
    found: dict[str, str] = {}
    for role in ("user", "item", "timestamp", "rating"):
        wanted = getattr(format, role)
        if wanted == NONE or (role == "item" and format.shown):
            continue
        among = [name for name in names if role != "rating" or name not in flags]
        column = named(names, wanted, source) if wanted else _known(among, role, format, source)
        if column is not None:
            found[role] = column
        elif role != "rating":
            hint = ", or none where the order of rows is that of time" if role == "timestamp" else ""
            raise ValueError(
                f"{source}: no column that is the {role}; found {', '.join(names) or 'none'}: name it "
                f"({role}={hint})"
            )
    for role in ("order", "shown"):
        if wanted := getattr(format, role):
            found[role] = named(names, wanted, source)
    return found


def is_rating(name: str) -> bool:
    """Whether a column of this name is taken for the ratings."""
    return _folded(name) in KNOWN["rating"]


def is_header(names: list[str], format: LogFormat) -> bool:
    """Whether fields of a first line are the names of a log's columns."""
    if format.is_clicks:
        return _plain((format.label or format.categories)[0]) in map(_plain, names)
    wanted = [format.user, format.shown or format.item]
    known = [KNOWN["user"], KNOWN["item"]]
    folded = [_plain(name) for name in names]
    return any(
        _plain(name) in folded if name else any(_folded(each) in ours for each in names)
        for name, ours in zip(wanted, known, strict=True)
    )


def named(names: list[str], wanted: str, source: str) -> str:
    """The column that a user names; the first that is there of several between ``|``."""
    for word in wanted.split("|"):
        if word in names:
            return word
        alike = [name for name in names if _plain(name) == _plain(word)]
        if len(alike) == 1:
            return alike[0]
        if alike:
            raise ValueError(f"{source}: {word!r} could be {' or '.join(map(repr, alike))}")
    raise ValueError(f"{source}: no column {wanted!r}; found {', '.join(names) or 'none'}")


def _known(names: list[str], role: str, format: LogFormat, source: str) -> str | None:
    """The column of a role by the names in `KNOWN`; one that is named as another role is none."""
    taken = {format.user, format.item, format.timestamp, format.rating, format.order, *format.label}
    alike = [name for name in names if _folded(name) in KNOWN[role] and name not in taken]
    if len({*alike}) > 1:
        raise ValueError(
            f"{source}: two columns for {role}: {alike[0]!r} and {alike[1]!r}; name the one ({role}=)"
        )
    return alike[0] if alike else None


def is_time(name: str, format: LogFormat) -> bool:
    """Whether a column of this name is that of time, named or known."""
    wanted = format.timestamp.split("|") if format.timestamp else KNOWN["timestamp"]
    return (_plain(name) if format.timestamp else _folded(name)) in map(_plain, wanted)


def _plain(name: str) -> str:
    return name.strip().lower().partition(":")[0]


def _folded(name: str) -> str:
    return re.sub("[_ -]", "", _plain(name))
