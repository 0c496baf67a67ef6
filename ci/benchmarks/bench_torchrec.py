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
import logging
import os
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from frame import options_of, record
from rich.console import Console
from rich.table import Table
from torchrec_peer import environment_beside_torchrec, find_torchrec, fused, sharded

from tritonrec import ops
from tritonrec.data import JaggedBatch
from tritonrec.distributed import Communicators, RankDiedError, RankPool
from tritonrec.harness.job import Job, dense_optimizer
from tritonrec.harness.lab.rounds import ranks_in
from tritonrec.harness.lab.settings import Setting, parse_switches
from tritonrec.harness.network import LabError, Network
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig

WARMUP = 4
TOLERANCE = 1e-4
"""Relative, of a step's mean loss: the sums' order differs."""


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


@dataclass
class Run:
    """Seconds of each step after the warm-up, and every step's mean loss."""

    seconds: list[float]
    losses: list[float]


def train(
    communicators: Communicators, job: Job, system: System, items: int, steps: int, optimizer: str
) -> Run:
    """Train on this rank from the beginning; losses are means over all ranks' terms."""
    logging.disable(logging.WARNING)  # what TorchRec says about its own parts
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec")
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
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.streamable import Pipelineable

    Pipelineable.register(Features)
    model, dense = torchrec_model(job, items, optimizer, communicators.world_size)
    world = communicators.world_size
    inputs = iter(
        [Features.of(b, world / int(count), system.dedup) for b, count in zip(batches, terms, strict=True)]
    )
    communicators.control.all_reduce(torch.zeros(1), "start together")
    if system.mode == "pipeline":
        pipeline = TrainPipelineSparseDist(model, dense, torch.device("cpu"), execute_all_batches=True)
        for _ in batches:
            yield float(pipeline.progress(inputs))
        return
    for features in inputs:
        dense.zero_grad()
        loss, total = model(features)
        loss.sum().backward()
        dense.step()
        yield float(total)


@dataclass
class Features:
    """A batch as TorchRec's pipeline moves it: one feature, one long sequence in the order of `lookups`."""

    features: object  # KeyedJaggedTensor
    batch: JaggedBatch
    inverse: torch.Tensor | None  # occurrence -> row, where ids were deduplicated
    scale: float  # DDP takes means over ranks; the loss is a mean over terms

    @classmethod
    def of(cls, batch: JaggedBatch, scale: float, dedup: bool) -> Features:
        from torchrec import KeyedJaggedTensor

        values, inverse = batch.lookups()["item"].ids, None
        if dedup:
            values, inverse, _counts = ops.unique(values)
        features = KeyedJaggedTensor(["item"], values, lengths=torch.tensor([len(values)]))
        return cls(features, batch, inverse, scale)

    def to(self, device: torch.device, non_blocking: bool = False) -> Features:
        return replace(self, features=self.features.to(device, non_blocking))

    def record_stream(self, stream) -> None:
        pass


class Dense(torch.nn.Module):
    """HSTU after the lookup: (loss to differentiate (1,), loss sum)."""

    def __init__(self, job: Job):
        super().__init__()
        self.hstu, _tables, _optimizer = job.build("sgd")

    def forward(self, features: Features, rows) -> tuple[torch.Tensor, torch.Tensor]:
        values = rows["item"].values()
        if features.inverse is not None:
            values = ops.gather_rows(values, features.inverse)
        losses = self.hstu(features.batch, {"item": values}, 0)
        return (losses.sum() * features.scale).reshape(1), losses.detach().double().sum()


def torchrec_model(job: Job, items: int, optimizer: str, world: int):
    """The sharded model holding the same rows as ours, and its dense optimizer."""
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import row_wise

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            config = EmbeddingConfig(
                name="item_table", embedding_dim=job.sizes.dim, num_embeddings=items, feature_names=["item"]
            )
            self.embeddings = EmbeddingCollection([config], device=torch.device("meta"))
            self.dense = Dense(job)

        def forward(self, features: Features):
            return self.dense(features, self.embeddings(features.features))

    sharder = EmbeddingCollectionSharder(fused_params=fused(optimizer, job.lr, job.eps))
    initial = job.tables("sgd").initial_rows("item", torch.arange(items))
    tables = {"item_table": row_wise(compute_kernel="fused")}
    model, dense = sharded(Whole(), sharder, tables, lambda _table: initial, world)
    return model, dense_optimizer(dense, optimizer, job.lr, job.eps)


@contextmanager
def pool_of(ranks: int, rate: float):
    """Ranks over limited links; for a rate of 0 over the loopback interface."""
    if rate:
        with ranks_in(Network(ranks, rate, os.getpid())) as pool:
            yield pool
    else:
        with RankPool((ranks,)) as pool:
            yield pool


def compare(runs: dict[str, Run], baseline: str) -> dict[str, float]:
    """Largest relative difference of a step's loss from the baseline's; SystemExit beyond `TOLERANCE`."""
    expected, worst = runs[baseline].losses, {}
    for name, run in runs.items():
        if len(run.losses) != len(expected):
            raise SystemExit(f"{name} finished {len(run.losses)} steps, {baseline} {len(expected)}")
        differences = [abs(a - b) / abs(b) for a, b in zip(run.losses, expected, strict=True)]
        for step, difference in enumerate(differences):
            if not difference <= TOLERANCE:  # also where it is no number
                raise SystemExit(
                    f"{name}, step {step}: loss {run.losses[step]:.7f}, but {expected[step]:.7f} in "
                    f"{baseline}; no time is printed"
                )
        worst[name] = max(differences)
    return worst


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
    table = Table(title=f"A step beside {peer}, the fastest of TorchRec's", title_justify="left")
    for name in ("system", "ms", "ratio", "spread", "first loss", "last loss", "differs"):
        table.add_column(name, justify="left" if name == "system" else "right", no_wrap=name != "system")
    rows = []
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
        table.add_row(
            name, f"{median(times[name]) * 1e3:.1f}", f"{median(ratios):.2f}x",
            f"{min(ratios):.2f}-{max(ratios):.2f}", f"{last[name][0]:.6f}", f"{last[name][-1]:.6f}",
            f"{losses[name]:.0e}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "ratio: the peer's time over this one's, above 1 is faster; spread: over the rounds; differs: "
        "largest relative difference of a step's loss from the first row's",
        soft_wrap=True,
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
