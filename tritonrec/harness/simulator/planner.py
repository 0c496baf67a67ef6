"""`tritonrec plan`: the schedule that simulates fastest on measured stage costs.

Searched are N, the taper of the window's ends, the batches in flight, the replicas of 2D sparse parallelism,
`first_use` and `skip_fetch`; all of them are NestPipe's table. Each candidate is simulated on mean costs, and
the best few with the ranks' scatter. Among plans within `TIE` of the fastest, the one with the fewest
replicas, batches in flight, micro-batches and switches wins: each costs memory.
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
    """A plan and what the simulation expects of it; `gain` is sequential training's step over its step."""

    plan: Plan
    outcome: Outcome
    gain: float


@dataclass(frozen=True)
class Saving:
    """A switch of the best plan turned on and off: mean costs, no scatter."""

    switch: str
    chosen: bool
    without: Outcome
    having: Outcome

    @property
    def step(self) -> float:
        """Share of the step that the switch saves."""
        return 1 - self.having.step / self.without.step


@dataclass(frozen=True)
class Advice:
    """The candidates, best first, what they are compared with, and what switches do to the best one."""

    world_size: int
    sequential: Outcome
    candidates: list[Candidate]
    savings: list[Saving]
    notes: list[str]


def search(
    costs: StageCosts, world_size: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Advice:
    """Simulate every candidate at `world_size`, by default the one measured at.

    Grouping, the window's bytes (taper and first use) and what goes on between batches (depth and kept rows)
    hardly interact, so they are refined one after another, for every N.

    Args:
        costs: of the stages.
        world_size: ranks that the plan is for.
        progress: called with the simulations done and their number.
    """
    world = world_size or costs.world_size
    mean_costs = replace(costs, jitter=0.0)
    groupings = [r for r in divisors(world) if r == 1 or world // r >= 2]
    known: dict[Plan, Outcome] = {}
    once = [False, True] if costs.counts[0] == 1 else [False]
    keeping = [False] if costs.kept is None else [False, True]
    total = len(MICRO_BATCHES) * (
        len(groupings) + len(TAPERS) * len(once) - 1 + len(DEPTHS) * len(keeping) - 1
    )

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
        tapers, uses = (TAPERS if count > 2 else TAPERS[:1]), (once if count > 1 else once[:1])
        chosen = best([replace(chosen, taper=taper, first_use=use) for taper in tapers for use in uses])
        depths = [(depth, keeps) for depth in DEPTHS for keeps in keeping if not (keeps and depth == 1)]
        best([replace(chosen, depth=depth, skip_fetch=keeps) for depth, keeps in depths])
    if progress:
        progress(total, total)
    sequential = predict_costs(costs, Plan("sequential"), world)
    expected = {plan: predict_costs(costs, plan, world) for plan in _ranked(known)[: 2 * SHOWN]}
    candidates = [
        Candidate(plan, expected[plan], sequential.step / expected[plan].step)
        for plan in _ranked(expected)[:SHOWN]
    ]
    possible = [name for name, choices in (("first_use", once), ("skip_fetch", keeping)) if choices[1:]]
    savings = [_saving(simulated, candidates[0].plan, switch) for switch in possible]
    return Advice(world, sequential, candidates, savings, notes(costs, world))


def _saving(simulated: Callable[[Plan], Outcome], plan: Plan, switch: str) -> Saving:
    """`plan` with a switch; depth 1 becomes 2 on both sides where the switch needs it."""
    depth = max(plan.depth or 2, 2) if switch == "skip_fetch" else plan.depth
    without, having = (replace(plan, depth=depth, **{switch: on}) for on in (False, True))  # type: ignore[arg-type]
    return Saving(switch, getattr(plan, switch), simulated(without), simulated(having))


def divisors(number: int) -> list[int]:
    """Divisors of `number`, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def notes(costs: StageCosts, world_size: int) -> list[str]:
    """What the expectation rests on, beyond the measurement."""
    found = []
    if len(costs.counts) == 1:
        found.append(
            f"measured at N = {costs.counts[0]} only: bytes per step are taken to be the same at every N, as "
            "if micro-batches shared no keys, so that first_use could save nothing"
        )
    if costs.counts[0] > 1:
        found.append("first_use was not tried: the bytes of a whole batch, N = 1, were not measured")
    if costs.kept is None:
        found.append(
            "skip_fetch was not tried: the costs lack kept, the share of rows that consecutive batches share"
        )
    elif not costs.emulated & {"retrieve", "write_back"}:
        found.append(
            f"{costs.kept:.1%} of a batch's rows stay for the next; fetching a row takes no less time than "
            "writing it back"
        )
    else:
        found.append(
            f"{costs.kept:.1%} of a batch's rows stay for the next, but an emulated lookup takes its time "
            "all the same"
        )
    if len({run.micro_batches for run in costs.measured}) == 1:
        found.append(
            "seconds measured at one N: a micro-batch is taken to cost nothing beyond its samples, which "
            "favours many; lab --modes sequential,nestpipe measures what one costs"
        )
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
        "sequential": outcome(advice.sequential),
        "plans": [
            {**asdict(found.plan), **outcome(found.outcome), "gain": found.gain}
            for found in advice.candidates
        ],
        "switches": [
            {
                "switch": each.switch,
                "chosen": each.chosen,
                "saves": each.step,
                "without": outcome(each.without),
                "with": outcome(each.having),
            }
            for each in advice.savings
        ],
        "notes": advice.notes,
    }


def _ranked(known: Mapping[Plan, Outcome]) -> list[Plan]:
    """Fastest first, but the simplest of those within `TIE` of the fastest before them all.

    Of plans that are equally fast only the simplest is left.
    """
    simplest: dict[float, Plan] = {}
    for plan in sorted(known, key=_resources):
        simplest.setdefault(float(f"{known[plan].step:.6g}"), plan)
    ranked = [simplest[step] for step in sorted(simplest)]
    limit = known[ranked[0]].step * (1 + TIE)
    first = min((plan for plan in ranked if known[plan].step <= limit), key=_resources)
    return [first, *(plan for plan in ranked if plan is not first)]


def _resources(plan: Plan) -> tuple[int, int, int, int, float]:
    """Memory, traffic and switches of a plan; smaller is simpler."""
    switches = plan.first_use + plan.skip_fetch
    return plan.replicas, plan.depth or 0, plan.micro_batches, switches, -plan.taper
