"""The commands `lab`, `simulate`, `plan` and `serve-bench`; `tritonrec.harness.cli` has the others."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..files import save_json
from .cli_options import (
    MOST,
    MOST_SEED,
    DataOption,
    TimeoutOption,
    checked,
    demand_writable,
    head_width,
    load_job,
    names,
    numbers,
)


def lab(
    data: DataOption = "zipf:users=8000,items=40000,median_length=40,seed=1",
    world_size: Annotated[int, typer.Option(min=2, max=1024, help="Ranks, each in a network namespace.")] = 4,
    rate: Annotated[
        float, typer.Option(min=0.1, max=100_000, help="Mbit/s of each rank's link, each way.")
    ] = 100.0,
    modes: Annotated[
        str, typer.Option(help="Modes beside synchronous training: sequential, dbp, fwp, nestpipe.")
    ] = "dbp,fwp,nestpipe",
    micro_batches: Annotated[str, typer.Option(help="Values of N; dbp runs whole batches.")] = "4,8",
    switch: Annotated[
        list[str] | None,
        typer.Option(
            help="Field of WindowConfig, or replicas=R for R copies of the tables (2D): NAME or NAME=VALUE. "
            "Nestpipe runs once more with them all."
        ),
    ] = None,
    emulate: Annotated[
        str,
        typer.Option(help="STAGE=MS,...: least milliseconds per step; lookup stands for its four stages."),
    ] = "",
    proportions: Annotated[
        str,
        typer.Option(help="paper, or LOOKUP,COMMUNICATION: emulate these percents of a synchronous step."),
    ] = "",
    steps: Annotated[
        int, typer.Option(min=1, max=MOST, help="Steps of a run, at least 4; two of them warm up.")
    ] = 8,
    repeat: Annotated[
        int, typer.Option("--rounds", min=1, max=10_000, help="Interleaved runs of each setting.")
    ] = 3,
    batch_size: Annotated[int, typer.Option(min=1, max=2**24, help="Samples of the global batch.")] = 256,
    max_seq_len: Annotated[int, typer.Option(min=1, max=2**20, help="Tokens per sample at most.")] = 50,
    negatives: Annotated[int, typer.Option(min=1, max=2**20, help="Sampled items per token.")] = 2,
    dim: Annotated[int, typer.Option(min=1, max=65_536, help="Embedding and model dimension.")] = 32,
    layers: Annotated[int, typer.Option(min=1, max=1024, help="HSTU layers.")] = 1,
    heads: Annotated[int, typer.Option(min=1, max=4096, help="Attention heads.")] = 2,
    seed: Annotated[
        int, typer.Option(min=-MOST_SEED, max=MOST_SEED, help="Of everything that is drawn.")
    ] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw what makes up a step.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Keep a trace and a timeline of each setting here.")
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", help="Also run the best of tritonrec plan's; expected beside measured."),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Only remove namespaces whose lab is gone, and end.")
    ] = False,
    timeout: TimeoutOption = 60,
) -> None:
    """Run every mode over rate-limited links; print what is exposed, hidden and sent. Needs root.

    Ranks live in network namespaces of this machine, joined by links of the given rate, and everything is
    removed at the end. Losses are compared before any figure is printed.
    """
    from ..nn import HSTUConfig
    from ..pipeline import STAGED
    from .lab import network, report, rounds, settings
    from .setup import Job

    console = Console()
    demand_writable({"--json": json_file, "--png": png}, {"--trace": trace})
    if clean:
        checked(lambda: rounds.clean_up(console))
        return
    width = head_width(dim, heads)
    sizes = HSTUConfig(
        dim=dim, layers=layers, heads=heads, qk_dim=width, v_dim=width,
        max_seq_len=max_seq_len, dropout=0.0,
    )  # fmt: skip

    def run():
        network.demand_tools()
        plan = rounds.Plan(
            Job(data, "hstu", batch_size, max_seq_len, negatives, sizes=sizes, seed=seed),
            world_size,
            rate,
            names(modes, STAGED, "--modes"),  # type: ignore[arg-type]
            numbers(micro_batches, "--micro-batches"),
            settings.parse_switches(switch or []),
            settings.parse_emulation(emulate),
            settings.parse_proportions(proportions) if proportions else {},
            steps,
            repeat,
            settings.read_plan(plan_file) if plan_file else None,
        )
        load_job(plan.job)
        return rounds.run_lab(plan, console, trace, timedelta(seconds=timeout))

    result = checked(run)
    report.print_report(result, console)
    if json_file:
        checked(lambda: save_json(report.as_json(result), json_file))
        console.print(f"figures written to {json_file}")
    if png:
        checked(lambda: report.draw_report(result, png))
        console.print(f"picture: {png}")


def simulate(
    table: Annotated[str, typer.Option(help="Only tables of the paper whose name contains this.")] = "",
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="Predict a lab's report, or traces, the first of which gives the costs; repeat."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=2**20, help="Also simulate so many workers, each by itself.")
    ] = None,
    jitter: Annotated[
        float, typer.Option(min=0, max=1, help="Scatter of tasks: of --workers, and of the curves.")
    ] = 0.0,
    exponent: Annotated[float, typer.Option(min=0, max=5, help="Zipf's, of the assumed keys.")] = 1.05,
    affinity: Annotated[
        float, typer.Option(min=0, max=1, help="Share of keys that a user's community has to itself.")
    ] = 0.8,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write cells and curves here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw scaling curves and the sweep of Fig. 9.")] = None,
) -> None:
    """Model the cluster of the NestPipe paper; print paper, model and error side by side.

    Four constants are fitted on TorchRec's rows of Tables II and III; every other figure is predicted by
    executing the schedule tables.
    """
    from .simulator import Workload
    from .simulator import run as simulator

    demand_writable({"--json": json_file, "--png": png})
    if measured:
        if table or workers or jitter or png:
            raise typer.BadParameter("--measured goes with --json only")
        checked(lambda: simulator.simulate_measured(measured, json_file))
        return
    keys = Workload(exponent=exponent, affinity=affinity)
    checked(lambda: simulator.simulate(keys, table or None, workers, jitter, json_file, png))


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

    Every choice is simulated on measured stage costs. Says what each switch saves, and what was assumed.
    """
    from .simulator import run as simulator

    demand_writable({"--json": json_file, "--save-costs": save_costs})
    checked(lambda: simulator.plan(costs, trace, world_size, json_file, save_costs))


def serve_bench(
    world_size: Annotated[int, typer.Option(min=2, max=1024, help="Ranks.")] = 4,
    bounds: Annotated[
        str, typer.Option(help="Bounds k, separated by commas; 0 is always run.")
    ] = "0,1,2,4,8",
    scenarios: Annotated[
        str, typer.Option(help="Some of delays, balanced, straggler, sizes; none for all-to-alls only.")
    ] = "delays,balanced,straggler,sizes",
    delay: Annotated[
        float, typer.Option(min=0, max=1000, help="Longest random delay of a step, in ms.")
    ] = 10.0,
    steps: Annotated[int, typer.Option(min=1, max=MOST, help="Batches of a run.")] = 60,
    repeat: Annotated[
        int, typer.Option("--rounds", min=2, max=10_000, help="Interleaved runs of each setting.")
    ] = 5,
    batch_size: Annotated[int, typer.Option(min=2, max=2**24, help="Samples of all ranks together.")] = 64,
    largest: Annotated[
        int,
        typer.Option(
            min=0, max=2**31, help="Bytes to each rank of the largest plain all-to-all; 0 for none."
        ),
    ] = 16 * 2**20,
    mpi: Annotated[
        bool, typer.Option(help="Put MPI beside the all-to-alls where mpi4py is installed.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of everything that is drawn.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw latency over k.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Keep traces of the first round here.")] = None,
    timeout: TimeoutOption = 60,
) -> None:
    """Serve a DLRM whose lookups travel with a bounded lag; print latency and throughput for each bound.

    Random delays, balanced ranks, one straggler, messages of drawn sizes; plain all-to-alls of growing size.
    Predictions of all settings are compared bit by bit before any figure is printed.
    """
    from . import serve_bench as bench
    from . import serve_bench_report as report

    demand_writable({"--json": json_file, "--png": png}, {"--trace": trace})

    lags = numbers(bounds, "--bounds", 0, 1024)

    def run():
        chosen = () if scenarios == "none" else names(scenarios, bench.SCENARIOS, "--scenarios")
        sizes = tuple(4**power for power in range(32) if 4**power <= largest)
        plan = bench.Plan(
            world_size, tuple(lags), tuple(chosen), delay / 1e3, steps, repeat, batch_size, sizes, seed
        )
        return bench.run_bench(plan, console, trace, mpi, timedelta(seconds=timeout))

    console = Console()
    result = checked(run)
    report.print_report(result, console)
    if json_file:
        checked(lambda: save_json(report.as_json(result), json_file))
        console.print(f"figures written to {json_file}")
    if png:
        checked(lambda: report.draw_report(result, png))
        console.print(f"picture: {png}")
