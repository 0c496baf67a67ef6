"""The step of each of the paper's methods as a formula of the same costs, beside the simulated step.

    compute C,  lookup L,  communication M of a whole deduplicated batch,  window N,  R replicas
    i = N times the keys of a micro-batch at the window's ends over those of the batch

    TorchRec        C + L + M
    2D-SP           C + L + M(R) + reduction, with M(R) = M / R ** contention up to messages
    UniEmb          C + M
    NestPipe        C + i M / N
    NestPipe+2D-SP  C + i M(R) / N + reduction

The formulas hold while lookup is shorter than a step and an exchange shorter than the computation beside it.
The simulation adds the parts of a step, and steps where one of the two does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .cluster import Cluster, Workload
from .fit import Model
from .measure import Outcome
from .paper import CELLS, ROWS, Row
from .plan import Plan

FORMULAS = {
    "TorchRec": "compute + lookup + comm",
    "2D-SP": "compute + lookup + comm / {groups}^{exponent:.3f} + reduction",
    "UniEmb": "compute + comm",
    "NestPipe": "compute + {inflation:.3f} comm / {window}",
    "NestPipe+2D-SP": "compute + {inflation:.3f} comm / ({window} * {groups}^{exponent:.3f}) + reduction",
}


@dataclass(frozen=True)
class ClosedForm:
    """One row of the paper at one size: its formula, and seconds of a step by formula and by simulation.

    `paper` is the paper's step in seconds where it prints one.
    """

    row: str
    cluster: str
    workers: int
    formula: str
    step: float
    simulated: float
    paper: float | None


def step_seconds(cluster: Cluster, workload: Workload, plan: Plan) -> float:
    """A step's seconds by the formula of the plan."""
    members = cluster.workers // plan.replicas
    keys, row = workload.keys, workload.row_bytes
    overlaps_batches = plan.pipeline in ("prefetch", "dbp", "nestpipe")
    sent = keys.payload(plan.fractions, plan.clustered)
    exposed = (sent[0], sent[-1]) if plan.pipeline in ("fwp", "nestpipe") else (sum(sent), sum(sent))
    owned = keys.batch(members) / members * row
    return (
        cluster.compute_seconds
        + (0.0 if overlaps_batches else cluster.lookup)
        + sum(cluster.all_to_all(row * keys, members) for keys in exposed)
        + (cluster.all_reduce(owned, plan.replicas) if plan.replicas > 1 else 0.0)
    )


def closed_forms(model: Model, outcome: Callable[[str, int, Row], Outcome]) -> list[ClosedForm]:
    """The rows whose step, throughput or scaling the paper prints, at every size.

    Args:
        outcome: of a row on a cluster of so many workers, simulated.
    """
    return [
        ClosedForm(
            row,
            name,
            workers,
            _formula(model, name, ROWS[row].plan),
            step_seconds(model.cluster(name, workers), model.workload, ROWS[row].plan),
            outcome(name, workers, ROWS[row]).step,
            _paper_step(row, name, workers),
        )
        for row, name, workers in _rows()
    ]


def _rows() -> Iterator[tuple[str, str, int]]:
    return iter(
        dict.fromkeys((cell.row, cell.cluster, cell.workers) for cell in CELLS if cell.row in FORMULAS)
    )


def _formula(model: Model, name: str, plan: Plan) -> str:
    row = next(row for row, known in ROWS.items() if known.plan == plan)
    keys = model.workload.keys
    sent = keys.payload(plan.fractions, plan.clustered)
    return FORMULAS[row].format(
        groups=plan.replicas,
        exponent=model.clusters[name].contention,
        window=plan.micro_batches,
        inflation=plan.micro_batches * (sent[0] + sent[-1]) / 2 / keys.batch(),
    )


def _paper_step(row: str, cluster: str, workers: int) -> float | None:
    for cell in CELLS:
        same = (cell.row, cell.cluster, cell.workers) == (row, cluster, workers)
        if same and cell.column == "step ms":
            return cell.value / 1e3
    return None
