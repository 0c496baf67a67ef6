"""The command `plan`."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from ...distributed.environment import rank_here
from ...distributed.groups import validate_division
from ...settings import bytes_of
from ..simulator import run
from ..simulator.stage_costs import MOST_WORKERS
from ..train.config import read_config
from .options import MOST_RANKS, TimeoutOption
from .outputs import checked, require_writable


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(help="Settings of a run, as train --print-config writes them."),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Stage costs (docs/simulator.md), or a report of lab --json.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Measure the costs from this trace instead.")] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_WORKERS, help="Ranks to plan for; default: those measured, or one."),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Copies of the tables.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Nodes that ranks are treated as.")] = 1,
    trial_steps: Annotated[
        int | None,
        typer.Option(min=4, max=10_000, help="Steps of the run to try; by default as many as 20 s hold."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Of the machine for all ranks, as 64GiB; default: what is left here.")
    ] = None,
    timeout: TimeoutOption = 60,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plans to this file.")] = None,
    save_costs: Annotated[Path | None, typer.Option(help="Write the stage costs to this file.")] = None,
) -> None:
    """Tell what a run will need of memory and time, or which switches suit measured costs.

    With the settings of a run a few of its steps are tried here on all ranks, its batches are read to count
    rows, and memory by kind, time and bytes of the whole are printed, with what would make it fit.

    With --costs or --trace every choice of micro-batches, taper, batches in flight, copies of the tables,
    first_use and skip_fetch is simulated. Prints the gain of each switch, and the assumptions.
    """
    require_writable(
        {"--json": json_file, "--save-costs": save_costs},
        inputs={"CONFIG": config, "--costs": costs, "--trace": trace},
    )
    size = None if memory is None else checked(lambda: bytes_of(memory, "--memory"))
    if config is None:
        if size is not None:
            raise typer.BadParameter("--memory goes with the settings of a run")
        checked(lambda: run.plan(costs, trace, world_size, json_file, save_costs))
        return
    for option, given in {"--costs": costs, "--trace": trace, "--save-costs": save_costs}.items():
        if given:
            raise typer.BadParameter(f"{option} does not go with the settings of a run")
    from ..plan.report import plan_run
    from .job import ready
    from .train import RUN

    planned = checked(lambda: ready(read_config(config, RUN)))
    planned = replace(planned, steps=planned.steps or 20 * planned.job.loader().steps_per_epoch)
    here = checked(rank_here).world_size
    ranks = here if here > 1 else world_size or 1
    if world_size not in (None, ranks):
        raise typer.BadParameter(f"--world-size {world_size} is not that of the launcher's {ranks} ranks")
    checked(lambda: validate_division(ranks, replicas, nodes))
    limit = timedelta(seconds=timeout)
    checked(lambda: plan_run(planned, ranks, replicas, nodes, trial_steps, size, limit, json_file))
