"""Data that `tritonrec train` streams, by the word of `--data`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from ..data import load_clicks, load_interactions
from ..data.log_parts import TEXT_LOGS
from ..data.sequences import COLUMNS, holds_sequences
from ..files import ScratchFolder
from .progress import CommandProgress

if TYPE_CHECKING:
    from ..data.click_columns import ClickColumns
    from ..data.parquet_rows import ParquetRows

TEXT_CLICKS = ("criteo-tsv", "ali-ccp")
CLICKS = ("criteo-parquet", "clicks", *TEXT_CLICKS)
"""Words of logs of clicks in files."""
SHARDS = "shards:"
"""``shards:SOURCE``: the log SOURCE as small shards in a folder of this process, and streamed; for verify."""


def sequences(spec: str) -> ParquetRows | None:
    """The rows of a dataset of sequences; None for any other data."""
    return _sequences(spec)[0]


@lru_cache(maxsize=4)
def _sequences(spec: str) -> tuple[ParquetRows | None, ScratchFolder | None]:
    """The rows, and the folder of this process that holds them, which lives as long."""
    from ..data.parquet_rows import ParquetRows, schema_of

    if spec.startswith(SHARDS):
        folder = _shards(spec.removeprefix(SHARDS))
        return ParquetRows(folder.name, COLUMNS), folder
    path = _parquet(spec)
    return ParquetRows(path, COLUMNS) if path and holds_sequences(schema_of(path)) else None, None


def grouped(spec: str) -> ParquetRows | None:
    """The rows of a dataset of sequences, or those of a log of events in files; None for any other data.

    A log is grouped by user when it is first read (`tritonrec.data.grouped`), which standard error tells.
    """
    if (rows := sequences(spec)) is not None:
        return rows
    return _grouped(spec) if _source(spec) else None


def windows(spec: str, max_history: int, max_exposed: int) -> Path | None:
    """The folder with the windows of a log of events in files; None for any other data."""
    return _windows(spec, max_history, max_exposed)[0]


@lru_cache(maxsize=4)
def _windows(spec: str, max_history: int, max_exposed: int) -> tuple[Path | None, ScratchFolder | None]:
    """The folder, and itself where it is one of this process, which lives as long."""
    from ..data.grouped import windows_of

    if spec.startswith(SHARDS):
        folder = _window_shards(spec.removeprefix(SHARDS), max_history, max_exposed)
        return Path(folder.name), folder
    if (source := _source(spec)) is None or sequences(spec) is not None:
        return None, None
    return _told(spec, lambda report: windows_of(source, max_history, max_exposed, report)), None


@lru_cache(maxsize=4)
def _grouped(spec: str) -> ParquetRows:
    from ..data.grouped import sequences_of
    from ..data.parquet_rows import ParquetRows

    source = _source(spec)
    assert source
    return ParquetRows(_told(spec, lambda report: sequences_of(source, report)), COLUMNS)


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
        console.print(
            f"{spec} is {done} in {folder}: later runs stream from there",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    return folder


def clicks(spec: str) -> tuple[ParquetRows, ClickColumns] | None:
    """The rows of clicks as Parquet, and their format; None for any other data.

    Text is written as Parquet when it is first read, which standard error tells.
    """
    return _clicks(spec)[0]


@lru_cache(maxsize=4)
def _clicks(spec: str) -> tuple[tuple[ParquetRows, ClickColumns] | None, ScratchFolder | None]:
    """The rows and their format, and the folder of this process that holds them, which lives as long."""
    from ..data.click_columns import PlainColumns, names
    from ..data.criteo import CRITEO
    from ..data.grouped import clicks_of
    from ..data.parquet_rows import ParquetRows

    kind, _, path = spec.partition(":")
    folder = None
    if spec.startswith(SHARDS):
        folder = _click_shards(spec.removeprefix(SHARDS))
        kind, path = "criteo-parquet", folder.name
    if not path or kind not in CLICKS:
        return None, None
    if kind in TEXT_CLICKS:
        path = str(_told(spec, lambda report: clicks_of(spec, report), "written as Parquet"))
    if kind.startswith("criteo"):
        return (ParquetRows(path, names(CRITEO)), CRITEO), folder
    rows = ParquetRows(path)
    return (rows, PlainColumns.of(path, rows.schema)), None


def _parquet(spec: str) -> str | None:
    """The path of ``parquet:PATH``."""
    kind, _, path = spec.partition(":")
    return path if kind == "parquet" and path else None


def _source(spec: str) -> str | None:
    """The log of events that `spec` names, for `tritonrec.data.grouped`; None for other data."""
    kind, _, path = spec.partition(":")
    return _parquet(spec) or (spec if kind in TEXT_LOGS and path else None)


def _rows(spec: str) -> int | None:
    """Of a log in Parquet; None for text, whose rows nobody has counted."""
    from ..data.parquet_rows import ParquetRows

    path = _parquet(spec)
    return ParquetRows(path, ()).num_rows if path else None


def _shards(spec: str) -> ScratchFolder:
    from ..data.convert_sequences import write_sequences

    folder = ScratchFolder()
    write_sequences([load_interactions(spec)], Path(folder.name), rows_per_file=16, rows_per_group=5)
    return folder


def _window_shards(spec: str, max_history: int, max_exposed: int) -> ScratchFolder:
    from ..data.convert_windows import write_windows

    folder, log = ScratchFolder(), load_interactions(spec)
    write_windows(
        [log], Path(folder.name), max_history, max_exposed, rows_per_group=5, users=log.user_features,
        genres=log.genres,
    )  # fmt: skip
    return folder


def _click_shards(spec: str) -> ScratchFolder:
    import pyarrow
    import pyarrow.parquet

    from ..data.criteo import CATEGORIES, COUNTS

    folder, log = ScratchFolder(), load_clicks(spec)
    columns = {"label": log.labels}
    columns |= dict(zip(COUNTS, np.expm1(log.dense).T, strict=True))
    columns |= dict(zip(CATEGORIES, log.categories.T, strict=True))
    path = Path(folder.name, "part-00000.parquet")
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    return folder
