"""What the commands of `tritonrec` share: options, and how their words are read."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

DATA_HELP = (
    "ml-100k, csv:PATH (columns user, item, timestamp[, rating]), parquet:PATH, kuairand:PATH, "
    "zipf[:users=...,items=...,seed=...]; for dlrm also criteo-tsv:PATH, criteo-parquet:PATH, "
    "criteo[:samples=...,scale=...,seed=...] and avazu[:...]"
)
DataOption = Annotated[str, typer.Option(help=DATA_HELP)]
TimeoutOption = Annotated[
    int, typer.Option(min=1, help="Seconds a rank waits for another before it gives up.")
]


class ModeName(StrEnum):
    """Modes of a `Trainer`."""

    sync = "sync"
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
    job.loader()
    return job


def checked(function):
    """Call `function`; an error a user can mend becomes one line and exit status 2."""
    from ..distributed import RankDiedError
    from ..pipeline import StageFailedError

    try:
        return function()
    except (ValueError, OSError, RankDiedError, StageFailedError, RuntimeError) as error:
        if os.environ.get("TRITONREC_DEBUG"):
            raise
        # Messages quote file names and compilers' output, which may look like markup.
        console = Console(stderr=True)
        console.print("[red]error:[/] ", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


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


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers from 1, separated by commas; BadParameter naming `option` otherwise."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{option} takes whole numbers from 1, separated by commas, got {text!r}")
    return found
