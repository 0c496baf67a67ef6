"""The `tritonrec` command."""

from __future__ import annotations

import signal
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from .cli_cluster import lab, plan, serve_bench, simulate
from .cli_options import (
    MOST,
    MOST_RANKS,
    DataOption,
    TimeoutOption,
    checked,
    demand_writable,
    load_job,
    names,
    numbers,
)
from .cli_profile import profile
from .cli_train import train
from .progress import announce_compilation

app = typer.Typer(
    name="tritonrec",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tritonrec {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it, and end.")
    ] = False,
) -> None:
    """Train large recommendation models with nested pipelining, and prove it bit for bit."""
    announce_compilation()


class TimerName(StrEnum):
    """Clocks of `tritonrec bench`."""

    wall = "wall"
    cpu = "cpu"


@app.command()
def verify(
    data: DataOption = "ml-100k",
    quick: Annotated[bool, typer.Option("--quick", help="A small table, under a minute.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every combination; takes long.")] = False,
    modes: Annotated[str, typer.Option(help="Modes to prove, separated by commas.")] = "dbp,fwp,nestpipe",
    world_size: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "1,2,4",
    micro_batches: Annotated[str, typer.Option(help="Values of N, separated by commas.")] = "1,2,3,4,8",
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Steps of each case; of embedding variants at least six."),
    ] = None,
    faults: Annotated[
        bool, typer.Option("--inject-faults", help="Also inject known faults and demand their discovery.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Record a trace and a picture of each mode here.")
    ] = None,
    timeout: TimeoutOption = 60,
) -> None:
    """Prove that the pipelined modes equal synchronous training in every bit.

    Each case trains the same model on the same batches in one mode and in its reference, and compares losses,
    dense parameters, keys, rows and optimizer states after every step. Exit status 0 only if all are
    identical and every injected fault was caught.
    """
    from ..pipeline import PIPELINED
    from .cases import contract_table
    from .contract import verify_contract
    from .record_traces import record_traces
    from .setup import Job

    demand_writable({"--json": json_file}, {"--trace": trace})
    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other")
    job = checked(lambda: load_job(Job(data=data, chunk_rows=512)))
    size = "quick" if quick else "full" if full else "default"
    chosen = names(modes, PIPELINED, "--modes")
    ranks, counts = (
        numbers(world_size, "--world-size", most=MOST_RANKS),
        numbers(micro_batches, "--micro-batches"),
    )
    if quick and world_size == "1,2,4":
        ranks = [1, 2]
    cases = contract_table(size, chosen, ranks, counts, steps)  # type: ignore[arg-type]
    console = Console()
    report = checked(lambda: verify_contract(job, cases, faults, console, timedelta(seconds=timeout)))
    if json_file:
        checked(lambda: report.save(json_file))
        console.print(f"report written to {json_file}")
    sound = checked(lambda: record_traces(job, str(trace), console)) if trace else True
    raise typer.Exit(0 if report.passed and sound else 1)


app.command()(train)


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="A trace written by verify, train or Recorder.save.")],
    png: Annotated[Path | None, typer.Option(help="Draw the timeline.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    kineto: Annotated[Path | None, typer.Option(help="Export Kineto-style JSON.")] = None,
) -> None:
    """Time per lane, exposed communication, hidden lookup; checks that every dependency was honoured."""
    from .trace_report import trace_report

    demand_writable({"--png": png, "--json": json_file}, {"--kineto": kineto})
    raise typer.Exit(checked(lambda: trace_report(file, png=png, json_out=json_file, kineto=kineto)))


@app.command()
def bench(
    only: Annotated[str, typer.Option(help="Suites, or benchmarks, whose name contains this.")] = "",
    compare: Annotated[Path | None, typer.Option(help="Fail where a ratio leaves this one's band.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    repeat: Annotated[
        int, typer.Option(min=1, max=10_000, help="Runs; their spread is the band of a baseline.")
    ] = 1,
    record: Annotated[bool, typer.Option("--record", help="Append to ci/baselines/history.jsonl.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Draw the recorded runs to this PNG.")] = None,
    timer: Annotated[
        TimerName, typer.Option(help="cpu: seconds of the process, for a machine that is busy.")
    ] = TimerName.wall,
) -> None:
    """Time the kernels beside their peers; print ratios, losses as plainly as wins."""
    from .bench import bench as run_bench

    demand_writable({"--json": json_file, "--chart": chart})
    raise typer.Exit(checked(lambda: run_bench(only, repeat, json_file, compare, record, chart, timer.value)))


app.command()(profile)
app.command()(lab)
app.command()(simulate)
app.command()(plan)
app.command("serve-bench")(serve_bench)


@app.command()
def doctor() -> None:
    """What this machine has, and whether batch invariance holds on it."""
    from .doctor import doctor as run_doctor

    raise typer.Exit(run_doctor())


def _leave(number: int, _frame: object) -> None:
    """End as after an exception: ranks, network namespaces and temporary folders go."""
    raise SystemExit(128 + number)


def main() -> None:
    """Entry point of the console script."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _leave)
    app()
