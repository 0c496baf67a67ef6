"""Data that `tritonrec train` streams, by the word of `--data`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from ..data import Split, Vocabulary, load_clicks, load_interactions
from ..data.sequences import COLUMNS, holds_sequences
from ..data.sources import Source, source_of
from ..files import ScratchFolder
from ..pipeline import saved_vocabularies
from .progress import CommandProgress
from .shown import say

if TYPE_CHECKING:
    from ..data.click_columns import ClickColumns
    from ..data.log_format import LogFormat
    from ..data.parquet_rows import ParquetRows

SHARDS = "shards:"
"""``shards:SOURCE``: the log SOURCE as small shards in a folder of this process, and streamed; for verify."""


def sequences(spec: str) -> ParquetRows | None:
    """The rows of a dataset of sequences; None for any other data."""
    return _sequences(spec)[0]


@lru_cache(maxsize=4)
def _sequences(spec: str) -> tuple[ParquetRows | None, ScratchFolder | None]:
    """The rows, and the folder of this process that holds them, which lives as long."""
    from ..data.parquet_rows import ParquetRows
    from ..data.tables import ParquetFile

    if spec.startswith(SHARDS):
        folder = _shards(spec.removeprefix(SHARDS))
        return ParquetRows(folder.name, COLUMNS), folder
    if (found := _source(spec)) is None or found.is_clicks:
        return None, None
    (file, *_others) = found.events().opened
    if not (isinstance(file, ParquetFile) and holds_sequences(file.schema)):
        return None, None
    return ParquetRows(found.where, COLUMNS), None


def grouped(spec: str, words: str = "") -> ParquetRows | None:
    """The rows of a dataset of sequences, or those of a log of events in files; None for any other data.

    A log is grouped by user when it is first read (`tritonrec.data.grouped`), which standard error tells.
    It extends the vocabularies of the checkpoint in the directory `words`.
    """
    if (rows := sequences(spec)) is not None:
        return rows
    found = _source(spec)
    return _grouped(spec, words) if found is not None and not found.is_clicks else None


def windows(spec: str, max_history: int, max_exposed: int, split: Split, words: str = "") -> Path | None:
    """The folder with the windows of a log of events in files; None for any other data.

    words: see `grouped`.
    """
    return _windows(spec, max_history, max_exposed, split, words)[0]


def known_words(words: str) -> dict[str, Vocabulary]:
    """The vocabularies of the checkpoint in the directory `words`, none for an empty name."""
    return saved_vocabularies(words) if words else {}


@lru_cache(maxsize=4)
def _windows(
    spec: str, max_history: int, max_exposed: int, split: Split, words: str
) -> tuple[Path | None, ScratchFolder | None]:
    """The folder, and itself where it is one of this process, which lives as long."""
    from ..data.grouped import windows_of

    if spec.startswith(SHARDS):
        folder = _window_shards(spec.removeprefix(SHARDS), max_history, max_exposed, split)
        return Path(folder.name), folder
    if (source := _source(spec)) is None or source.is_clicks or sequences(spec) is not None:
        return None, None
    known, sizes = known_words(words), (max_history, max_exposed)
    return _told(spec, lambda report: windows_of(spec, *sizes, report, words=known, split=split)), None


@lru_cache(maxsize=4)
def _grouped(spec: str, words: str) -> ParquetRows:
    from ..data.grouped import sequences_of
    from ..data.parquet_rows import ParquetRows

    known = known_words(words)
    return ParquetRows(_told(spec, lambda report: sequences_of(spec, report, words=known)), COLUMNS)


def _told(spec: str, make: Callable[[Callable[[int], None]], Path], done: str = "grouped by user") -> Path:
    """The folder that `make` writes or finds; standard error tells how far it is, and where the folder is."""
    console = Console(stderr=True)
    with ExitStack() as stack:
        progress, task = None, None

        def report(rows: int) -> None:
            nonlocal progress, task
            if progress is None or task is None:
                progress = stack.enter_context(CommandProgress(console))
                task = progress.add_task("reading the log once", total=_rows(spec))
            progress.advance(task, rows)

        folder = make(report)
    if progress is not None:
        say(console, f"{spec} is {done} in {folder}: later runs stream from there")  # fmt: skip
    return folder


def clicks(spec: str, words: str = "") -> tuple[ParquetRows, ClickColumns] | None:
    """The rows of clicks as Parquet, and their format; None for any other data.

    Text and words are written as numbers in Parquet when they are first read, which standard error tells.

    words: see `grouped`.
    """
    return _clicks(spec, words)[0]


@lru_cache(maxsize=4)
def _clicks(spec: str, words: str) -> tuple[tuple[ParquetRows, ClickColumns] | None, ScratchFolder | None]:
    """The rows and their format, and the folder of this process that holds them, which lives as long."""
    from ..data.click_columns import ClickColumns
    from ..data.grouped import clicks_of
    from ..data.parquet_rows import ParquetRows
    from ..data.presets import CRITEO

    if spec.startswith(SHARDS):
        folder = _click_shards(spec.removeprefix(SHARDS))
        return _columns(ParquetRows(folder.name), CRITEO), folder
    if (found := _source(spec)) is None or not found.is_clicks:
        return None, None
    has_words = found.format.ids == "words"
    if found.is_parquet and not has_words:
        return _columns(ParquetRows(found.where), found.format), None
    known = known_words(words) if has_words else {}
    made = _told(spec, lambda report: clicks_of(spec, report, words=known), "written as Parquet")
    rows = ParquetRows(made)
    dense = [name for name in rows.schema.names if str(rows.schema.field(name).type) == "float"]
    label, *names = rows.schema.names
    features = tuple(name for name in names if name not in dense)
    return (rows, ClickColumns(label, tuple(dense), features)), None


def _columns(rows: ParquetRows, format: LogFormat) -> tuple[ParquetRows, ClickColumns]:
    """The rows of the columns of a format."""
    from ..data.click_columns import ClickColumns

    columns = ClickColumns.of(rows.path, rows.schema, format)
    return rows.select(columns.names), columns


@lru_cache(maxsize=16)
def _source(spec: str) -> Source | None:
    """The log in files that `spec` names; None for other data."""
    return None if spec.startswith(SHARDS) else source_of(spec)


def _rows(spec: str) -> int | None:
    """Of a log in Parquet; None for text, whose rows nobody has counted."""
    found = _source(spec)
    return found.events().rows() if found and not found.is_clicks and found.is_parquet else None


def _shards(spec: str) -> ScratchFolder:
    from ..data.convert_sequences import write_sequences

    folder = ScratchFolder()
    write_sequences([load_interactions(spec)], Path(folder.name), rows_per_file=16, rows_per_group=5)
    return folder


def _window_shards(spec: str, max_history: int, max_exposed: int, split: Split) -> ScratchFolder:
    from ..data.convert_windows import write_windows

    folder, log = ScratchFolder(), load_interactions(spec)
    write_windows(
        [log], Path(folder.name), max_history, max_exposed, rows_per_group=5, users=log.user_features,
        genres=log.genres, split=split,
    )  # fmt: skip
    return folder


def _click_shards(spec: str) -> ScratchFolder:
    import pyarrow
    import pyarrow.parquet

    from ..data.presets import CRITEO_CATEGORIES, CRITEO_COUNTS

    folder, log = ScratchFolder(), load_clicks(spec)
    columns = {"label": log.labels}
    columns |= dict(zip(CRITEO_COUNTS, np.expm1(log.dense).T, strict=True))
    columns |= dict(zip(CRITEO_CATEGORIES, log.categories.T, strict=True))
    path = Path(folder.name, "part-00000.parquet")
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=7, write_page_checksum=True)
    return folder
