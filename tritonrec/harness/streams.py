"""Data that `tritonrec train` streams, by the word of `--data`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..data import load_interactions
from ..data.sequences import COLUMNS, holds_sequences
from ..files import ScratchFolder
from .progress import CommandProgress

if TYPE_CHECKING:
    from ..data.parquet_rows import ParquetRows

SHARDS = "shards:"
"""``shards:SOURCE``: the log SOURCE as shards of sequences, in a folder of this process, and streamed."""


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
def _grouped(path: str) -> ParquetRows:
    from ..data.grouped import sequences_of
    from ..data.parquet_rows import ParquetRows

    console = Console(stderr=True)
    with ExitStack() as stack:
        progress, task = None, None

        def report(done: int) -> None:
            nonlocal progress, task
            if progress is None:
                progress = stack.enter_context(CommandProgress(console))
                task = progress.add_task("grouping the log by user", total=ParquetRows(path, ()).num_rows)
            progress.advance(task, done)

        folder = sequences_of(path, report)
    if progress is not None:
        console.print(
            f"parquet:{path} is grouped by user in {folder}: later runs stream from there",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    return ParquetRows(folder, COLUMNS)


@lru_cache(maxsize=4)
def clicks(spec: str) -> ParquetRows | None:
    """The rows of clicks in Criteo's format as Parquet; None for any other data."""
    from ..data.criteo import COLUMNS as CRITEO
    from ..data.parquet_rows import ParquetRows

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
