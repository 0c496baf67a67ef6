"""The command `serve-bench`."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..serve import report, rounds
from ..serve.rounds import ServeConfig
from ..shown import written
from .options import TimeoutOption, with_options
from .outputs import checked, require_writable
from .words import names

PLAN = ServeConfig()


@with_options()
def serve_bench(
    plan: ServeConfig = PLAN,
    scenarios: Annotated[
        str, typer.Option(help="Some of delays, balanced, straggler, sizes; none for all-to-alls only.")
    ] = "delays, balanced, straggler, sizes",
    delay: Annotated[
        float, typer.Option(min=0, max=1000, help="Longest random delay of a step, in ms.")
    ] = 10.0,
    largest: Annotated[
        int,
        typer.Option(
            min=0, max=2**31, help="Bytes to each rank of the largest plain all-to-all; 0 for none."
        ),
    ] = 16 * 2**20,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Serve this checkpoint of tritonrec train --model dlrm.")
    ] = None,
    mpi: Annotated[
        bool, typer.Option(help="Put MPI beside the all-to-alls where mpi4py is installed.")
    ] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Keep traces of the first round here.")] = None,
    timeout: TimeoutOption = 60,
) -> None:
    """Serve a DLRM whose lookups have a bounded lag; print latency and throughput by bound.

    Random delays, balanced ranks, one straggler, messages of drawn sizes; plain all-to-alls of growing size.
    Predictions of all settings are compared bit by bit before any figure is printed.
    """
    require_writable({"--json": json_file}, {"--trace": trace})
    chosen = () if scenarios == "none" else tuple(names(scenarios, rounds.SCENARIOS, "--scenarios"))
    sizes = tuple(4**power for power in range(32) if 4**power <= largest)
    console = Console()
    result = checked(
        lambda: rounds.run_bench(
            replace(plan, scenarios=chosen, delay=delay / 1e3, sizes=sizes, checkpoint=checkpoint),
            console,
            trace,
            mpi,
            timedelta(seconds=timeout),
        )
    )
    report.print_report(result, console)
    checked(lambda: written(report.as_json(result), json_file, console, "figures"))
