"""Measured stage costs, and the cost of a task in a plan that was not measured; `cost_files` reads them.

They hold the world size, the links, and one or more runs, best of a mode without overlap, at some N::

    {"world_size": 4, "jitter": 0.05,
     "link": {"bytes_per_second": 12.5e6, "seconds_per_message": 0, "contention": 0,
              "node_size": 1, "node_bytes_per_second": 12.5e6},
     "kept": 0.9, "emulated": [],
     "measured": [{"micro_batches": 1, "stages": {
         "compute": {"tasks": 1, "seconds": 0.08, "bytes": null}, ...}}]}

`seconds` and `bytes` (that left the rank) are of one task, `tasks` how many a step has; `jitter` is the sigma
by which the logarithms of a task's seconds scatter over the ranks.

A stage's seconds per step are a straight line over the N measured, its bytes per step a power of N between
them; with one N measured both are flat. A micro-batch's share of the work is its share of the samples. A
share x of the batch needs what an equal micro-batch at N = 1 / x needs: that gives the bytes of uneven
micro-batches, and of rows sent for their first use only.

`kept` is the share of a batch's rows that the batch before used too. With ``skip_fetch`` so many are not
written back, and not fetched either, which is taken to spare as much time again: fetching also fills a fresh
buffer, so it lasts no less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from tritonrec.pipeline.schedule import NESTPIPE, Task
from tritonrec.settings import typed
from tritonrec.trace.reader import MOST_RANKS

from .engine import Cost
from .plan import Plan

MOST_WORKERS = MOST_RANKS
"""That are simulated: as many as a trace can have."""
STAGES = tuple(stage.name for stage in NESTPIPE.stages)
PER_MICRO_BATCH = tuple(stage.name for stage in NESTPIPE.stages if stage.per_micro_batch)
EXCHANGES = ("exchange", "gradient_exchange")


@typed
@dataclass(frozen=True)
class Link:
    """A worker's link. None: the rate is found from the measured exchanges.

    With S members an all-to-all takes ``(S - 1) * seconds_per_message + bytes / bytes_per_second`` times
    ``(S / world size) ** contention``, the world size being the one measured at.
    """

    bytes_per_second: float | None = None
    seconds_per_message: float = 0.0
    contention: float = 0.0
    node_size: int = 1
    node_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "node_bytes_per_second"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"link: {name} must be positive, got {rate}")
        if not (0 <= self.seconds_per_message < inf and 0 <= self.contention < inf and self.node_size >= 1):
            raise ValueError(
                "link: seconds_per_message and contention must be finite and not negative, and node_size "
                "at least 1"
            )


@typed
@dataclass(frozen=True)
class Measured:
    """One run: seconds and bytes per step and stage, on one rank."""

    micro_batches: int
    seconds: Mapping[str, float]
    sent: Mapping[str, float]


@typed
@dataclass(frozen=True)
class StageCosts:
    """Costs by stage at one world size.

    Args:
        sent_at: N -> stage -> bytes per step, of runs not timed.
        kept: share of a batch's rows that the batch before used too; None: not known.
        emulated: stages that take their time however little they have to do, as in the lab.
    """

    world_size: int
    measured: Sequence[Measured]
    link: Link = Link()
    jitter: float = 0.0
    sent_at: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    kept: float | None = None
    emulated: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MOST_WORKERS or not self.measured:
            raise ValueError(
                f"stage costs need a world size in [1, {MOST_WORKERS}], and at least one measured run, got "
                f"{self.world_size} and {len(self.measured)}"
            )
        if not 0 <= self.jitter < inf:
            raise ValueError(f"jitter must be finite and not negative, got {self.jitter}")
        if self.kept is not None and not 0 <= self.kept <= 1:
            raise ValueError(f"kept is the share of rows that two consecutive batches use, got {self.kept}")
        if unknown := sorted(set(self.emulated) - set(STAGES)):
            raise ValueError(f"emulated: unknown stages {', '.join(unknown)}")
        for run in self.measured:
            if run.micro_batches < 1:
                raise ValueError(f"stage costs are of {run.micro_batches} micro-batches")
            missing = [name for name in STAGES if name not in run.seconds]
            if missing:
                raise ValueError(f"stage costs at N = {run.micro_batches} lack {', '.join(missing)}")
            for name, value in [*run.seconds.items(), *run.sent.items()]:
                if not 0 <= value < float("inf"):
                    raise ValueError(
                        f"{name} at N = {run.micro_batches}: {value} is neither seconds nor bytes"
                    )

    def rate(self) -> float:
        """Bytes per second of a link; where none is given, of the exchanges at the smallest N."""
        if self.link.bytes_per_second is not None:
            return self.link.bytes_per_second
        run = min(self.measured, key=lambda run: run.micro_batches)
        sent, seconds = (sum(values[name] for name in EXCHANGES) for values in (run.sent, run.seconds))
        return sent / seconds if sent and seconds else float("inf")

    def seconds(self, stage: str) -> tuple[float, float]:
        """(seconds that a step's tasks share, seconds that each task adds) of a stage's own work.

        Of an exchange, the time that its bytes do not explain.
        """
        counts = [run.micro_batches for run in self.measured]
        values = [run.seconds[stage] for run in self.measured]
        if stage in EXCHANGES:
            values = [
                max(0.0, value - self._transfer_seconds(run.sent[stage], self.world_size, run.micro_batches))
                for value, run in zip(values, self.measured, strict=True)
            ]
        if stage not in PER_MICRO_BATCH or len(set(counts)) == 1:
            return sum(values) / len(values), 0.0
        slope = max(0.0, float(np.polyfit(counts, values, 1)[0]))
        return max(0.0, float(np.mean(values)) - slope * float(np.mean(counts))), slope

    def sent(self, stage: str, share: float) -> float:
        """Bytes that a stage sends for a share of the batch's samples, at the world size measured."""
        known = {run.micro_batches: run.sent.get(stage, 0.0) for run in self.measured}
        known |= {n: sent[stage] for n, sent in self.sent_at.items() if stage in sent}
        counts = sorted(known)
        values = [known[n] for n in counts]
        if share <= 0 or min(values) <= 0:
            return max(0.0, share) * values[0]
        return share * float(np.exp(np.interp(-np.log(share), np.log(counts), np.log(values))))

    def _transfer_seconds(self, sent: float, members: int, messages: float = 1) -> float:
        grown = (members / self.world_size) ** self.link.contention
        return sent * grown / self.rate() + messages * (members - 1) * self.link.seconds_per_message

    def costs(self, plan: Plan, world_size: int | None = None) -> Callable[[Task], Cost]:
        """What each task of `plan` costs at `world_size` (the one measured at, by default).

        Raises ValueError where more than the measurement is needed: `first_use` needs bytes at N = 1, the
        batch deduplicated; `skip_fetch` needs `kept`; another world size needs more than one rank.
        """
        world = self.world_size if world_size is None else world_size
        if world != self.world_size and self.world_size == 1:
            raise ValueError("costs of one rank say nothing about exchanges: measure at least two ranks")
        if plan.skip_fetch and self.kept is None:
            raise ValueError("skip_fetch: the costs lack kept, the share of a batch's rows that stay")
        if world % plan.replicas:
            raise ValueError(f"{world} workers do not divide into {plan.replicas} replicas")
        members, fractions = world // plan.replicas, plan.fractions
        away = (1 - 1 / members) / (1 - 1 / self.world_size) if self.world_size > 1 else 0.0
        own = {name: self.seconds(name) for name in STAGES}
        if plan.first_use and 1 not in self.counts:
            raise ValueError("first_use sends what the whole batch needs: measure a run with N = 1")
        sent = {
            "exchange": self._payload("exchange", fractions, plan.first_use),
            "gradient_exchange": self._payload("gradient_exchange", fractions[::-1], plan.first_use)[::-1],
        }
        fixed = {name: Cost(own[name][0]) for name in STAGES if name not in PER_MICRO_BATCH}
        if plan.skip_fetch:
            fixed |= {name: Cost(seconds) for name, seconds in self._kept_rows(own).items()}
        reduced = _ring(world) / _ring(self.world_size) if self.world_size > 1 else 1.0
        reduced *= (world / self.world_size) ** self.link.contention
        fixed["dense_reduce"] = Cost(transfer=own["dense_reduce"][0] * reduced)
        reductions = self._replica_reductions(plan, sent["gradient_exchange"]) if plan.replicas > 1 else []

        def cost(task: Task) -> Cost:
            if task.micro_batch is None:
                return fixed[task.stage]
            if task.stage == "replica_reduce":
                return reductions[task.micro_batch]
            share = fractions[task.micro_batch]
            work = own[task.stage][0] * share + own[task.stage][1]
            if task.stage not in EXCHANGES:
                return Cost(work)
            moved = sent[task.stage][task.micro_batch] * away
            return Cost(work, self._transfer_seconds(moved, members) if members > 1 else 0.0, moved)

        return cost

    @property
    def counts(self) -> list[int]:
        """The N at which bytes are known, ascending."""
        return sorted({run.micro_batches for run in self.measured} | set(self.sent_at))

    def _kept_rows(self, own: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Seconds of the stages that have less to do where kept rows stay in the buffers."""
        moved = 0.0 if "write_back" in self.emulated else own["write_back"][0]
        spared = moved * (self.kept or 0.0)
        return {
            name: max(0.0, own[name][0] - spared)
            for name in ("retrieve", "write_back")
            if name not in self.emulated
        }

    def _payload(self, stage: str, fractions: Sequence[float], first_use: bool) -> list[float]:
        """Bytes of each micro-batch; at its first use only, or for gradients, mirrored, after the last."""
        if not first_use:
            return [self.sent(stage, share) for share in fractions]
        seen = [self.sent(stage, min(1.0, share)) for share in np.cumsum(fractions)]
        return [max(0.0, after - before) for before, after in zip([0.0, *seen], seen, strict=False)]

    def _replica_reductions(self, plan: Plan, sent: Sequence[float]) -> list[Cost]:
        """What replicas do after each micro-batch: all after the last, or with `first_use` as rows leave.

        Rows received for a batch bound the owner's distinct rows from above; they are packed, sent and added
        up as in a gradient exchange, whose bytes for each micro-batch are `sent`.
        """
        near = plan.replicas <= self.link.node_size
        rate = (self.link.node_bytes_per_second if near else None) or self.rate()
        moved = _ring(plan.replicas) * self.sent("gradient_exchange", 1.0) / (1 - 1 / self.world_size)
        work, each = self.seconds("gradient_exchange")
        if not plan.first_use:
            return [Cost()] * (plan.micro_batches - 1) + [Cost(work + each, moved / rate, moved)]
        shares = [rows / max(sum(sent), 1e-300) for rows in sent]
        return [Cost(work * share + each, moved * share / rate, moved * share) for share in shares]


def _ring(members: int) -> float:
    return 2 * (members - 1) / members
