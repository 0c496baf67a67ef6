"""GRM beside TorchRec's tables: AUC over training and the parts of a step (MTGRBoost, Figures 11 and 12).

    bash ci/benchmarks/torchrec.sh                                  # once: TorchRec under out/torchrec
    python ci/benchmarks/grm_beside_torchrec.py --json out/grm_beside.json --png docs/grm_beside.png

Both sides have the same dense model (`tritonrec.nn.GRM`), rows, batches, optimizers and ranks; TorchRec has a
row-wise sharded EmbeddingCollection over gloo in its plain loop. The losses of the first steps are compared
before a time is printed; later ones drift apart by rounding, which the curves show. A part of a step is a
median over steps: ``lookup`` until all rows are here, ``forward``, and ``rest``: backward, exchange of
gradients and updates. Stages of nestpipe overlap, so of it there is the whole step alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from frame import options_of, record
from torchrec_peer import (
    Features,
    TorchRecModel,
    compare,
    environment_beside_torchrec,
    find_torchrec,
    quiet,
    sharded,
    trained,
)
from torchrec_peer import Run as Whole

from tritonrec.data import ImpressionBatch, evaluate_impressions
from tritonrec.distributed import Communicators, RankPool
from tritonrec.embedding.bags import pool
from tritonrec.harness.job import Job
from tritonrec.harness.train.evaluate import evaluate_model
from tritonrec.nn import HSTUConfig
from tritonrec.optional import pyplot
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.trace import NullRecorder

WARMUP, COMPARED = 3, 6

SYSTEMS = ("TorchRec", "sequential, window", "sequential, batch", "nestpipe, window", "nestpipe, batch")
LOOKUP = ("prefetch", "h2d", "route", "retrieve", "copy_kept_rows", "exchange")
Rows = dict[str, torch.Tensor]


class Parts(NullRecorder):
    """Seconds of each stage of a step, and of the model's forward in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, lane: str, name: str, **_args: Any) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        began = time.perf_counter()
        yield {}
        self.add_seconds(name, time.perf_counter() - began)

    def add_seconds(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def timed(self, model: torch.nn.Module) -> None:
        """Let `forward` of the model count."""
        forward = model.forward

        def called(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = forward(*args, **kwargs)
            self.add_seconds("forward", time.perf_counter() - began)
            return found

        model.forward = called

    def taken(self) -> dict[str, float]:
        """Lookup and forward of a step; begins anew."""
        found, self.seconds = self.seconds, {}
        return {"lookup": sum(found.get(name, 0.0) for name in LOOKUP), "forward": found.get("forward", 0.0)}


@dataclass
class Run:
    """Of one rank: parts of each step after the first ones, loss sums, and AUC and GAUC by step."""

    parts: list[dict[str, float]]
    losses: list[float]
    metrics: list[tuple[int, dict[str, float]]]


def run_rank(communicators: Communicators, job: Job, system: str, steps: int, every: int) -> Run:
    """Train from the beginning; metrics every so many steps, on one rank, or never for 0."""
    quiet()
    torch.set_num_threads(1)
    loader = job.loader(communicators.rank, communicators.world_size)
    batches = [loader.batch(step) for step in range(steps)]
    made = theirs if system == "TorchRec" else ours
    steps_of, evaluated = made(communicators, job, system, batches)
    found = Run([], [], [])
    communicators.control.all_reduce(torch.zeros(1), "start together")
    began = time.perf_counter()
    for number, (loss, parts) in enumerate(steps_of, 1):
        taken = time.perf_counter() - began
        if number > WARMUP:
            found.parts.append({**parts, "rest": taken - sum(parts.values())} if parts else {})
            found.parts[-1]["whole"] = taken
        found.losses.append(loss)
        if every and number % every == 0:
            found.metrics.append((number, evaluated()))
        began = time.perf_counter()
    return found


Trained = tuple[Iterable[tuple[float, dict[str, float]]], Callable[[], dict[str, float]]]
"""Loss sum and parts of each step, and an evaluation."""


def ours(communicators: Communicators, job: Job, system: str, batches: list[ImpressionBatch]) -> Trained:
    """Steps of ours, and an evaluation."""
    mode, consistency = system.split(", ")
    model, tables, dense = job.build("rowwise_adagrad")
    parts, alone = Parts(), mode == "sequential"
    if alone:
        parts.timed(model)
    window = WindowConfig(1 if alone else 4, consistency, seed=job.seed)  # type: ignore[arg-type]
    trainer = Trainer(model, tables, dense, communicators, mode, window, recorder=parts, trust_model=True)

    def steps() -> Iterator[tuple[float, dict[str, float]]]:
        for result in trainer.run(batches):
            yield float(result.losses.double().sum()), parts.taken() if alone else {}

    return steps(), lambda: evaluate_model(model, trainer.rows_of_ranks(), job.epochs())


def theirs(communicators: Communicators, job: Job, _system: str, batches: list[ImpressionBatch]) -> Trained:
    """The same with TorchRec's tables."""
    model, parts, sizes = job.build("rowwise_adagrad")[0], Parts(), sizes_of(job)
    features = {each.name: each for each in job.features()}

    def losses(model: torch.nn.Module, batch: ImpressionBatch, rows: Rows) -> torch.Tensor:
        return model(batch, pooled(rows, batch.lookups(), features), 0)

    world = communicators.world_size
    tables = TorchRecModel(sizes, job.sizes.dim, model, losses, took=parts.add_seconds)
    whole, dense = sharded(tables, job, sizes, "rowwise_adagrad", world)

    def inputs() -> Iterator[Features]:
        for batch in batches:
            total = communicators.control.all_reduce(torch.tensor([batch.loss_terms]), "terms")
            yield Features(batch, tuple(features), world / int(total))

    def evaluated() -> dict[str, float]:
        state = {name: each for name, each in whole.state_dict().items() if name.startswith("embeddings")}
        tables_now = {name.split(".")[-2].removeprefix("t_"): each.local_shards()[0].tensor
                      for name, each in state.items()}  # fmt: skip

        def predicted(batch: ImpressionBatch) -> torch.Tensor:
            lookups = batch.lookups()
            values = {name: tables_now[name][lookups[name].ids] for name in features}
            return model.predict(batch, pooled(values, lookups, features))

        return evaluate_impressions(predicted, job.epochs())

    return ((loss, parts.taken()) for loss in trained(whole, dense, inputs())), evaluated


def pooled(values: Rows, lookups: Any, features: Any) -> Rows:
    """Rows by feature as the model takes them: bags of pooled features are means."""
    return {
        name: each if features[name].pooling == "none" else pool(each, lookups[name].offsets, "mean")
        for name, each in values.items()
    }


def sizes_of(job: Job) -> dict[str, int]:
    """One more than the largest id of each feature, in training and evaluation."""
    loader, found = job.epochs(), dict[str, int]()
    batches = [*(loader.batch(step) for step in range(loader.steps_per_epoch)), *loader.evaluation_batches()]
    for batch in batches:
        for name, lookup in batch.lookups().items():
            found[name] = max(found.get(name, 1), 1 + int(lookup.ids.max()) if len(lookup.ids) else 1)
    return found


def compared(runs: dict[str, list[Run]]) -> float:
    """The largest relative difference of a step's loss sum from TorchRec's, of the first `COMPARED` steps."""
    sums = {
        name: [sum(each) for each in zip(*(run.losses[:COMPARED] for run in ranks), strict=True)]
        for name, ranks in runs.items()
    }
    return max(compare({name: Whole([], losses) for name, losses in sums.items()}, "TorchRec").values())


def split(pool_of: RankPool, ranks: int, job: Job, steps: int, rounds: int) -> list[dict[str, Any]]:
    """The parts of each system's step, as medians over ranks, steps and rounds; systems take turns."""
    medians: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    for number in range(rounds + 1):  # the first one compiles
        runs = {name: pool_of.run(run_rank, ranks, job, name, steps, 0) for name in SYSTEMS}
        worst = compared(runs)
        for name, found in runs.items() if number else ():
            every = [part for run in found for part in run.parts]
            medians[name].append({part: median(each[part] for each in every) for part in every[0]})
    rows = []
    for name in SYSTEMS:
        parts = {part: median(each[part] for each in medians[name]) for part in medians[name][0]}
        pairs = zip(medians["TorchRec"], medians[name], strict=True)
        ratio = median(peer["whole"] / own["whole"] for peer, own in pairs)
        rows.append({"ranks": ranks, "system": name, "ratio": ratio, **parts})
        shown = "  ".join(f"{part} {seconds * 1e3:6.1f}" for part, seconds in parts.items())
        print(f"{ranks} ranks  {name:20s} {ratio:.2f}x  {shown} ms", flush=True)
    print(f"losses of the first {COMPARED} steps differ by at most {worst:.0e}", flush=True)
    return rows


def main() -> None:
    args = options_of(
        __doc__, data="ml-100k", ranks=(1, 2), steps=24, rounds=3, batch_size=64, lr=0.02, every=50,
        curve={"default": 300, "type": int, "help": "steps of the curves"},
        png={"default": None, "help": "their picture"},
    )  # fmt: skip
    find_torchrec()
    sizes = HSTUConfig(dim=64, layers=2, heads=2, qk_dim=32, v_dim=32, max_seq_len=50, dropout=0.0)
    # an EmbeddingCollection takes tables of one dimension
    job = Job(args.data, "grm", args.batch_size, 50, sizes=sizes, context_dim=64, lr=args.lr, slots=1 << 14)

    rows, curves = [], {}
    # TorchRec's ranks are those of the process group: a pool for each number.
    for ranks in args.ranks:
        with RankPool((ranks,)) as pool_of:
            rows += split(pool_of, ranks, job, args.steps, args.rounds)
    with RankPool((1,)) as pool_of:
        for name in ("TorchRec", "sequential, batch") if args.curve else ():
            curves[name] = pool_of.run(run_rank, 1, job, name, args.curve, args.every)[0].metrics
            for step, metrics in curves[name]:
                print(name, step, *(f"{metric} {value:.4f}" for metric, value in metrics.items()), flush=True)
    if args.png and curves:
        draw(curves, args.png)
    record(args, environment_beside_torchrec(), rows=rows, curves=curves)


def draw(curves: dict[str, list[tuple[int, dict[str, float]]]], path: str) -> None:
    """AUC and GAUC of each task over steps, TorchRec's dashed."""
    figure, axes = pyplot().subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, kind in zip(axes, ("AUC", "GAUC"), strict=True):
        for name, points in curves.items():
            for color, task in zip(("C0", "C1"), ("click", "conversion"), strict=True):
                values = [metrics[f"{kind}/{task}"] for _, metrics in points]
                steps, dashed = [step for step, _ in points], name == "TorchRec"
                axis.plot(steps, values, color + ("--" if dashed else "-"), lw=2.5 if dashed else 1,
                          label=f"{task}, {name}")  # fmt: skip
        axis.set(xlabel="step", ylabel=kind)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
