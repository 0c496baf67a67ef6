"""The model beside what was measured: steps of the lab and of recorded traces, predicted from other runs.

Of a lab's report the sequential rows give the stages' seconds, every other row only its bytes. Of several
traces the first gives the seconds. The rest is the schedule table at work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

from tritonrec.trace import Trace, read
from tritonrec.trace.analysis import summarise

from .cost_files import WARMUP, from_lab, from_trace, load_json
from .engine import Workers, simulate
from .measure import Outcome, measure
from .plan import Pipeline, Plan
from .stage_costs import StageCosts

PIPELINES: dict[str, Pipeline] = {
    "sequential": "sequential",
    "dbp": "dbp",
    "fwp": "fwp",
    "nestpipe": "nestpipe",
}
KNOWN_SWITCHES = frozenset({"first_use", "taper", "clustering", "skip_fetch", "replicas", "depth"})


@dataclass(frozen=True)
class MeasuredRow:
    """One run, measured and predicted, in seconds per step. `fitted`: its own stage costs were used."""

    name: str
    micro_batches: int
    step: float
    exposed: float
    predicted_step: float
    predicted_exposed: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the step."""
        return self.predicted_step / self.step - 1


def predict_costs(costs: StageCosts, plan: Plan, world_size: int | None = None) -> Outcome:
    """Simulate `plan` at `world_size`; ranks whose tasks' times scatter are simulated one by one."""
    batches, workers, groups = 16, Workers(), {}
    if costs.jitter:
        batches = 96  # enough for the mean of what scatters
        workers, groups = Workers(world_size or costs.world_size, jitter=costs.jitter), plan.groups()
    cost = costs.costs(plan, world_size)
    return measure(simulate(plan.schedule(), cost, plan.micro_batches, batches, workers, groups))


def replay_lab(path: str | os.PathLike[str]) -> tuple[list[MeasuredRow], list[str]]:
    """Every row of a lab's report that the model knows, and the names of those that it does not.

    Raises ValueError where the file is no report of the lab, or has no sequential row.
    """
    document = load_json(path)
    try:
        costs = from_lab(document)
        found, unknown = [], []
        for row in document["rows"]:
            count, switches = row["micro_batches"], row["switches"]
            name = " ".join([row["mode"], *(f"{key}={value}" for key, value in switches.items())])
            if set(switches) - KNOWN_SWITCHES or row["mode"] not in PIPELINES:
                unknown.append(f"{name}, N = {count}")
                continue
            own = _with_bytes(costs, row) if switches.get("clustering") else costs
            plan = Plan(
                PIPELINES[row["mode"]],
                count,
                taper=float(row.get("taper", switches.get("taper", 1.0))),
                first_use=bool(switches.get("first_use", False)),
                # Reports that lack the share of kept rows: as if all of them were fetched.
                skip_fetch=bool(switches.get("skip_fetch", False)) and own.kept is not None,
                replicas=int(switches.get("replicas", 1)),
                depth=int(switches.get("depth", 0)) or None,
            )
            outcome = predict_costs(own, plan)
            measured = name, count, row["step"], row["exposed"]
            timed = row["mode"] == "sequential"
            found.append(MeasuredRow(*measured, outcome.step, outcome.exposed, timed))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no report of the lab: {type(error).__name__} {error}") from error
    return found, unknown


def _with_bytes(costs: StageCosts, row: Mapping[str, Any]) -> StageCosts:
    """The costs with the bytes of a row whose micro-batches were made differently."""
    sent = {name: cost["tasks"] * (cost["bytes"] or 0.0) for name, cost in row["stages"].items()}
    return replace(costs, sent_at={**costs.sent_at, row["micro_batches"]: sent})


def replay_traces(paths: Sequence[str | os.PathLike[str]]) -> list[MeasuredRow]:
    """Traces measured, and predicted from the stage costs of the first."""
    costs = from_trace(paths[0])
    found = []
    for path in paths:
        trace = read(path)
        mode, count = str(trace.metadata.get("mode")), trace.metadata.get("micro_batches") or 1
        if mode not in PIPELINES:
            raise ValueError(f"{path}: mode {mode!r} is none of {', '.join(PIPELINES)}")
        taper = float(trace.metadata.get("taper", 1.0))
        outcome = predict_costs(costs, Plan(PIPELINES[mode], count, taper=taper))
        step, exposed = _observed(trace)
        found.append(
            MeasuredRow(mode, count, step, exposed, outcome.step, outcome.exposed, fitted=path == paths[0])
        )
    return found


def _observed(trace: Trace) -> tuple[float, float]:
    """Seconds per step and of exposed communication: medians and means as `tritonrec lab` takes them."""
    ranks = summarise(trace.spans, WARMUP)
    exposed = mean(rank.exposed_ns / rank.steps for rank in ranks)
    return median(rank.step_ns for rank in ranks) / 1e9, exposed / 1e9


def as_json(rows: Sequence[MeasuredRow]) -> list[dict[str, Any]]:
    """The rows with their errors."""
    return [{**asdict(row), "error": row.error} for row in rows]
