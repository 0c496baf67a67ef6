"""The `tritonrec` command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .cli_cluster import lab, plan, serve_bench, simulate
from .cli_options import (
    ConsistencyName,
    DataOption,
    ModelChoice,
    ModeName,
    TimeoutOption,
    checked,
    load_job,
    names,
    numbers,
    shares,
)
from .cli_profile import profile

EVICT_HELP = "lru:ROWS, lfu:ROWS or ttl:STEPS; :EVERY behind it sets the steps between sweeps."
HEAT_HELP = (
    "THRESHOLD:EVERY: rows used in fewer steps are kept in half precision; counts halve every EVERY steps."
)

SLIPSTREAM = "Slipstream, for dlrm (docs/slipstream.md)"

app = typer.Typer(
    name="tritonrec",
    help="Train large recommendation models with nested pipelining, and prove it bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


class DedupName(StrEnum):
    """Where repeated keys are dropped."""

    none = "none"
    exchange = "exchange"
    lookup = "lookup"
    both = "both"


class TimerName(StrEnum):
    """Clocks of `tritonrec bench`."""

    wall = "wall"
    cpu = "cpu"


class OptimizerChoice(StrEnum):
    """Optimizers."""

    sgd = "sgd"
    rowwise_adagrad = "rowwise_adagrad"
    adam = "adam"


@app.command()
def verify(
    data: DataOption = "ml-100k",
    quick: Annotated[bool, typer.Option("--quick", help="A small table, under a minute.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every combination; takes long.")] = False,
    modes: Annotated[str, typer.Option(help="Modes to prove, separated by commas.")] = "dbp,fwp,nestpipe",
    world_size: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "1,2,4",
    micro_batches: Annotated[str, typer.Option(help="Values of N, separated by commas.")] = "1,2,3,4,8",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each case; of embedding variants at least six.")
    ] = None,
    mutations: Annotated[
        bool, typer.Option("--mutations", help="Also plant known bugs and demand their discovery.")
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
    identical and every planted bug was caught.
    """
    from .cases import contract_table
    from .contract import verify_contract
    from .record_traces import record_traces
    from .setup import Job

    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other")
    job = checked(lambda: load_job(Job(data=data, chunk_rows=512)))
    size = "quick" if quick else "full" if full else "default"
    chosen = names(modes, ("dbp", "fwp", "nestpipe"), "--modes")
    ranks, counts = numbers(world_size, "--world-size"), numbers(micro_batches, "--micro-batches")
    if quick and world_size == "1,2,4":
        ranks = [1, 2]
    cases = contract_table(size, chosen, ranks, counts, steps)  # type: ignore[arg-type]
    console = Console()
    if json_file:
        checked(lambda: json_file.parent.mkdir(parents=True, exist_ok=True))
    report = checked(lambda: verify_contract(job, cases, mutations, console, timedelta(seconds=timeout)))
    if json_file:
        report.save(json_file)
        console.print(f"report written to {json_file}")
    sound = record_traces(job, str(trace), console) if trace else True
    raise typer.Exit(0 if report.passed and sound else 1)


@app.command()
def train(
    data: DataOption = "ml-100k",
    mode: Annotated[ModeName, typer.Option(help="How the steps are scheduled.")] = ModeName.nestpipe,
    model: Annotated[
        ModelChoice,
        typer.Option(help="hstu, fuxi: the next item. grm: clicks and conversions. dlrm: a click."),
    ] = ModelChoice.hstu,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps in all; default: 20 epochs.")] = None,
    world_size: Annotated[
        int, typer.Option(min=1, help="Ranks to start here; under torchrun leave it out.")
    ] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, help="N, micro-batches per window.")] = 4,
    consistency: Annotated[
        ConsistencyName, typer.Option(help="batch: the bits of synchronous training.")
    ] = ConsistencyName.batch,
    clustering: Annotated[bool, typer.Option("--clustering", help="Group samples that share keys.")] = False,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of one update.")] = 1,
    dedup: Annotated[
        DedupName, typer.Option(help="Drop repeated keys before the exchange, the lookup, or both.")
    ] = DedupName.both,
    first_use: Annotated[
        bool, typer.Option("--first-use", help="Send a row once a window, and its gradient once.")
    ] = False,
    taper: Annotated[
        float, typer.Option(min=0, max=1, help="Micro-batch over its neighbour nearer to the middle.")
    ] = 1.0,
    skip_fetch: Annotated[
        bool, typer.Option("--skip-fetch", help="Rows of consecutive batches stay in the buffers.")
    ] = False,
    depth: Annotated[
        int, typer.Option(min=0, help="Batches in flight, for dbp and nestpipe; 0: the mode's own number.")
    ] = 0,
    replicas: Annotated[
        int, typer.Option(min=1, help="Copies of the tables; they divide the ranks (2D sparse parallelism).")
    ] = 1,
    average_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="APPROXIMATE: average replicas every n updates and before a save or evaluation; 0: exact.",
        ),
    ] = 0,
    merge: Annotated[bool, typer.Option(help="Keep tables of one dimension in one.")] = True,
    balance: Annotated[
        bool, typer.Option("--balance", help="Deal a batch's samples to ranks by cost; no bit changes.")
    ] = False,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Cut batches by tokens instead of samples.")
    ] = False,
    evict: Annotated[str, typer.Option(help=EVICT_HELP)] = "",
    admission: Annotated[int, typer.Option(min=1, help="Give a key a row at its n-th step.")] = 1,
    heat: Annotated[str, typer.Option(help=HEAT_HELP)] = "",
    optimizer: Annotated[OptimizerChoice, typer.Option()] = OptimizerChoice.adam,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of the global batch.")] = 128,
    max_seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sample at most; grm: of history.")] = 50,
    negatives: Annotated[int, typer.Option(min=1, help="Sampled items per token; grm has none.")] = 32,
    max_exposed: Annotated[int, typer.Option(min=1, help="grm: items shown per sample.")] = 8,
    bottom: Annotated[str, typer.Option(help="dlrm: hidden widths of the bottom MLP.")] = "64,32",
    top: Annotated[str, typer.Option(help="dlrm: hidden widths of the top MLP.")] = "64,32",
    dim: Annotated[int, typer.Option(min=1, help="Embedding and model dimension.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="HSTU layers.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 2,
    dropout: Annotated[float, typer.Option(min=0, max=0.99)] = 0.2,
    relative_bias: Annotated[
        bool, typer.Option("--relative-bias", help="hstu, grm: learned biases of position and time.")
    ] = False,
    recompute: Annotated[
        str, typer.Option(help="What a layer's backward computes again: norm,uvqk,silu,attention,gate.")
    ] = "norm",
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="Directory to save to.")] = None,
    save_every: Annotated[int, typer.Option(min=0, help="Steps between saves; 0: at the end only.")] = 0,
    full_every: Annotated[
        int, typer.Option(min=1, help="Whole checkpoints among the saves; the others hold changes.")
    ] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    evaluate_every: Annotated[
        int, typer.Option(min=0, help="Steps between evaluations; 0: at the end only.")
    ] = 0,
    trace: Annotated[Path | None, typer.Option(help="Write a Perfetto trace to this file.")] = None,
    slipstream: Annotated[
        bool,
        typer.Option(
            "--slipstream",
            help="APPROXIMATE: go on without inputs whose rows stand still, beside a run with all.",
            rich_help_panel=SLIPSTREAM,
        ),
    ] = False,
    drop: Annotated[
        str,
        typer.Option(help="Shares of hot inputs to drop; a run for each.", rich_help_panel=SLIPSTREAM),
    ] = "0.5",
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0, help="Call a row stale below this change; 0 is exact.", rich_help_panel=SLIPSTREAM
        ),
    ] = None,
    alpha: Annotated[
        int,
        typer.Option(
            min=0, help="Stale rows of a dropped input at least; 0: all.", rich_help_panel=SLIPSTREAM
        ),
    ] = 0,
    hot_share: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of a table's accesses that makes a row hot.", rich_help_panel=SLIPSTREAM
        ),
    ] = 1e-4,
    warmup: Annotated[
        int, typer.Option(min=1, help="Steps before hot rows are followed.", rich_help_panel=SLIPSTREAM)
    ] = 100,
    snapshots: Annotated[
        int, typer.Option(min=2, help="Snapshots of hot rows.", rich_help_panel=SLIPSTREAM)
    ] = 3,
    snapshot_every: Annotated[
        int, typer.Option(min=1, help="Steps between snapshots.", rich_help_panel=SLIPSTREAM)
    ] = 50,
    snapshot_mb: Annotated[
        float, typer.Option(help="Megabytes for snapshots, of all ranks.", rich_help_panel=SLIPSTREAM)
    ] = 256.0,
    sample: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the hot inputs to sample, 1000 at least.", rich_help_panel=SLIPSTREAM
        ),
    ] = 1e-3,
    control: Annotated[
        bool,
        typer.Option(
            "--control", help="Also drop as many inputs at random, beside.", rich_help_panel=SLIPSTREAM
        ),
    ] = False,
    online: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the inputs, the last, trained online.", rich_help_panel=SLIPSTREAM
        ),
    ] = 0.0,
    png: Annotated[
        Path | None, typer.Option(help="Draw changes, and speed against loss.", rich_help_panel=SLIPSTREAM)
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the summary to this file.")] = None,
    timeout: TimeoutOption = 60,
) -> None:
    """Train a model in any mode; print its loss and metrics beside those of a ranking without training.

    Next-item models are ranked by HR@K and NDCG@K, grm by group AUC, dlrm by AUC, accuracy and cross entropy.
    What the tables and lookups did is printed below.
    """
    from ..distributed import RankPool, from_environment
    from ..nn import HSTUConfig
    from ..pipeline import WindowConfig
    from ..slipstream import SlipstreamConfig
    from .options import policy
    from .setup import Job
    from .slipstream import SlipstreamRun, train_slipstream
    from .slipstream_report import draw_slipstream
    from .train import Run
    from .train import train as train_rank

    def make_job() -> Job:
        sizes = HSTUConfig(
            dim=dim, layers=layers, heads=heads, qk_dim=max(1, dim // heads), v_dim=max(1, dim // heads),
            max_seq_len=max_seq_len, dropout=dropout, relative_bias=relative_bias,
            recompute=tuple(name.strip() for name in recompute.split(",") if name.strip()),
        )  # fmt: skip
        return load_job(
            Job(
                data,
                model.value,
                batch_size=batch_size,
                max_seq_len=max_seq_len,
                num_negatives=negatives,
                max_exposed=max_exposed,
                sizes=sizes,
                bottom=tuple(numbers(bottom, "--bottom")),
                top=tuple(numbers(top, "--top")),
                lr=lr,
                seed=seed,
                merge=merge,
                policy=policy(evict, admission, heat),
                balance=balance,
                dynamic=dynamic,
            )
        )

    job = checked(make_job)
    window = checked(
        lambda: WindowConfig(
            1 if mode is ModeName.sync else micro_batches,
            consistency.value,
            clustering,
            accumulate,
            dedup.value,
            first_use=first_use,
            taper=taper,
            skip_fetch=skip_fetch,
            depth=depth,
            average_every=average_every,
            seed=seed,
        )
    )
    run = Run(
        job,
        mode.value,
        window,
        optimizer.value,
        steps=steps or 20 * job.loader().steps_per_epoch,
        checkpoint=str(checkpoint) if checkpoint else None,
        save_every=save_every,
        full_every=full_every,
        resume=resume,
        evaluate_every=evaluate_every,
        trace=str(trace) if trace else None,
    )
    job_of_a_rank: Callable[..., dict[str, Any]] = train_rank
    args: tuple[Any, ...] = (run,)
    if slipstream:
        plan = checked(
            lambda: SlipstreamRun(
                SlipstreamConfig(
                    warmup, snapshots, snapshot_every, hot_share, threshold=threshold, alpha=alpha,
                    sample=sample, snapshot_mb=snapshot_mb, seed=seed,
                ),
                shares(drop, "--drop"),
                control,
                online,
            )
        )  # fmt: skip
        job_of_a_rank, args = train_slipstream, (run, plan)
    elif png:
        raise typer.BadParameter("--png goes with --slipstream")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        with from_environment(timedelta(seconds=timeout), replicas) as communicators:
            summary = checked(lambda: job_of_a_rank(communicators, *args))
            first = communicators.rank == 0
    elif world_size % replicas:
        raise typer.BadParameter(f"{replicas} replicas do not divide {world_size} ranks")
    elif world_size == 1:
        with from_environment() as communicators:
            summary = checked(lambda: job_of_a_rank(communicators, *args))
        first = True
    else:
        with RankPool([(world_size, replicas)], timedelta(seconds=timeout)) as pool:
            summary = checked(lambda: pool.run(job_of_a_rank, world_size, *args, replicas=replicas))[0]
        first = True
    if json_file and first:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(summary, indent=2) + "\n")
    if png and first:
        checked(lambda: draw_slipstream(summary, png))
        Console().print(f"picture: {png}")


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="A trace written by verify, train or Recorder.save.")],
    png: Annotated[Path | None, typer.Option(help="Draw the timeline.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    kineto: Annotated[Path | None, typer.Option(help="Export Kineto-style JSON.")] = None,
) -> None:
    """Time per lane, exposed communication, hidden lookup; checks that every dependency was honoured."""
    from .trace_report import trace_report

    raise typer.Exit(checked(lambda: trace_report(file, png=png, json_out=json_file, kineto=kineto)))


@app.command()
def bench(
    only: Annotated[str, typer.Option(help="Suites, or benchmarks, whose name contains this.")] = "",
    compare: Annotated[Path | None, typer.Option(help="Fail where a ratio leaves this one's band.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs; their spread is the band of a baseline.")] = 1,
    record: Annotated[bool, typer.Option("--record", help="Append to ci/baselines/history.jsonl.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Draw the recorded runs to this PNG.")] = None,
    timer: Annotated[
        TimerName, typer.Option(help="cpu: seconds of the process, for a machine that is busy.")
    ] = TimerName.wall,
) -> None:
    """Time the kernels beside their peers; print ratios, losses as plainly as wins."""
    from .bench import bench as run_bench

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


def main() -> None:
    """Entry point of the console script."""
    app()
