"""`tritonrec plan`: the schedule that simulates fastest on measured stage costs.

Searched are N, the taper of the window's ends, the batches in flight, and the replicas of 2D sparse
parallelism; all of them are NestPipe's table. Each candidate is simulated on mean costs, and the best few
with the ranks' scatter. Among plans within `TIE` of the fastest, the one with the fewest replicas, batches in
flight and micro-batches wins: each costs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .measure import Outcome
from .measured import predict_costs
from .plan import Plan
from .stage_costs import StageCosts

MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
TAPERS = (1.0, 0.8, 0.65, 0.5)
DEPTHS = (1, 2, 3, 4, 5)
TIE = 0.002
SHOWN = 5


@dataclass(frozen=True)
class Candidate:
    """A plan and what the simulation expects of it; `gain` is synchronous training's step over its step."""

    plan: Plan
    outcome: Outcome
    gain: float


@dataclass(frozen=True)
class Advice:
    """The candidates, best first, and what they are compared with."""

    world_size: int
    synchronous: Outcome
    candidates: list[Candidate]
    notes: list[str]


def search(
    costs: StageCosts, world_size: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Advice:
    """Simulate every candidate at `world_size`, by default the one measured at.

    Depth, taper and grouping hardly interact, so they are refined one after another, for every N.

    Args:
        costs: of the stages.
        world_size: ranks that the plan is for.
        progress: called with the simulations done and their number.
    """
    world = world_size or costs.world_size
    mean_costs = replace(costs, jitter=0.0)
    groupings = [r for r in divisors(world) if r == 1 or world // r >= 2]
    known: dict[Plan, Outcome] = {}
    total = len(MICRO_BATCHES) * (len(groupings) + len(TAPERS) - 1 + len(DEPTHS) - 1)

    def simulated(plan: Plan) -> Outcome:
        if plan not in known:
            known[plan] = predict_costs(mean_costs, plan, world)
        if progress:
            progress(min(len(known), total), total)
        return known[plan]

    def best(plans: Sequence[Plan]) -> Plan:
        return _ranked({plan: simulated(plan) for plan in plans})[0]

    for count in MICRO_BATCHES:
        start = Plan("nestpipe", count, depth=4)
        chosen = best([replace(start, replicas=replicas) for replicas in groupings])
        chosen = best([replace(chosen, taper=taper) for taper in (TAPERS if count > 2 else TAPERS[:1])])
        best([replace(chosen, depth=depth) for depth in DEPTHS])
    if progress:
        progress(total, total)
    synchronous = predict_costs(costs, Plan("synchronous"), world)
    expected = {plan: predict_costs(costs, plan, world) for plan in _ranked(known)[: 2 * SHOWN]}
    candidates = [
        Candidate(plan, expected[plan], synchronous.step / expected[plan].step)
        for plan in _ranked(expected)[:SHOWN]
    ]
    return Advice(world, synchronous, candidates, notes(costs, world))


def divisors(number: int) -> list[int]:
    """Divisors of `number`, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def notes(costs: StageCosts, world_size: int) -> list[str]:
    """What the expectation rests on, beyond the measurement."""
    found = []
    counts = sorted({run.micro_batches for run in costs.measured} | set(costs.sent_at))
    if len(counts) == 1:
        found.append(
            f"measured at N = {counts[0]} only: bytes per step are taken to be the same at every N, as if "
            "micro-batches shared no keys, or rows travelled for their first use"
        )
    if len({run.micro_batches for run in costs.measured}) == 1:
        found.append("seconds measured at one N: a micro-batch is taken to cost nothing beyond its samples")
    if costs.link.bytes_per_second is None:
        found.append(f"no link rate given: {costs.rate() / 1e6:.1f} MB/s follow from the measured exchanges")
    if world_size != costs.world_size:
        found.append(
            f"measured on {costs.world_size} ranks: samples per rank are kept, links slow down as "
            f"world size ** {costs.link.contention:g}"
        )
    return found


def as_json(advice: Advice) -> dict[str, Any]:
    """The document that ``tritonrec plan --json`` writes; seconds and bytes of one step on one rank."""

    def outcome(of: Outcome) -> dict[str, float]:
        return {**asdict(of), "exposed_ratio": of.exposed_ratio}

    return {
        "world_size": advice.world_size,
        "synchronous": outcome(advice.synchronous),
        "plans": [
            {**asdict(found.plan), **outcome(found.outcome), "gain": found.gain}
            for found in advice.candidates
        ],
        "notes": advice.notes,
    }


def _ranked(known: Mapping[Plan, Outcome]) -> list[Plan]:
    """Fastest first, but the simplest of those within `TIE` of the fastest before them all.

    Of plans that are equally fast only the simplest is left.
    """
    simplest: dict[float, Plan] = {}
    for plan in sorted(known, key=_room):
        simplest.setdefault(float(f"{known[plan].step:.6g}"), plan)
    ranked = [simplest[step] for step in sorted(simplest)]
    limit = known[ranked[0]].step * (1 + TIE)
    first = min((plan for plan in ranked if known[plan].step <= limit), key=_room)
    return [first, *(plan for plan in ranked if plan is not first)]


def _room(plan: Plan) -> tuple[int, int, int, float]:
    """What a plan takes; smaller is simpler."""
    return plan.replicas, plan.depth or 0, plan.micro_batches, -plan.taper
