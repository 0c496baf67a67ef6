"""The event core: when every task of a schedule starts and ends on every worker.

A task starts once its lane is free, all it waits for has ended, and its batch has been let in: like the
executor, at most ``batches_in_flight`` batches are unfinished. It then works for its own seconds. A stage
that updates a process group (a place named ``*_group``) is a collective: after its own work each worker waits
for the last one of its group, and all of them leave together, the transfer later. One that updates two groups
waits in the first, then in the second.

    ready    = max(lane free, predecessors, batch admitted)                 (W,)
    arrived  = ready + own seconds * slowness * jitter                      (W,)
    end      = arrived                       or, in a collective,   max over the group of arrived, + transfer

Embedding exchanges and reductions leave by one link, though by different lanes: on it their transfers take
turns in the order in which they are queued. Keys are too small to count there.

All workers run the same table, so one topological order serves them all, and an event is a vector over the
workers instead of an entry of a heap: ten thousand workers cost a few additions of vectors per task. This is
exact, as no order of events decides anything: lanes and links are queues, and a collective ends with its last
participant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tritonrec.pipeline.schedule import Schedule, Task
from tritonrec.trace.analysis import COMMUNICATION_LANES


@dataclass(frozen=True)
class Cost:
    """One task on one worker: `seconds` of own work, then `transfer` seconds on the link, `sent` bytes."""

    seconds: float = 0.0
    transfer: float = 0.0
    sent: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"a task's {name} must be finite and not negative, got {value}")


@dataclass(frozen=True)
class Workers:
    """Who works. Identical workers behave alike, so one of them stands for all.

    Args:
        count: workers simulated.
        slowness: (count,) factors on every task's own seconds; None: 1 for all.
        jitter: sigma of a log-normal factor of mean 1 on every task of every worker.
        seed: of the jitter.
    """

    count: int = 1
    slowness: np.ndarray | None = None
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a simulation needs at least one worker, got {self.count}")
        if self.slowness is not None and (self.slowness.shape != (self.count,) or self.slowness.min() <= 0):
            raise ValueError(f"slowness must be {self.count} positive factors")
        if not 0 <= self.jitter < 2:
            raise ValueError(f"jitter must be in [0, 2), got {self.jitter}")

    @classmethod
    def drawn(
        cls, count: int, jitter: float = 0.0, stragglers: float = 0.0, slowdown: float = 1.5, seed: int = 0
    ) -> Workers:
        """Workers of which a share `stragglers`, drawn with `seed`, takes `slowdown` times as long."""
        if not 0 <= stragglers <= 1 or slowdown <= 0:
            raise ValueError(
                f"stragglers is a share and slowdown a positive factor, got {stragglers}, {slowdown}"
            )
        slow = np.random.Generator(np.random.Philox(seed)).random(count) < stragglers
        return cls(count, np.where(slow, slowdown, 1.0), jitter, seed)


@dataclass(frozen=True)
class Timeline:
    """Start and end of every task on the workers observed.

    `start` and `end` map tasks to (observed,) seconds; `sent` is the bytes one worker sends per batch, and
    `events` counts tasks times workers simulated.
    """

    schedule: Schedule
    micro_batches: int
    batches: int
    observed: np.ndarray
    start: dict[Task, np.ndarray]
    end: dict[Task, np.ndarray]
    sent: dict[int, float] = field(default_factory=dict)
    events: int = 0


def simulate(
    schedule: Schedule,
    cost: Callable[[Task], Cost],
    micro_batches: int,
    batches: int = 12,
    workers: Workers | None = None,
    groups: Mapping[str, int] | None = None,
    observe: int = 128,
) -> Timeline:
    """Run `batches` batches of a schedule on all workers.

    Args:
        schedule: it need not pass the check, since only its times are wanted.
        cost: seconds of a task; its batch number may be looked at.
        micro_batches: N.
        batches: batches run; the pipeline fills during the first ``batches_in_flight``.
        workers: one by default.
        groups: for a collective's place, e.g. ``communication_group``, how many groups the workers fall into.
            Worker w is in group ``w % number`` (the sharding groups of 2D sparse parallelism), or, with a
            negative number, in the group of ``-number`` neighbours ``w // -number`` (its replica groups).
        observe: how many workers' times are kept, evenly spread.

    Raises:
        ValueError: groups that do not divide the workers, or a task that waits for one queued behind it.
    """
    workers, groups = workers or Workers(), groups or {}
    count = workers.count
    random = np.random.Generator(np.random.Philox(key=[workers.seed, 1]))
    slowness = 1.0 if workers.slowness is None else workers.slowness
    observed = np.unique(np.linspace(0, count - 1, min(observe, count)).round().astype(np.int64))
    lanes = {stage.name: stage.lane for stage in schedule.stages}
    member = {name: _members(schedule, name, count, groups) for name in lanes}
    furthest = max((edge.batch for stage in schedule.stages for edge in stage.after), default=0)

    free: dict[str, np.ndarray] = {}
    link = np.zeros(count)
    finished: list[np.ndarray] = []
    end: dict[Task, np.ndarray] = {}
    timeline = Timeline(schedule, micro_batches, batches, observed, {}, {})
    events = 0
    for batch in range(batches):
        admitted = batch - schedule.batches_in_flight
        entry = finished[admitted] if admitted >= 0 else np.zeros(count)
        done, sent = entry, 0.0
        for task in schedule.tasks(batch, micro_batches):
            lane = lanes[task.stage]
            ready = np.maximum(entry, free[lane]) if lane in free else entry
            for other in schedule.waits_for(task, micro_batches):
                if other not in end:
                    raise ValueError(f"{schedule.name}: {task} waits for {other}, which is queued behind it")
                ready = np.maximum(ready, end[other])
            price = cost(task)
            work = price.seconds * slowness
            if workers.jitter and price.seconds:
                noise = random.standard_normal(count)
                work = work * np.exp(workers.jitter * noise - workers.jitter**2 / 2)
            arrived = ready + work
            on_link = bool(price.transfer) and lane in COMMUNICATION_LANES
            if on_link:
                arrived = np.maximum(arrived, link)
            for axis, size in member[task.stage]:
                last = arrived.reshape(size).max(axis=axis, keepdims=True)
                arrived = np.broadcast_to(last, size).reshape(count)
            arrived = arrived + price.transfer
            if on_link:
                link = arrived
            end[task] = free[lane] = arrived
            done = np.maximum(done, arrived)
            timeline.start[task], timeline.end[task] = ready[observed], arrived[observed]
            sent += price.sent
            events += count
        # Batches end in order as far as the next may notice: it queues behind them on every lane.
        finished.append(done)
        timeline.sent[batch] = sent
        for task in [task for task in end if task.batch < batch - furthest]:
            del end[task]
    return Timeline(
        schedule, micro_batches, batches, observed, timeline.start, timeline.end, timeline.sent, events
    )


def _members(
    schedule: Schedule, stage: str, count: int, groups: Mapping[str, int]
) -> list[tuple[int, tuple[int, int]]]:
    """For each group that a stage updates the shape that puts its members on one axis, and that axis."""
    shapes = []
    for access in schedule[stage].touches:
        if access.mode != "update" or not access.group or count == 1:
            continue
        number = groups.get(access.place, 1)
        if number == 0 or count % abs(number):
            raise ValueError(f"{count} workers do not fall into groups of {number} for {access.place}")
        shapes.append((0, (count // number, number)) if number > 0 else (1, (count // -number, -number)))
    return shapes
