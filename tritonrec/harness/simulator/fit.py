"""Fitting the cluster's constants on TorchRec's rows of NestPipe's Tables II and III.

Four constants describe the industrial cluster: seconds of compute, of lookup at one worker, the links'
bandwidth, and one exponent by which lookup and links slow down with the number of workers. They are found by
weighted least squares (Levenberg-Marquardt on their logarithms) over TorchRec's twelve figures; a figure's
weight is how far it was rounded, and one per cent. The GPU cluster appears at one size only: its exponent is
taken from the first, and the other three constants follow from its three figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .cluster import Cluster, Workload, predict
from .measure import Outcome
from .paper import CELLS, ROWS, WORKERS, PaperCell, Row

Predict = Callable[[str, int, Row], Outcome]
_NOISE = 0.01


@dataclass(frozen=True)
class Model:
    """The fitted clusters, by name, and the workload they train; `predict` changes it to a row's own.

    A row's computation is the fitted one times its `Workload.products` over those of `workload`.
    """

    clusters: dict[str, Cluster]
    workload: Workload

    def cluster(self, name: str, workers: int) -> Cluster:
        """The cluster at another size."""
        return replace(self.clusters[name], workers=workers)

    def predict(self, name: str, workers: int, row: Row) -> Outcome:
        """One step of a row's plan on so many identical workers."""
        cluster, workload = self.cluster(name, workers), replace(self.workload, **row.changes)
        longer = workload.products / self.workload.products
        cluster = replace(cluster, compute_seconds=cluster.compute_seconds * longer)
        return predict(cluster, workload, row.plan)


def model_value(cell: PaperCell, samples: int, run: Predict) -> float:
    """What the model says where the paper has `cell`; `run` gives outcomes and may remember them."""
    here = run(cell.cluster, cell.workers, ROWS[cell.row])

    def rate(outcome: Outcome, workers: int) -> float:
        return workers * samples / outcome.step

    def first() -> float:
        return rate(run(cell.cluster, WORKERS[0], ROWS[cell.row]), WORKERS[0]) / WORKERS[0]

    return {
        "step ms": lambda: here.step * 1e3,
        "speedup": lambda: run(cell.cluster, cell.workers, ROWS["TorchRec"]).step / here.step,
        "compute ms": lambda: here.compute * 1e3,
        "lookup ms": lambda: here.exposed_lookup * 1e3,
        "lookup hidden %": lambda: (
            (1 - here.exposed_lookup / run(cell.cluster, cell.workers, ROWS["TorchRec"]).exposed_lookup) * 100
        ),
        "communication ms": lambda: here.communication * 1e3,
        "exposed ms": lambda: here.exposed * 1e3,
        "exposed %": lambda: here.exposed_ratio * 100,
        "QPS 1e5": lambda: rate(here, cell.workers) / 1e5,
        "scaling %": lambda: rate(here, cell.workers) / cell.workers / first() * 100,
        "lookup share %": lambda: here.exposed_lookup / here.step * 100,
        "communication share %": lambda: here.exposed / here.step * 100,
        "utilization %": lambda: here.compute / here.step * 100,
    }[cell.column]()


def fit(cells: Iterable[PaperCell] = CELLS, workload: Workload | None = None) -> Model:
    """Fit both clusters; cells that are not marked as fitted are not looked at."""
    workload, known = workload or Workload(), [cell for cell in cells if cell.fitted]
    sent = 2 * workload.keys.batch() * workload.row_bytes
    # The links' start lets the exchanges of the largest size take a second or so, whatever they carry.
    start = Cluster(1, 1.0, lookup_seconds=0.05, bandwidth=sent * WORKERS[-1] ** 0.5, contention=0.5)
    npu = _fit_cluster(
        [cell for cell in known if cell.cluster == "npu"],
        workload,
        start,
        ("compute_seconds", "lookup_seconds", "bandwidth", "contention"),
    )
    gpu = _fit_cluster(
        [cell for cell in known if cell.cluster == "gpu"],
        workload,
        npu,
        ("compute_seconds", "lookup_seconds", "bandwidth"),
    )
    return Model({"npu": npu, "gpu": gpu}, workload)


def _fit_cluster(
    cells: Sequence[PaperCell], workload: Workload, start: Cluster, names: tuple[str, ...]
) -> Cluster:
    paper = np.array([cell.value for cell in cells])
    weight = 1 / (_NOISE + np.array([cell.rounding for cell in cells]))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        cluster = replace(start, **dict(zip(names, np.exp(logarithms).tolist(), strict=True)))
        known: dict[int, Outcome] = {}

        def run(_name: str, workers: int, row: Row) -> Outcome:
            if workers not in known:
                known[workers] = predict(replace(cluster, workers=workers), workload, row.plan, batches=3)
            return known[workers]

        model = np.array([model_value(cell, workload.samples, run) for cell in cells])
        return weight * (model / paper - 1)

    found = least_squares(residuals, np.log([getattr(start, name) for name in names]))
    return replace(start, **dict(zip(names, np.exp(found).tolist(), strict=True)))


def least_squares(
    residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray, rounds: int = 60
) -> np.ndarray:
    """Levenberg-Marquardt with numerical derivatives: the parameters of the smallest sum of squares near."""
    here, damping = np.array(start, np.float64), 1e-2
    left = residuals(here)
    for _ in range(rounds):
        steps = 1e-5 * np.eye(len(here))
        slope = np.stack([(residuals(here + step) - left) / 1e-5 for step in steps], axis=1)
        normal = slope.T @ slope
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope.T @ left)
        there = residuals(here + move)
        if there @ there < left @ left:
            done = left @ left - there @ there < 1e-12 * (left @ left) + 1e-15
            here, left, damping = here + move, there, damping / 5
            if done:
                break
        else:
            damping *= 5
            if damping > 1e9:
                break
    return here
