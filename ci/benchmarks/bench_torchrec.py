"""A training step beside TorchRec's: the same model, rows, batches, optimizer, ranks and limited links.

Both sides run in the same processes, one after another, a round each, on torch with one thread. TorchRec
has a row-wise sharded EmbeddingCollection over gloo, its plain loop and `TrainPipelineSparseDist`; the dense
model is `tritonrec.nn.HSTU` on both sides, with our update rule. TorchRec's index dedup does not run on a CPU
(``fbgemm::jagged_unique_indices`` has no kernel there), so it runs as it comes, and once more with each
rank's ids deduplicated before they reach it. Three things are done for TorchRec before the clock starts: that
dedup; the count of the whole batch's terms, which ours exchanges in the step; and its KeyedJaggedTensors.
Ids are dealt anew, as TorchRec gives each rank a block of ids and popular ones would all lie in the first.

    sudo bash ci/benchmarks/torchrec.sh bench             # 4 and 2 ranks over links of 200 Mbit/s
    bash ci/benchmarks/torchrec.sh bench --rate 0         # no limit, no root

Losses of every step are compared before any time is printed.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from frame import options_of, record
from rich.console import Console
from torchrec_peer import (
    Features,
    Run,
    TorchRecModel,
    compare,
    environment_beside_torchrec,
    find_torchrec,
    quiet,
    sharded,
    trained,
)

from tritonrec.data import JaggedBatch
from tritonrec.distributed import Communicators, RankDiedError, RankPool
from tritonrec.harness.job import Job
from tritonrec.harness.lab.rounds import ranks_in
from tritonrec.harness.lab.settings import Setting, parse_switches
from tritonrec.harness.network import LabError, Network
from tritonrec.harness.shown import say, table
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig

WARMUP = 4


@dataclass(frozen=True)
class System:
    """One side: ``torchrec`` in a plain or pipelined loop, or a mode of ours with its window."""

    name: str
    mode: str
    window: WindowConfig | None = None
    dedup: bool = False


def systems(micro_batches: int, switches: dict[str, object]) -> list[System]:
    """TorchRec's first; ours without overlap, with whole batches, and with micro-batches and the switches."""
    found = [
        System("TorchRec, plain", "plain"),
        System("TorchRec, SparseDist", "pipeline"),
        System("TorchRec, plain, dedup", "plain", dedup=True),
        System("TorchRec, SparseDist, dedup", "pipeline", dedup=True),
        System("synchronous, window", "sequential", WindowConfig(1, "window")),
    ]
    for consistency in ("window", "batch"):
        setting = Setting("nestpipe", micro_batches, {**switches, "consistency": consistency})
        found += [
            System(f"nestpipe N=1, {consistency}", "nestpipe", WindowConfig(1, consistency)),
            System(f"nestpipe N={micro_batches}, {consistency}", "nestpipe", setting.window(0)),
        ]
    return found


def dealt(batch: JaggedBatch, items: int, seed: int) -> JaggedBatch:
    """The batch with its ids below `items` renamed by a permutation."""
    order = torch.randperm(items, generator=torch.Generator().manual_seed(seed))
    features = replace(batch.features, values=order[batch.ids])
    return replace(batch, features=features, labels=order[batch.labels], negatives=order[batch.negatives])


def train(
    communicators: Communicators, job: Job, system: System, items: int, steps: int, optimizer: str
) -> Run:
    """Train on this rank from the beginning; losses are means over all ranks' terms."""
    quiet()
    loader = job.loader(communicators.rank, communicators.world_size)
    batches = [dealt(loader.batch(step), items, job.seed) for step in range(steps)]
    terms = torch.tensor([batch.loss_terms for batch in batches])
    terms = communicators.control.all_reduce(terms, "terms")
    ends, sums = [], []
    run = ours if system.window else theirs
    for loss in run(communicators, job, system, batches, terms, items, optimizer):
        ends.append(time.perf_counter())
        sums.append(loss)
    total = communicators.control.all_reduce(torch.tensor(sums, dtype=torch.float64), "losses")
    return Run([b - a for a, b in pairwise(ends[WARMUP - 1 :])], (total / terms).tolist())


def ours(communicators, job, system, batches, terms, items, optimizer):
    """Each step's loss sum on this rank."""
    parts = job.build(optimizer)
    with Trainer(*parts, communicators, system.mode, system.window) as trainer:
        communicators.control.all_reduce(torch.zeros(1), "start together")
        for result in trainer.run(batches):
            yield float(result.losses.double().sum())


def theirs(communicators, job, system, batches, terms, items, optimizer):
    """The same with TorchRec."""
    world, sizes = communicators.world_size, {"item": items}
    hstu = job.build("sgd")[0]
    whole = TorchRecModel(sizes, job.sizes.dim, hstu, lambda model, batch, rows: model(batch, rows, 0))
    model, dense = sharded(whole, job, sizes, optimizer, world)
    inputs = [
        Features(batch, ("item",), world / int(count), system.dedup)
        for batch, count in zip(batches, terms, strict=True)
    ]
    communicators.control.all_reduce(torch.zeros(1), "start together")
    yield from trained(model, dense, inputs, system.mode == "pipeline")


@contextmanager
def pool_of(ranks: int, rate: float):
    """Ranks over limited links; for a rate of 0 over the loopback interface."""
    if rate:
        with ranks_in(Network(ranks, rate, os.getpid())) as pool:
            yield pool
    else:
        with RankPool((ranks,)) as pool:
            yield pool


def job_of(args: argparse.Namespace) -> tuple[Job, int]:
    """What `MODEL` describes, and one more than the largest id."""
    sizes = HSTUConfig(
        dim=args.dim, layers=args.layers, heads=2, qk_dim=args.dim // 2, v_dim=args.dim // 2, max_seq_len=50,
        dropout=0.0,
    )  # fmt: skip
    job = Job(args.data, "hstu", args.batch_size, 50, args.negatives, sizes=sizes, lr=args.lr, slots=1 << 16)
    return job, 1 + int(max(job.loader().catalogue))


def bench(args: argparse.Namespace, ranks: int, console: Console) -> list[dict]:
    """Rounds of every system on `ranks` ranks; prints and returns rows."""
    job, items = job_of(args)
    compared = systems(args.micro_batches, parse_switches(args.switch))
    baseline, times, losses = compared[0].name, {s.name: [] for s in compared}, {}
    with pool_of(ranks, args.rate) as pool:
        for number in range(args.rounds + 1):  # the first round compiles
            runs = {}
            for system in compared:
                console.print(f"[dim]{ranks} ranks, round {number}: {system.name}[/]", highlight=False)
                runs[system.name] = pool.run(train, ranks, job, system, items, args.steps, args.optimizer)[0]
            losses = compare(runs, baseline)
            for name, run in runs.items() if number else ():
                times[name].append(median(run.seconds))
            last = {name: run.losses for name, run in runs.items()}
    peer = min((s.name for s in compared if s.window is None), key=lambda name: median(times[name]))
    console.print(
        f"{ranks} ranks, links of {args.rate:g} Mbit/s (0: no limit), {args.optimizer}; "
        f"N={args.micro_batches} with {' '.join(args.switch) or 'no switch'}",
        highlight=False,
    )
    rows, cells = [], []
    for system in compared:
        name = system.name
        ratios = [theirs / mine for theirs, mine in zip(times[peer], times[name], strict=True)]
        rows.append(
            {
                "system": name,
                "ranks": ranks,
                "milliseconds": [round(seconds * 1e3, 2) for seconds in times[name]],
                "peer": peer,
                "ratios": [round(ratio, 3) for ratio in ratios],
                "losses": last[name],
                "largest_relative_difference": losses[name],
            }
        )
        cells.append((
            name, f"{median(times[name]) * 1e3:.1f}", f"{median(ratios):.2f}x",
            f"{min(ratios):.2f}-{max(ratios):.2f}", f"{last[name][0]:.6f}", f"{last[name][-1]:.6f}",
            f"{losses[name]:.0e}",
        ))  # fmt: skip
    columns = "system", "ms", "ratio", "spread", "first loss", "last loss", "differs"
    console.print(table(f"A step beside {peer}, the fastest of TorchRec's", columns, cells))
    say(
        console,
        "ratio: the peer's time over this one's, above 1 is faster; spread: over the rounds; differs: "
        "largest relative difference of a step's loss from the first row's",
    )
    return rows


MODEL: dict[str, Any] = {
    "data": "zipf:users=8000,items=40000,median_length=40,seed=1", "micro_batches": 4, "lr": 0.05,
    "steps": 14, "rounds": 3, "batch_size": 256, "negatives": 4, "dim": 64, "layers": 1,
    "optimizer": {"choices": ("sgd", "rowwise_adagrad"), "default": "sgd"},
    "switch": {
        "nargs": "*", "default": ["first_use", "skip_fetch", "taper=0.5", "exchanges=auto"],
        "help": "of our micro-batched rows",
    },
}  # fmt: skip
"""The options that `job_of` and `systems` read, and how long all train."""


def main() -> None:
    rate = {"default": 200.0, "help": "Mbit/s of each link; 0: no limit, no root"}
    args = options_of(__doc__, **MODEL, ranks=(4, 2), rate=rate)
    if args.steps < WARMUP + 2:
        raise SystemExit(f"--steps must be at least {WARMUP + 2}, got {args.steps}")
    find_torchrec()
    console, rows = Console(), []
    try:
        for ranks in args.ranks:
            rows += bench(args, ranks, console)
    except RankDiedError as error:
        raise SystemExit(f"error: {error}\n{error.details}") from None
    except LabError as error:
        raise SystemExit(f"error: {error}") from None
    record(args, environment_beside_torchrec(), rows=rows)


if __name__ == "__main__":
    main()
