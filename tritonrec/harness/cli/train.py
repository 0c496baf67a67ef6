"""The command `train`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...files import save_json
from .options import (
    MOST,
    MOST_SEED,
    ConsistencyName,
    DataOption,
    ModelChoice,
    ModeName,
    TimeoutOption,
    checked,
    demand_writable,
    head_width,
    load_job,
    numbers,
    shares,
)

EVICT_HELP = "lru:ROWS, lfu:ROWS or ttl:STEPS; :EVERY behind it sets the steps between sweeps."
TIERS_HELP = (
    "THRESHOLD:EVERY: rows used in fewer steps are stored in 16 bits; access counts halve every EVERY steps."
)

SLIPSTREAM = "Slipstream, for dlrm (docs/slipstream.md)"


class DedupName(StrEnum):
    """Where repeated keys are dropped."""

    none = "none"
    exchange = "exchange"
    lookup = "lookup"
    both = "both"


class OptimizerChoice(StrEnum):
    """Optimizers."""

    sgd = "sgd"
    rowwise_adagrad = "rowwise_adagrad"
    adam = "adam"


def train(
    data: DataOption = "ml-100k",
    mode: Annotated[ModeName, typer.Option(help="How the steps are scheduled.")] = ModeName.nestpipe,
    model: Annotated[
        ModelChoice,
        typer.Option(help="hstu, fuxi: the next item. grm: clicks and conversions. dlrm: a click."),
    ] = ModelChoice.hstu,
    steps: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Steps in all; default: 20 epochs.")
    ] = None,
    world_size: Annotated[
        int, typer.Option(min=1, max=1024, help="Ranks to start here; under torchrun leave it out.")
    ] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, max=65_536, help="N, micro-batches per window.")] = 4,
    consistency: Annotated[
        ConsistencyName, typer.Option(help="batch: the bits of synchronous training.")
    ] = ConsistencyName.batch,
    clustering: Annotated[bool, typer.Option("--clustering", help="Group samples that share keys.")] = False,
    accumulate: Annotated[int, typer.Option(min=1, max=65_536, help="Batches of one update.")] = 1,
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
        int,
        typer.Option(
            min=0, max=1024, help="Batches in flight, for dbp and nestpipe; 0: the mode's own number."
        ),
    ] = 0,
    replicas: Annotated[
        int,
        typer.Option(
            min=1, max=1024, help="Copies of the tables; they divide the ranks (2D sparse parallelism)."
        ),
    ] = 1,
    average_every: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST,
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
    admission: Annotated[int, typer.Option(min=1, max=MOST, help="Give a key a row at its n-th step.")] = 1,
    admission_window: Annotated[
        int,
        typer.Option(
            min=1, max=MOST, help="Forget keys that wait for a row and were not seen for this many steps."
        ),
    ] = 1000,
    precision_tiers: Annotated[str, typer.Option(help=TIERS_HELP)] = "",
    optimizer: Annotated[OptimizerChoice, typer.Option()] = OptimizerChoice.adam,
    lr: Annotated[float, typer.Option(min=0, max=1e6, help="Learning rate.")] = 3e-3,
    batch_size: Annotated[int, typer.Option(min=1, max=2**24, help="Samples of the global batch.")] = 128,
    max_seq_len: Annotated[
        int, typer.Option(min=1, max=2**20, help="Tokens per sample at most; grm: of history.")
    ] = 50,
    negatives: Annotated[
        int, typer.Option(min=1, max=2**20, help="Sampled items per token; grm has none.")
    ] = 32,
    max_exposed: Annotated[int, typer.Option(min=1, max=2**20, help="grm: items shown per sample.")] = 8,
    bottom: Annotated[str, typer.Option(help="dlrm: hidden widths of the bottom MLP.")] = "64,32",
    top: Annotated[str, typer.Option(help="dlrm: hidden widths of the top MLP.")] = "64,32",
    dim: Annotated[int, typer.Option(min=1, max=65_536, help="Embedding and model dimension.")] = 64,
    layers: Annotated[int, typer.Option(min=1, max=1024, help="HSTU layers.")] = 2,
    heads: Annotated[int, typer.Option(min=1, max=4096, help="Attention heads.")] = 2,
    dropout: Annotated[float, typer.Option(min=0, max=0.99)] = 0.2,
    relative_bias: Annotated[
        bool, typer.Option("--relative-bias", help="hstu, grm: learned biases of position and time.")
    ] = False,
    recompute: Annotated[
        str, typer.Option(help="What a layer's backward computes again: norm,uvqk,silu,attention,gate.")
    ] = "norm",
    seed: Annotated[
        int, typer.Option(min=-MOST_SEED, max=MOST_SEED, help="Of everything that is drawn.")
    ] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="Directory to save to.")] = None,
    save_every: Annotated[
        int, typer.Option(min=0, max=MOST, help="Steps between saves; 0: at the end only.")
    ] = 0,
    full_every: Annotated[
        int, typer.Option(min=1, max=MOST, help="Whole checkpoints among the saves; the others hold changes.")
    ] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    evaluate_every: Annotated[
        int, typer.Option(min=0, max=MOST, help="Steps between evaluations; 0: at the end only.")
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
            min=0,
            max=MOST,
            help="Stale rows of a dropped input at least; 0: all.",
            rich_help_panel=SLIPSTREAM,
        ),
    ] = 0,
    hot_share: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of a table's accesses that makes a row hot.", rich_help_panel=SLIPSTREAM
        ),
    ] = 1e-4,
    warmup: Annotated[
        int,
        typer.Option(min=1, max=MOST, help="Steps before hot rows are followed.", rich_help_panel=SLIPSTREAM),
    ] = 100,
    snapshots: Annotated[
        int, typer.Option(min=2, max=65_536, help="Snapshots of hot rows.", rich_help_panel=SLIPSTREAM)
    ] = 3,
    snapshot_every: Annotated[
        int, typer.Option(min=1, max=MOST, help="Steps between snapshots.", rich_help_panel=SLIPSTREAM)
    ] = 50,
    snapshot_mb: Annotated[
        float,
        typer.Option(
            min=0, max=1e9, help="Megabytes for snapshots, of all ranks.", rich_help_panel=SLIPSTREAM
        ),
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
    from ...distributed import RankPool, from_environment
    from ...nn import HSTUConfig
    from ...pipeline import WindowConfig
    from ...slipstream import SlipstreamConfig
    from ..job import Job
    from ..slipstream.report import draw_slipstream
    from ..slipstream.run import SlipstreamRun, train_slipstream
    from ..train.loop import Run
    from ..train.loop import train as train_rank
    from ..train.stopping import Stop, graceful_stop
    from .policy import policy

    demand_writable({"--json": json_file, "--trace": trace, "--png": png}, {"--checkpoint": checkpoint})

    if not checkpoint and (save_every or full_every > 1):
        raise typer.BadParameter("--save-every and --full-every go with --checkpoint")

    def make_job() -> Job:
        width = max(1, dim // heads) if model is ModelChoice.dlrm else head_width(dim, heads)
        sizes = HSTUConfig(
            dim=dim, layers=layers, heads=heads, qk_dim=width, v_dim=width,
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
                policy=policy(evict, admission, precision_tiers, admission_window),
                balance=balance,
                dynamic=dynamic,
            )
        )

    job = checked(make_job)
    window = checked(
        lambda: WindowConfig(
            1 if mode is ModeName.reference else micro_batches,
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
    if world_size % replicas and "WORLD_SIZE" not in os.environ:
        raise typer.BadParameter(f"{replicas} replicas do not divide {world_size} ranks")
    limit, stop = timedelta(seconds=timeout), Stop()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or world_size == 1:

        def train_this_rank() -> tuple[dict[str, Any], bool, Stop]:
            with from_environment(limit, replicas) as communicators:
                graceful = nullcontext(stop) if slipstream else graceful_stop(communicators.stop.set)
                with graceful as asked:
                    return job_of_a_rank(communicators, *args), communicators.rank == 0, asked

        summary, first, stop = checked(train_this_rank)
    else:
        with (
            RankPool([(world_size, replicas)], limit) as pool,
            nullcontext(stop) if slipstream else graceful_stop(pool.request_stop) as stop,
        ):
            summary = checked(lambda: pool.run(job_of_a_rank, world_size, *args, replicas=replicas))[0]
        first = True
    if json_file and first:
        checked(lambda: save_json(summary, json_file))
    if png and first:
        checked(lambda: draw_slipstream(summary, png))
        Console().print(f"picture: {png}")
    if summary.get("stopped"):
        raise typer.Exit(stop.exit_code or 128 + signal.SIGTERM)  # another rank may have got the signal
