"""Scaling curves, what each improvement adds, and the sweep over micro-batch sizes of Fig. 9."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from .cluster import predict
from .engine import Workers
from .fit import Model
from .measure import Outcome
from .paper import GROUPS, NESTPIPE, ROWS, WORKERS
from .plan import Plan

SIZES = (*WORKERS, 2048, 4096, 8192, 16384)
SWEEP_WORKERS = 512
SWEEP = (2, 4, 8, 16, 32)
"""Micro-batches of 256 to 16 samples."""
SHARD = 128
"""Workers that share a table in our two-dimensional plan, whatever the cluster's size."""

TAPER = 0.6

OURS = replace(NESTPIPE, taper=TAPER, first_use=True, skip_fetch=True)
METHODS: dict[str, Plan] = {
    **{name: ROWS[name].plan for name in ("TorchRec", "2D-SP", "UniEmb", "NestPipe", "NestPipe+2D-SP")},
    "ours": OURS,
}
STEPS: dict[str, Plan] = {
    "NestPipe": NESTPIPE,
    "+ first use": replace(NESTPIPE, first_use=True),
    "+ taper": replace(NESTPIPE, first_use=True, taper=TAPER),
    "+ skip fetch": OURS,
    f"+ {GROUPS} replicas": replace(OURS, replicas=GROUPS),
}
"""Our improvements, one after another."""
OURS_2D = f"ours+2D, shards of {SHARD}"


@dataclass(frozen=True)
class Point:
    """One method on one cluster size, or one micro-batch size of a sweep."""

    method: str
    workers: int
    micro_batches: int
    queries_per_second: float
    outcome: Outcome


def scaling(
    model: Model, jitter: float = 0.0, seed: int = 0, progress: Callable[[str], None] | None = None
) -> list[Point]:
    """Every method on every size; with `jitter`, every worker is simulated."""
    points = []
    for workers in SIZES:
        shards = replace(OURS, replicas=max(1, workers // SHARD))
        for method, plan in {**METHODS, OURS_2D: shards}.items():
            if progress:
                progress(f"{method}, {workers:,} workers")
            points.append(_point(model, method, workers, plan, _workers(workers, jitter, seed)))
    return points


def improvements(model: Model) -> list[Point]:
    """Our improvements one after another, at the paper's size and beyond."""
    return [
        _point(model, name, workers, plan, None)
        for workers in (WORKERS[-1], 4096, SIZES[-1])
        for name, plan in STEPS.items()
    ]


def sweep(model: Model) -> list[Point]:
    """Fig. 9: micro-batches of 256 to 16 samples, plain, clustered, and with rows sent at their first use."""
    plans = {
        "plain": Plan("nestpipe"),
        "clustered": Plan("nestpipe", clustered=True),
        "first use": Plan("nestpipe", clustered=True, first_use=True),
    }
    return [
        _point(model, name, SWEEP_WORKERS, replace(plan, micro_batches=count), None)
        for name, plan in plans.items()
        for count in SWEEP
    ]


def all_workers(model: Model, workers: int, jitter: float, seed: int = 0) -> tuple[Outcome, float]:
    """NestPipe with every worker simulated by itself, and the seconds that took."""
    began = time.perf_counter()
    outcome = predict(
        model.cluster("npu", workers), model.workload, NESTPIPE, Workers(workers, jitter=jitter, seed=seed)
    )
    return outcome, time.perf_counter() - began


def _workers(count: int, jitter: float, seed: int) -> Workers | None:
    return Workers(count, jitter=jitter, seed=seed) if jitter else None


def _point(model: Model, method: str, workers: int, plan: Plan, each: Workers | None) -> Point:
    outcome = predict(model.cluster("npu", workers), model.workload, plan, each)
    rate = workers * model.workload.samples / outcome.step
    return Point(method, workers, plan.micro_batches, rate, outcome)
