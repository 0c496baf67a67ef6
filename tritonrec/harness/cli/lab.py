"""The command `lab`."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...optional import require
from ...pipeline import STAGED
from .. import network
from ..lab import report, rounds, settings
from ..lab.rounds import PLAN, LabConfig
from ..shown import say, written
from .job import load_job, with_head_width
from .options import TimeoutOption, with_options
from .outputs import checked, require_writable
from .words import names

OFFERED = (
    "data", "batch_size", "max_seq_len", "negatives", "dim", "layers", "heads", "seed", "world_size",
    "nodes", "rate", "micro_batches", "steps", "rounds",
)  # fmt: skip


@with_options(OFFERED)
def lab(
    plan: LabConfig = PLAN,
    modes: Annotated[
        str, typer.Option(help="Modes beside sequential at N = 1: sequential, dbp, fwp, nestpipe.")
    ] = "dbp,fwp,nestpipe",
    switch: Annotated[
        list[str] | None,
        typer.Option(
            help="Field of WindowConfig, replicas=R for R copies of the tables (2D), nodes=H for lookups "
            "in two steps: NAME or NAME=VALUE. Nestpipe runs once more with them all."
        ),
    ] = None,
    emulate: Annotated[
        str,
        typer.Option(help="STAGE=MS,...: least milliseconds per step; lookup stands for its four stages."),
    ] = "",
    proportions: Annotated[
        str,
        typer.Option(help="paper, or LOOKUP,COMMUNICATION: emulate these percents of a sequential step."),
    ] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the parts of a step.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Keep a trace and a timeline of each setting here.")
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Only remove namespaces whose lab is gone, and end.")
    ] = False,
    timeout: TimeoutOption = 60,
) -> None:
    """Run every mode over rate-limited links; print exposed, hidden and sent parts.

    Ranks live in network namespaces of this machine, without root in a user's own, joined by links of the
    given rate, and everything is removed at the end. Losses are compared before any figure is printed.
    """
    console = Console()
    require_writable({"--json": json_file, "--png": png}, {"--trace": trace})
    if clean:
        checked(lambda: rounds.clean_up(console))
        return
    checked(lambda: require("perfetto", "tritonrec lab"))
    sizes = with_head_width(plan.job.sizes)

    def run() -> rounds.Result:
        network.require_tools()
        whole = replace(
            plan,
            job=replace(plan.job, sizes=sizes),
            modes=names(modes, STAGED, "--modes"),  # type: ignore[arg-type]
            switches=settings.parse_switches(switch or []),
            seconds=settings.parse_emulation(emulate),
            proportions=settings.parse_proportions(proportions) if proportions else {},
        )
        load_job(whole.job)
        return rounds.run_lab(whole, console, trace, timedelta(seconds=timeout))

    result = checked(run)
    report.print_report(result, console)
    checked(lambda: written(report.as_json(result), json_file, console, "figures"))
    if png:
        checked(lambda: report.draw_report(result, png))
        say(console, f"picture: {png}")
