"""Proof that a schedule computes what its stages would compute one after another.

The proof has two halves. First, no race: any two tasks that touch the same thing, one of them writing, must
be ordered by edges and lanes. A schedule without races gives one result whatever the timing. Second, that
result is the right one: the tasks are run symbolically, once in the schedule's order and once batch by
batch, every value read must agree and have been written by somebody, and the last update of a row must reach
the tables. What a stage accesses is taken from the table, which is derived from the stages' signatures; a
stage is passed nothing else (`tritonrec.pipeline.program`).

Embedding rows differ only in which batches use them, so the symbolic run takes one row for each subset of
`BATCHES` consecutive batches. That covers rows kept from one batch to the next, rows that return after a
pause (the table's copy must have been written back), and rows whose buffer is reused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import product

from .schedule import Access, Schedule, Task

BATCHES = 5
"""Batches followed: two buffers and a write-back two batches back need four, one more closes the cycle."""

_STALE = "stale"
_UNFETCHED = "unfetched"


class ScheduleError(ValueError):
    """A schedule may compute something else than its stages one after another."""


def check(schedule: Schedule, micro_batches: int, batches: int = BATCHES) -> None:
    """Raise `ScheduleError` naming the tasks and the row unless `schedule` is race-free and equivalent.

    Takes a few milliseconds at ``micro_batches=8``; the executor calls it before its first batch.
    """
    _well_formed(schedule)
    # Two and three micro-batches already show every relation between first, middle and last one.
    micro_batches = min(micro_batches, 3)
    tasks = [task for batch in range(batches) for task in schedule.tasks(batch, micro_batches)]
    before = _happens_before(schedule, tasks, micro_batches)
    for used_by in product((False, True), repeat=batches):
        _no_race(schedule, tasks, before, used_by, micro_batches)
        _same_values(schedule, tasks, used_by, micro_batches)


def _well_formed(schedule: Schedule) -> None:
    """Edges lead to stages, and batches can start: what the batches followed below might not show."""
    if schedule.batches_in_flight < 1:
        raise ScheduleError(
            f"{schedule.name}: with {schedule.batches_in_flight} batches in flight none starts"
        )
    stages = {stage.name: stage for stage in schedule.stages}
    for stage in schedule.stages:
        for edge in stage.after:
            if edge.stage not in stages:
                raise ScheduleError(f"{schedule.name}: {stage.name} waits for {edge.stage}, which never runs")
            many = stages[edge.stage].per_micro_batch
            if (edge.micro_batch != "none") != many or (
                edge.micro_batch in ("same", "previous") and not stage.per_micro_batch
            ):
                often = "once per micro-batch" if many else "once per batch"
                raise ScheduleError(
                    f"{schedule.name}: {stage.name} waits for {edge.micro_batch!r} of {edge.stage}, "
                    f"which runs {often}"
                )


def _happens_before(schedule: Schedule, tasks: list[Task], micro_batches: int) -> dict[Task, int]:
    """For each task the bit set of the tasks that finish before it starts."""
    number = {task: n for n, task in enumerate(tasks)}
    before: dict[Task, int] = {}
    lane_tail: dict[str, Task] = {}
    for n, task in enumerate(tasks):
        lane = schedule[task.stage].lane
        earlier = list(schedule.waits_for(task, micro_batches))
        if lane in lane_tail:
            earlier.append(lane_tail[lane])
        reach = 0
        for other in earlier:
            if other not in number:
                raise ScheduleError(f"{schedule.name}: {task} waits for {other}, which never runs")
            if number[other] >= n:
                # Lanes run their tasks in the order given, so waiting for a later one can never end.
                raise ScheduleError(f"{schedule.name}: {task} waits for {other}, which is queued behind it")
            reach |= before[other] | 1 << number[other]
        before[task] = reach
        lane_tail[lane] = task
    return before


def _locations(access: Access, task: Task, micro_batches: int) -> list[Hashable]:
    """The things an access touches; buffers alternate between batches."""
    if access.place == "buffer":
        return [("buffer", (task.batch - access.batch) % 2)]
    if access.per == "run":
        return [access.place]
    if access.batch > task.batch:
        return []
    if access.per == "batch":
        return [(access.place, task.batch - access.batch)]
    if access.micro_batches == "all":
        return [(access.place, task.batch, i) for i in range(micro_batches)]
    own = task.micro_batch
    assert own is not None
    places = {"own": range(own, own + 1), "up_to": range(own + 1), "from": range(own, micro_batches)}
    return [(access.place, task.batch, i) for i in places[access.micro_batches]]


def _accesses(
    schedule: Schedule, task: Task, used_by: tuple[bool, ...], micro_batches: int
) -> Iterable[tuple[Access, Hashable, bool]]:
    """(access, location, whether it may be stale) of a task as far as the row followed is concerned."""
    now, before = used_by[task.batch], task.batch > 0 and used_by[task.batch - 1]
    holds = {
        "none": True,
        "batch": now,
        "kept": now and before,
        "new": now and not before,
        "dropped": before and not now,
        "idle": not now and not before,
    }
    for access in schedule[task.stage].touches:
        if holds[access.rows]:
            for location in _locations(access, task, micro_batches):
                yield access, location, access.stale and holds["kept"] and schedule.dual_buffer


def _no_race(
    schedule: Schedule,
    tasks: list[Task],
    before: dict[Task, int],
    used_by: tuple[bool, ...],
    micro_batches: int,
) -> None:
    touched: dict[Hashable, list[tuple[int, Task, bool]]] = defaultdict(list)
    for n, task in enumerate(tasks):
        for access, location, stale in _accesses(schedule, task, used_by, micro_batches):
            if stale:
                continue
            writes = access.mode != "read"
            for m, other, other_writes in touched[location]:
                if m != n and (writes or other_writes) and not before[task] >> m & 1:
                    verb, other_verb = ("writes" if w else "reads" for w in (writes, other_writes))
                    raise ScheduleError(
                        f"{schedule.name}: {task} {verb} {_name(location)} while {other}, which {other_verb} "
                        f"it, may still run{_row(used_by)}; add an edge from {other.stage} to {task.stage}"
                    )
            touched[location].append((n, task, writes))


def _same_values(
    schedule: Schedule, tasks: list[Task], used_by: tuple[bool, ...], micro_batches: int
) -> None:
    expected, _ = _run(schedule, tasks, used_by, micro_batches, pipelined=False)
    got, value = _run(schedule, tasks, used_by, micro_batches, pipelined=True)
    for task in tasks:
        if got[task] != expected[task]:
            what = "a stale row" if _STALE in got[task] else "another value"
            raise ScheduleError(
                f"{schedule.name}: {task} reads {what} than stages run one after another would give it"
                f"{_row(used_by)}"
            )
    last = max((batch for batch, used in enumerate(used_by) if used), default=None)
    if schedule.keeps_rows and last == len(used_by) - 1:
        return  # it is in the buffer still, and is written when the pipeline runs empty
    if last is not None and value.get("tables") != value.get(("buffer", last % 2)):
        raise ScheduleError(
            f"{schedule.name}: the update of batch {last} never reaches the tables{_row(used_by)}"
        )


def _run(
    schedule: Schedule, tasks: list[Task], used_by: tuple[bool, ...], micro_batches: int, pipelined: bool
) -> tuple[dict[Task, tuple[Hashable, ...]], dict[Hashable, Hashable]]:
    """What each task reads, every value being the hash of how it was made, and all values at the end.

    Rows pass through a stage that moves them; whatever computes with them must see the right ones. The tables
    and dense parameters have initial values, everything else must be written.
    """
    value: dict[Hashable, Hashable] = {}
    seen: dict[Task, tuple[Hashable, ...]] = {}
    for task in tasks:
        stage = schedule[task.stage]
        reads: list[Hashable] = []
        writes: list[tuple[Hashable, bool]] = []  # with whether rows are written
        moved: Hashable = _UNFETCHED
        for access, location, stale in _accesses(schedule, task, used_by, micro_batches):
            moves = stage.moves and access.rows != "none"
            if access.mode != "write":
                made_here = access.per != "run" or access.place == "buffer"
                if access.mode == "read" and made_here and location not in value:
                    raise ScheduleError(
                        f"{schedule.name}: {task} reads {_name(location)}, which nobody has written"
                        f"{_row(used_by)}"
                    )
                found = _STALE if stale and pipelined else value.get(location, "initial")
                if found == _UNFETCHED and not stage.moves:
                    raise ScheduleError(
                        f"{schedule.name}: {task} reads {_name(location)}, which holds no row{_row(used_by)}"
                    )
                if moves:
                    moved = found
                else:
                    reads.append(found)
            if access.mode != "read":
                writes.append((location, moves))
        made = hash((task, tuple(reads)))
        for location, moves in writes:
            value[location] = moved if moves else made
        seen[task] = tuple(reads)
    return seen, value


def _name(location: Hashable) -> str:
    if isinstance(location, tuple):
        return f"{location[0]}[{', '.join(str(part) for part in location[1:])}]"
    return str(location)


def _row(used_by: tuple[bool, ...]) -> str:
    batches = [str(batch) for batch, used in enumerate(used_by) if used]
    return f" (a row used by batches {', '.join(batches)})" if batches else ""
