"""The command `bench`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .. import bench as suites
from .outputs import checked, require_writable


class Timer(StrEnum):
    """Clocks."""

    wall = "wall"
    cpu = "cpu"


def bench(
    only: Annotated[str, typer.Option(help="Suites, or benchmarks, whose name contains this.")] = "",
    compare: Annotated[Path | None, typer.Option(help="Fail where a ratio leaves this one's band.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    repeat: Annotated[
        int, typer.Option(min=1, max=10_000, help="Runs; their spread is the band of a baseline.")
    ] = 1,
    timer: Annotated[
        Timer, typer.Option(help="cpu: seconds of the process, for a machine that is busy.")
    ] = Timer.wall,
) -> None:
    """Time the kernels beside their peers; print ratios, losses as plainly as wins."""
    require_writable({"--json": json_file})
    raise typer.Exit(checked(lambda: suites.bench(only, repeat, json_file, compare, timer.value)))
