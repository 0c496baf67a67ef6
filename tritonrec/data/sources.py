"""Sources of logs by name, as on the command line, by path, and in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritonrec.data import movielens, zipf
from tritonrec.data.ctr import ClickLog, clicks_from_ratings
from tritonrec.data.interactions import Interactions
from tritonrec.data.log_format import LogFormat, with_query
from tritonrec.data.presets import PRESETS, Preset

if TYPE_CHECKING:
    from tritonrec.data.click_columns import Clicks
    from tritonrec.data.event_log import EventLog

KINDS = ("csv", "json", "parquet", "arrow", "clicks")
MADE = ("ml-100k", "zipf", "criteo", "avazu")
"""Words of logs that are fetched or drawn."""


@dataclass(frozen=True)
class Source:
    """A log in files or in memory, and its format.

    Attributes:
        where: path or frame. format: with the preset's settings. kind: of the files, empty for its suffix.
        preset: if any. is_clicks: a `ClickLog`. word: before the colon, if any.
    """

    where: Any
    format: LogFormat
    kind: str = ""
    preset: Preset | None = None
    is_clicks: bool = False
    word: str = ""

    @property
    def is_parquet(self) -> bool:
        """Whether the files are Parquet, by the first one."""
        from tritonrec.data.log_files import files_at
        from tritonrec.data.tables import ParquetFile, open_files

        if self.kind or self.word == "ali-ccp":
            return self.kind == "parquet"
        return isinstance(open_files(files_at(str(self.where)), "", self.format)[0], ParquetFile)

    def events(self, words: dict[str, Any] | None = None) -> EventLog:
        """The log as one of events; raises its errors, and ValueError for clicks."""
        from tritonrec.data.event_log import EventLog  # pyarrow takes half a second to import

        if self.is_clicks:
            raise _no_sequences(self.where)
        return EventLog(self.where, self.format, self.kind, self.preset, words)

    def clicks(self, words: dict[str, Any] | None = None) -> Clicks:
        """The log as one of clicks; raises its errors."""
        from tritonrec.data.click_columns import Clicks

        if self.word == "ali-ccp":
            from tritonrec.data.ali_ccp import AliCcp

            return AliCcp(self.where)
        return Clicks(self.where, self.format, self.kind, self.preset, words)


def source_of(source: Any, format: LogFormat | None = None) -> Source | None:
    """The source that a word, a path or a frame names; None for a log that is fetched or drawn.

    Raises ValueError for an unknown word, for settings of a log that has none, and naming a wrong setting.
    """
    given = format or LogFormat()
    if not isinstance(source, (str, Path)):
        return Source(source, given, is_clicks=given.is_clicks)
    text, queried = with_query(str(source))
    own = replace(given, **queried)
    word, colon, path = text.partition(":")
    if word in MADE and bool(colon) == bool(path) and not (word == "ml-100k" and path):
        if told := {**own.changes(), **queried}:
            raise ValueError(f"{text} has a format of its own: leave out {', '.join(told)}")
        return None
    if word in PRESETS and path:
        preset = PRESETS[word]
        own = replace(preset.format, **given.changes() | queried)
        return Source(path, own, preset.kind, preset, own.is_clicks, word)
    if word == "ali-ccp" and path:
        return Source(path, own, is_clicks=True, word=word)
    if word in KINDS and path:
        if word == "clicks":
            return Source(path, own, is_clicks=True, word=word)
        return Source(path, own, word, is_clicks=own.is_clicks, word=word)
    if _is_path(text):
        return Source(text, own, is_clicks=own.is_clicks)
    known = (*KINDS, "ali-ccp", *PRESETS)
    near = get_close_matches(
        text.partition(":")[0].lower(), [*known, "ml-100k", "zipf", "criteo", "avazu"], 1
    )
    words = ", ".join(f"{word}:PATH" for word in known)
    raise ValueError(
        f"unknown data {text!r}{f', did you mean {near[0]}' if near else ''}: expected a path, 'ml-100k', "
        "'zipf[:name=value,...]', "
        f"'criteo[:name=value,...]', 'avazu[:name=value,...]', {words}"
    )


def _is_path(text: str) -> bool:
    from tritonrec.data.tables import kind_of

    return bool(text) and ("/" in text or kind_of(text) is not None or Path(text).exists())


def load(
    source: Any, format: LogFormat | None = None, words: dict[str, Any] | None = None
) -> Interactions | ClickLog:
    """Load a log: a `ClickLog` for clicks, `Interactions` for users' sequences.

    ========================================  ============================================================
    ``ml-100k``                               MovieLens-100K, fetched once (`tritonrec.data.movielens`)
    ``zipf``, ``zipf:users=1000,seed=1``      synthetic; options are the fields of `zipf.ZipfOptions`
    ``criteo``, ``criteo:samples=1000``       synthetic clicks in Criteo's shape (`synthetic_clicks`)
    ``avazu``, ``avazu:samples=1000``         synthetic clicks in Avazu's shape
    a path, ``PATH?user=uid&time_unit=ms``    files of text, JSON lines, Parquet or Arrow, by their suffix
    ``csv:``, ``json:``, ``parquet:PATH``     the same, whatever their suffix
    ``movielens-1m:PATH``, ...                a published log (`tritonrec.data.presets`)
    ``clicks:PATH``                           clicks, by the types of their columns (`click_columns`)
    ``criteo-tsv:PATH``, ``avazu-csv:PATH``   published clicks; ``ali-ccp:PATH`` (`tritonrec.data.ali_ccp`)
    a table                                   with Arrow's C stream (`data.tables.Frame`), or arrays by name
    ========================================  ============================================================

    Args:
        source: one of these; a path may be a file, a folder, a glob or a URL.
        format: how the log is written (`LogFormat`); settings behind ``?`` win over it, both over a preset's.
        words: for ``ids="words"`` a `Vocabulary` for ``"user"`` and for ``"item"`` (clicks: for each
            category), extended by new words; one that is missing is added.

    Raises ValueError for any other source, and the errors of `EventLog` and `Clicks`.
    """
    found = source_of(source, format)
    if found is None:
        return _made(str(source))
    return found.clicks(words).read() if found.is_clicks else found.events(words).read()


def _made(spec: str) -> Interactions | ClickLog:
    word, _, detail = spec.partition(":")
    if word == "ml-100k":
        return movielens.load()
    if word == "zipf":
        return zipf.generate(zipf.ZipfOptions.parse(detail))
    from tritonrec.data import synthetic_clicks

    return synthetic_clicks.generate(word, synthetic_clicks.SyntheticClickOptions.parse(detail))


def _no_sequences(source: Any) -> ValueError:
    name = source if isinstance(source, (str, Path)) else "the table"
    return ValueError(
        f"{name} is a log of clicks without users' sequences, which this model needs: train dlrm with it"
    )


def load_interactions(
    source: Any, format: LogFormat | None = None, words: dict[str, Any] | None = None
) -> Interactions:
    """As `load`; raises ValueError for a log of clicks."""
    log = load(source, format, words)
    if isinstance(log, ClickLog):
        raise _no_sequences(source)
    return log


def load_clicks(
    source: Any, format: LogFormat | None = None, words: dict[str, Any] | None = None
) -> ClickLog:
    """As `load`, with ratings as clicks (`clicks_from_ratings`); ValueError for a log without ratings."""
    log = load(source, format, words)
    return log if isinstance(log, ClickLog) else clicks_from_ratings(log)
