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
from ..data.sequences import COLUMNS, holds_sequences
from ..files import ScratchFolder
from .progress import CommandProgress

if TYPE_CHECKING:
    from ..data.parquet_rows import ParquetRows

SHARDS = "shards:"
"""``shards:SOURCE``: the log SOURCE as small shards in a folder of this process, and streamed; for verify."""


@lru_cache(maxsize=4)
def sequences(spec: str) -> ParquetRows | None:
    """The rows of a dataset of sequences; None for any other data."""
    from ..data.parquet_rows import ParquetRows, schema_of

    if spec.startswith(SHARDS):
        return ParquetRows(_shards(spec.removeprefix(SHARDS)).name, COLUMNS)
    path = _parquet(spec)
    return ParquetRows(path, COLUMNS) if path and holds_sequences(schema_of(path)) else None


def grouped(spec: str) -> ParquetRows | None:
    """The rows of a dataset of sequences, or those of a log of events in Parquet; None for any other data.

    A log is grouped by user when it is first read (`tritonrec.data.grouped`), which standard error tells.
    """
    if (rows := sequences(spec)) is not None:
        return rows
    path = _parquet(spec)
    return None if path is None else _grouped(path)


@lru_cache(maxsize=4)
def windows(spec: str, max_history: int, max_exposed: int) -> Path | None:
    """The folder with the windows of a log of events in Parquet; None for any other data."""
    from ..data.grouped import windows_of

    if spec.startswith(SHARDS):
        return Path(_window_shards(spec.removeprefix(SHARDS), max_history, max_exposed).name)
    if (path := _parquet(spec)) is None or sequences(spec) is not None:
        return None
    return _told(path, lambda report: windows_of(path, max_history, max_exposed, report))


@lru_cache(maxsize=4)
def _grouped(path: str) -> ParquetRows:
    from ..data.grouped import sequences_of
    from ..data.parquet_rows import ParquetRows

    return ParquetRows(_told(path, lambda report: sequences_of(path, report)), COLUMNS)


def _told(path: str, make: Callable[[Callable[[int], None]], Path]) -> Path:
    """The folder that `make` writes or finds; standard error tells how far it is, and where the folder is."""
    from ..data.parquet_rows import ParquetRows

    console = Console(stderr=True)
    with ExitStack() as stack:
        progress, task = None, None

        def report(done: int) -> None:
            nonlocal progress, task
            if progress is None or task is None:
                progress = stack.enter_context(CommandProgress(console))
                task = progress.add_task("grouping the log by user", total=ParquetRows(path, ()).num_rows)
            progress.advance(task, done)

        folder = make(report)
    if progress is not None:
        console.print(
            f"parquet:{path} is grouped by user in {folder}: later runs stream from there",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    return folder


@lru_cache(maxsize=4)
def clicks(spec: str) -> ParquetRows | None:
    """The rows of clicks in Criteo's format as Parquet; None for any other data."""
    from ..data.criteo import COLUMNS as CRITEO
    from ..data.parquet_rows import ParquetRows

    if spec.startswith(SHARDS):
        return ParquetRows(_click_shards(spec.removeprefix(SHARDS)).name, CRITEO)
    kind, _, path = spec.partition(":")
    return ParquetRows(path, CRITEO) if kind == "criteo-parquet" and path else None


def _parquet(spec: str) -> str | None:
    """The path of ``parquet:PATH``."""
    kind, _, path = spec.partition(":")
    return path if kind == "parquet" and path else None


@lru_cache(maxsize=4)
def _shards(spec: str) -> ScratchFolder:
    from ..data.convert_sequences import write_sequences

    folder = ScratchFolder()
    write_sequences([load_interactions(spec)], Path(folder.name), rows_per_file=16, rows_per_group=5)
    return folder


@lru_cache(maxsize=4)
def _window_shards(spec: str, max_history: int, max_exposed: int) -> ScratchFolder:
    from ..data.convert_windows import write_windows

    folder, log = ScratchFolder(), load_interactions(spec)
    write_windows(
        [log], Path(folder.name), max_history, max_exposed, rows_per_group=5, users=log.user_features,
        genres=log.genres,
    )  # fmt: skip
    return folder


@lru_cache(maxsize=4)
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
