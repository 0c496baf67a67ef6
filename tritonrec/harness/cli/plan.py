"""The command `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..simulator import run
from .outputs import checked, require_writable


def plan(
    costs: Annotated[
        Path | None, typer.Option(help="Stage costs (docs/simulator.md), or a report of lab --json.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Measure the costs from this trace instead.")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="Ranks to plan for; default: those measured.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plans to this file.")] = None,
    save_costs: Annotated[Path | None, typer.Option(help="Write the stage costs to this file.")] = None,
) -> None:
    """Choose micro-batches, taper, batches in flight, copies of the tables, first_use and skip_fetch.

    Every choice is simulated on measured stage costs. Prints the gain of each switch, and the assumptions.
    """
    require_writable({"--json": json_file, "--save-costs": save_costs})
    checked(lambda: run.plan(costs, trace, world_size, json_file, save_costs))
