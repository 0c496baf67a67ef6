"""What more micro-batches, tables, columns and ranks cost: ratios of processor time of a training step.

    python ci/benchmarks/measure_scaling.py
    python ci/benchmarks/measure_scaling.py --only micro-batches tables

Variants of a row take turns in one process with one thread; the figure is the ratio of their medians. The
losses of all numbers of micro-batches at consistency "batch" are compared in every bit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from tritonrec.data import ClickBatch, ClickLoader, KeyedJaggedTensor, load_clicks
from tritonrec.distributed import Communicators, RankPool
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.harness.environment import environment_of_times
from tritonrec.harness.job import Job
from tritonrec.host_memory import keep_freed_memory
from tritonrec.nn import DLRM, DLRMConfig, HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig

PER_TURN, WARM, TURNS = 4, 2, 5
HSTU = Job(
    "zipf:users=4000,items=20000,median_length=40,seed=1", "hstu", 256, 50, 8,
    sizes=HSTUConfig(dim=128, layers=2, heads=4, qk_dim=32, v_dim=32, max_seq_len=50, dropout=0.0),
)  # fmt: skip
CRITEO = Job(
    "criteo:samples=90000,seed=3",
    "dlrm",
    2048,
    sizes=HSTUConfig(dim=64),
    bottom=(512, 256, 64),
    top=(512, 256),
)


class Sum(torch.nn.Module):
    """Losses from the sums of all rows alone: what is measured is the tables."""

    def forward(self, batch, rows, seed=0):
        return torch.tanh(sum(each.sum(1) for each in rows.values()) / 100)


def by_turns(
    trainers: dict[str, Trainer], batches: dict[str, list]
) -> tuple[dict[str, float], dict[str, list]]:
    """Processor milliseconds of a step by variant, and losses."""
    times: dict[str, list[float]] = {name: [] for name in trainers}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in trainers}
    for turn in range(WARM + TURNS):
        for name in trainers if turn % 2 else reversed(trainers):
            some = batches[name][turn * PER_TURN : (turn + 1) * PER_TURN]
            began = time.process_time()
            losses[name] += [result.losses for result in trainers[name].run(iter(some))]
            if turn >= WARM:
                times[name].append((time.process_time() - began) / PER_TURN * 1e3)
    for each in trainers.values():
        each.close()
    return {name: median(each) for name, each in times.items()}, losses


def micro_batches(job: Job, consistency: str) -> dict[str, float]:
    counts = {f"N = {n}": WindowConfig(n, consistency) for n in (1, 4, 32)}
    loader, here = job.loader(), Communicators.local()
    drawn = [loader.batch(step) for step in range((WARM + TURNS) * PER_TURN)]
    trainers = {name: Trainer(*job.build("sgd"), here, "nestpipe", window) for name, window in counts.items()}
    found, losses = by_turns(trainers, dict.fromkeys(counts, drawn))
    if consistency == "batch":
        first, *others = losses.values()
        if not all(all(map(torch.equal, first, each)) for each in others):
            raise SystemExit("losses differ; no time is printed")
    return found


def clicks(features: int, size: int, ids: int) -> list[ClickBatch]:
    draw, names = torch.Generator().manual_seed(0), [f"f{number}" for number in range(features)]
    return [
        ClickBatch(
            step, torch.arange(size) + step * size,
            KeyedJaggedTensor.from_matrix(
                names, (torch.rand(size, features, generator=draw) ** 3 * ids).long()
            ),
            torch.zeros(size, 0), torch.zeros(size, dtype=torch.int64),
        )
        for step in range((WARM + TURNS) * PER_TURN)
    ]  # fmt: skip


def of_tables(variants: dict[str, tuple[list[int], int, int]]) -> dict[str, float]:
    """By variant the dimensions of its tables, samples and distinct ids."""
    trainers = {}
    for name, (dims, _size, _ids) in variants.items():
        features = [FeatureConfig(f"f{number}", dim) for number, dim in enumerate(dims)]
        tables = HashTableCollection(features, RowOptimizer("sgd", lr=0.01))
        here, window = Communicators.local(), WindowConfig(1)
        trainers[name] = Trainer(Sum(), tables, None, here, "sequential", window, trust_model=True)
    drawn = {name: clicks(len(dims), size, ids) for name, (dims, size, ids) in variants.items()}
    return by_turns(trainers, drawn)[0]


def light(communicators: Communicators) -> float:
    """Processor milliseconds of a step of this rank: eight light tables, 512 samples on all ranks."""
    torch.set_num_threads(1)
    log = load_clicks("criteo:samples=60000,seed=3")
    log = replace(log, features=log.features[:8], categories=log.categories[:, :8].copy())
    loader = ClickLoader(log, 512, 0, communicators.rank, communicators.world_size)
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(log.features, dense=13, dim=16, bottom=(64, 32), top=(64, 32)))
    tables = HashTableCollection(
        [FeatureConfig(name, 16) for name in log.features], RowOptimizer("sgd", lr=0.01)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Trainer(model, tables, optimizer, communicators, "nestpipe", WindowConfig(1)) as trainer:
        for _ in trainer.run(loader.batch(step) for step in range(30)):
            pass
        began = time.process_time()
        for _ in trainer.run(loader.batch(step) for step in range(30, 90)):
            pass
        return (time.process_time() - began) / 60 * 1e3


def ranks() -> dict[str, float]:
    found = {}
    for world_size in (1, 2, 4):
        with RankPool((world_size,)) as pool:
            found[f"{world_size} rank(s)"] = sum(pool.run(light, world_size))
    return found


def rows() -> Iterator[tuple[str, str, Callable[[], dict[str, float]]]]:
    """The word that chooses a row, its title, and what measures it; the first variant is the divisor."""
    for name, job in (("HSTU, 256 samples", HSTU), ("DLRM, 2,048 samples", CRITEO)):
        for consistency in ("window", "batch"):
            title = f"micro-batches, {name}, {consistency}"
            yield "micro-batches", title, lambda job=job, how=consistency: micro_batches(job, how)
    dims = [8 + number for number in range(200)]
    many = {
        "one table of as many ids": ([108], 64 * 200, 10_000),
        "200 tables of one dimension": ([108] * 200, 64, 10_000),
        "200 tables of 200 dimensions": (dims, 64, 10_000),
    }
    yield "tables", "tables", lambda: of_tables(many)
    wide = {f"dimension {dim}": ([dim], 16_384, 200_000) for dim in (256, 1024)}
    yield "columns", "columns, 16,384 ids", lambda: of_tables(wide)
    yield "ranks", "ranks, eight light tables, 512 samples, processor time of all", ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=("micro-batches", "tables", "columns", "ranks"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    found = {}
    for word, title, measure in rows():
        if options.only and word not in options.only:
            continue
        found[title] = times = measure()
        base = next(iter(times.values()))
        print(title)
        for name, value in times.items():
            print(f"  {name:32s} {value:8.1f} ms  {value / base:5.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"environment": environment_of_times(), "ms": found}, indent=1))


if __name__ == "__main__":
    main()
