"""The command `verify`."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...nn import HSTUConfig
from ...pipeline import PIPELINED
from ...settings import MOST
from ..devices import validate_device
from ..job import Job
from ..shown import say
from ..verify.cases import contract_table, small_table
from ..verify.contract import verify_contract
from ..verify.record_traces import record_traces
from ..verify.tools import SELECTIONS
from ..verify.variants import every_variant
from .job import load_job
from .options import MOST_RANKS, TimeoutOption, with_options
from .outputs import checked, log_of, require_writable
from .words import names, numbers

JOB = Job(chunk_rows=512)
RANKS = "1,2,4"
COUNTS = "1,2,3,4,8"
SMALL = Job(
    "zipf:users=40,items=60,seed=5", batch_size=8, max_seq_len=16, num_negatives=1, chunk_rows=64,
    sizes=HSTUConfig(dim=8, layers=1, heads=2, qk_dim=4, v_dim=4, max_seq_len=16),
)  # fmt: skip
"""For implementations that take long: Triton where it is emulated, and the references."""


@with_options(only=("data", "impl", "device"))
def verify(
    job: Job = JOB,
    quick: Annotated[bool, typer.Option("--quick", help="A small table, under a minute.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every combination; takes long.")] = False,
    modes: Annotated[str, typer.Option(help="Modes to prove, separated by commas.")] = ",".join(PIPELINED),
    world_size: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = RANKS,
    micro_batches: Annotated[str, typer.Option(help="Values of N, separated by commas.")] = COUNTS,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Steps of each case; of embedding variants at least six."),
    ] = None,
    faults: Annotated[
        bool, typer.Option("--inject-faults", help="Also inject known faults and demand their discovery.")
    ] = False,
    corpus: Annotated[
        bool,
        typer.Option(
            "--corpus",
            help="Inject the public bugs of docs/bugs.md instead of running the table; with --inject-faults "
            "all faults.",
        ),
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
    require_writable({"--json": json_file}, {"--trace": trace}, inputs={"--data": log_of(job.data)})
    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other")
    if corpus and (quick or full):
        raise typer.BadParameter("--corpus runs no table: leave --quick and --full out")
    small = job.target.is_slow and not (quick or full)
    if job.target.is_slow:
        data = SMALL.data if job.data == JOB.data else job.source
        job = replace(SMALL, data=data, target=job.target)
    job = checked(lambda: load_job(replace(job, stream=False)))
    if job.is_streamed:
        raise typer.BadParameter(
            f"verify needs a log that is read whole, and streams shards of its own in its variant stream: "
            f"--data {job.data} has rows of sequences"
        )
    size = "quick" if quick else "full" if full else "default"
    chosen = names(modes, PIPELINED, "--modes")
    ranks = numbers(world_size, "--world-size", most=MOST_RANKS)
    counts = numbers(micro_batches, "--micro-batches")
    if (quick or small) and world_size == RANKS:
        ranks = [1, 2]
    if small and micro_batches == COUNTS:
        counts = [4]
    checked(lambda: validate_device(job.target.device, max(ranks)))
    if corpus:
        cases = []
    elif small:
        cases = small_table(chosen, ranks, counts, steps)  # type: ignore[arg-type]
    else:
        cases = contract_table(size, chosen, ranks, counts, steps)  # type: ignore[arg-type]
    injected = SELECTIONS[faults, corpus]
    console = Console()
    if job.target.device != "cpu":  # ranks that go on without others communicate over gloo
        cases = [case for case in cases if not case.changes.on_ranks]
        injected = [fault for fault in injected if not fault.case.changes.on_ranks]
        for name, variant in every_variant().items():
            if variant.on_ranks:
                console.print(f"variant {name} is left out: it runs on the CPU")
    report = checked(lambda: verify_contract(job, cases, injected, console, timedelta(seconds=timeout)))
    if json_file:
        checked(lambda: report.save(json_file))
        say(console, f"report written to {json_file}")
    sound = checked(lambda: record_traces(job, str(trace), console)) if trace else True
    raise typer.Exit(0 if report.passed and sound else 1)
