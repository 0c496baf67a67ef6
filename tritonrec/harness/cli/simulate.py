"""The command `simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..simulator import Workload, run
from ..simulator.stage_costs import MOST_WORKERS
from .options import with_options
from .outputs import checked, require_writable

WORKLOAD = Workload()


@with_options()
def simulate(
    table: Annotated[str, typer.Option(help="Only tables of the paper whose name contains this.")] = "",
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="Predict a lab's report, or traces, the first of which gives the costs; repeat."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_WORKERS, help="Also simulate so many workers, each by itself."),
    ] = None,
    jitter: Annotated[
        float, typer.Option(min=0, max=1, help="Scatter of tasks: of --workers, and of the curves.")
    ] = 0.0,
    keys: Workload = WORKLOAD,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write cells and curves here.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw scaling curves, the sweep of Fig. 9 and the parts of Fig. 7.")
    ] = None,
) -> None:
    """Model the cluster of the NestPipe paper; print paper, model and error side by side.

    Four constants are fitted on TorchRec's rows of Tables II and III; every other figure is predicted by
    executing the schedule tables.
    """
    require_writable(
        {"--json": json_file, "--png": png},
        inputs={f"--measured {path}": path for path in measured or ()},
    )
    if measured:
        if table or workers or jitter or png:
            raise typer.BadParameter("--measured goes with --json only")
        checked(lambda: run.simulate_measured(measured, json_file))
        return
    checked(lambda: run.simulate(keys, table or None, workers, jitter, json_file, png))
