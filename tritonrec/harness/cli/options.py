"""What the commands of `tritonrec` share: options, and how their words are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...files import check_writable

DATA_HELP = (
    "ml-100k, csv:PATH (columns user, item, timestamp[, rating]), parquet:PATH, kuairand:PATH, "
    "zipf[:users=...,items=...,seed=...]; for dlrm also criteo-tsv:PATH, criteo-parquet:PATH, "
    "criteo[:samples=...,scale=...,seed=...] and avazu[:...]"
)
MOST = 2**31 - 1
"""Of what is counted, where no smaller number is absurd."""
MOST_SEED = 2**63 - 1
MOST_RANKS = 1024
"""Processes of one machine."""

DataOption = Annotated[str, typer.Option(help=DATA_HELP)]
TimeoutOption = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="Seconds a rank waits for another before it gives up.")
]


class ModeName(StrEnum):
    """Modes of a `Trainer`."""

    reference = "reference"
    sequential = "sequential"
    dbp = "dbp"
    fwp = "fwp"
    nestpipe = "nestpipe"


class ConsistencyName(StrEnum):
    """Levels of consistency."""

    window = "window"
    batch = "batch"


class ModelChoice(StrEnum):
    """Models that the harness trains."""

    hstu = "hstu"
    fuxi = "fuxi"
    grm = "grm"
    dlrm = "dlrm"


def load_job(job):
    """`job`, after its data has been found and read once."""
    try:
        job.loader()
    except ValueError as error:
        raise ValueError(f"{error} (--data {job.data})") from error
    return job


def checked(function):
    """Call `function`; an error a user can mend becomes one line and exit status 2."""
    from ...distributed import RankDiedError
    from ...pipeline import StageFailedError

    try:
        return function()
    except MemoryError as error:
        if os.environ.get("TRITONREC_DEBUG"):
            raise
        _say(f"out of memory: {error or 'choose smaller sizes'}")
    except (ValueError, OSError, OverflowError, RankDiedError, StageFailedError, RuntimeError) as error:
        if os.environ.get("TRITONREC_DEBUG"):
            raise
        _say(str(error))
    raise typer.Exit(2)


def _say(message: str) -> None:
    """Messages quote file names and compilers' output, which may look like markup."""
    console = Console(stderr=True)
    console.print("[red]error:[/] ", end="")
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def demand_writable(
    files: Mapping[str, Path | None] | None = None, folders: Mapping[str, Path | None] | None = None
) -> None:
    """Exit with one line and status 2 where an output could not be written at the end, by option.

    Outputs that are one file are refused too. Called before any work is done; leaves nothing behind.
    """
    seen: dict[Path, str] = {}
    for option, path, folder in (
        *((option, path, False) for option, path in (files or {}).items()),
        *((option, path, True) for option, path in (folders or {}).items()),
    ):
        if path is None:
            continue

        def check(option: str = option, path: Path = path, folder: bool = folder) -> None:
            try:
                check_writable(path, folder)
            except OSError as error:
                raise ValueError(f"{option}: {error.strerror}") from error
            other = seen.setdefault(path.resolve(), option)
            if other != option and (not path.exists() or path.is_file()):
                raise ValueError(f"{other} and {option} are both {path}: give each a place of its own")

        checked(check)


def head_width(dim: int, heads: int) -> int:
    """Values of each attention head; BadParameter where `heads` does not divide `dim`."""
    if dim % heads:
        raise typer.BadParameter(f"--heads {heads} does not divide --dim {dim}: choose numbers where it does")
    return dim // heads


def names(text: str, known: tuple[str, ...], option: str) -> list[str]:
    """Some of `known`, from words separated by commas; BadParameter naming `option` otherwise."""
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise typer.BadParameter(f"{option} takes some of {', '.join(known)}, got {text!r}")
    return chosen


def shares(text: str, option: str) -> tuple[float, ...]:
    """Shares from 0 to 1, separated by commas; BadParameter naming `option` otherwise."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= share <= 1 for share in found):
        raise typer.BadParameter(f"{option} takes shares from 0 to 1, separated by commas, got {text!r}")
    return found


def numbers(text: str, option: str, least: int = 1, most: int = 65_536) -> list[int]:
    """Whole numbers in a range, separated by commas; BadParameter naming `option` otherwise."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least or max(found) > most:
        raise typer.BadParameter(
            f"{option} takes whole numbers from {least} to {most}, separated by commas, got {text!r}"
        )
    return found
