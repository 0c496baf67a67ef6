"""Proof that a schedule computes what its stages would compute one after another, for any number of batches,
of batches in flight and of micro-batches.

The proof has two halves. First, no race: any two tasks that touch the same thing, one of them writing, must
be ordered by edges and lanes. A schedule without races gives one result whatever the timing. Second, that
result is the right one: the tasks are run symbolically, in the order of their lanes and with stale reads, and
beside them a task for every micro-batch, one after another and without stale reads. Every value read must
agree and have been written by somebody, and the last update of a row must reach the tables. Besides, no task
waits for one that launches its collectives later: in the one order of all ranks (`Tasks.launch_order`) each
gets its turn. What a stage accesses is taken from the table, which is derived from the stages' signatures; a
stage is passed nothing else (`tritonrec.pipeline.program`). Embedding rows differ only in which batches use
them.

Why a few batches and micro-batches are enough, for any table of this vocabulary:

- *Batches in flight* order nothing here: only edges and lanes do.
- *Micro-batches.* Take any three of N, in order. An edge of the table with 3 to the ``same``, to ``all`` or
  to the ``previous`` micro-batch is a path in the table with N, since a lane runs those between in order. So
  what is ordered with 3 is ordered with N. What tasks of micro-batches i and j share (``own``, ``up_to``,
  ``from``, ``all``), they share in i or j. So two tasks that race with N race with any 3 that hold both, and
  a value that nobody has written with N is missing with 3. Stages that move rows do not repeat in a window;
  a table where they do is followed with all N. So is one of whose micro-batches any share a task: these are
  proven as they are, for their N alone.
- *Distance of batches.* A lane runs a stage of batch u before that of u + 1. So tasks of batches t and t + d
  that are ordered are ordered for every larger d. Which rows both access goes by the use of the row in
  t - 1, t, t + d - 1 and t + d, four different batches from d = 2 on, and buffers alternate. So a race for
  d > 3 is also one for d - 2, unless it is over a place of a batch. Tasks share that at one distance only,
  `Access.batch` at most, which `_most_batches` covers.
- *Parts.* What the last micro-batch's task does on its way (`Stage.within`) stands for tasks just before it.
  So what waits for a part alone is ordered before nothing of the whole: all of that, and later parts, may
  still run beside it. Earlier micro-batches do what the parts do, anywhere in their tasks. A table is proven
  for its number of buckets alone.
- *Number of batches* in the symbolic run. After a batch only equality matters, among the values that later
  batches may still read. `_same_values` follows every use of a row until no such state is new: these states
  are the invariant of an induction.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from .schedule import Access, Edge, Schedule, Stage, Task
from .tasks import Tasks

MICRO_BATCHES = 3
"""Those that a proof for any number looks at."""

_STALE = "stale"
_UNFETCHED = "unfetched"
_INITIAL = "initial"

Values = dict[Hashable, Hashable]
"""What each place holds: the hash of how it was made."""


class ScheduleError(ValueError):
    """A schedule may compute something else than its stages one after another."""


def check(schedule: Schedule, micro_batches: int, doers: Mapping[str, Sequence[int]] | None = None) -> None:
    """Raise `ScheduleError` naming the tasks and the row unless `schedule` is race-free and equivalent.

    It is then proven for any number of batches, for any number of them in flight, and for any number of
    micro-batches from `micro_batches` on, if that is 3 or more. With `doers`, micro-batches that share a task
    (`Tasks`), it is proven for `micro_batches` and these. The executor calls it before its first batch.
    """
    _check(schedule, micro_batches, tuple((stage, tuple(each)) for stage, each in (doers or {}).items()))


@lru_cache(maxsize=1024)  # every trainer of a table asks again
def _check(schedule: Schedule, micro_batches: int, doers: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
    _well_formed(schedule)
    tasks = Tasks(schedule, micro_batches, dict(doers))
    moves = any(stage.moves and stage.per_micro_batch for stage in schedule.stages)
    if not moves and not tasks.shared:
        tasks = Tasks(schedule, min(micro_batches, MICRO_BATCHES))
    _no_race(tasks, _most_batches(schedule))
    _launches_in_turn(tasks)
    _same_values(tasks)


def _most_batches(schedule: Schedule) -> int:
    """Batches among which every race shows."""
    # The earlier task of a race is of batch max(back, 1) at least: all
    # batches that it or a use of its row leads back to exist. The later one
    # is at most max(back, 3) batches on (the module's "Distance of batches").
    back = max((access.batch for stage in schedule.stages for access in stage.touches), default=0)
    return max(back, 1) + max(back, 3) + 1


def _well_formed(schedule: Schedule) -> None:
    """Edges lead to stages, and batches can start: what the batches followed below might not show."""
    if schedule.batches_in_flight < 1:
        raise ScheduleError(
            f"{schedule.name}: with {schedule.batches_in_flight} batches in flight none starts"
        )
    stages = {stage.name: stage for stage in schedule.stages}
    for stage, behind in zip(schedule.stages, (*schedule.stages[1:], None), strict=True):
        # The last of a lane's tasks begins behind what all of them have waited for.
        if stage.within and not (
            behind
            and (behind.name, behind.lane) == (stage.within, stage.lane)
            and (behind.per_micro_batch, stage.per_bucket) == (True, True)
            and {_of_all(edge) for edge in behind.after} == set(stage.after)
        ):
            raise ScheduleError(
                f"{schedule.name}: {stage.name} is a part of {stage.within}, which must come next on the "
                "same lane and wait for the same"
            )
        for edge in stage.after:
            if edge.stage not in stages:
                raise ScheduleError(f"{schedule.name}: {stage.name} waits for {edge.stage}, which never runs")
            often, own = (_often(each) for each in (stages[edge.stage], stage))
            # "none" stands for a stage that runs once per batch, and
            # nothing else does; an index needs one on both sides.
            if (edge.micro_batch == "none") != (often == "once per batch") or (
                edge.micro_batch in ("same", "previous") and often != own
            ):
                raise ScheduleError(
                    f"{schedule.name}: {stage.name} waits for {edge.micro_batch!r} of {edge.stage}, "
                    f"which runs {often}"
                )


def _of_all(edge: Edge) -> Edge:
    return replace(edge, micro_batch="all") if edge.micro_batch == "same" else edge


def _often(stage: Stage) -> str:
    if stage.per_bucket:
        return "once per bucket"
    return "once per micro-batch" if stage.per_micro_batch else "once per batch"


def _happens_before(tasks: Tasks, given: list[Task]) -> dict[Task, int]:
    """For each task the bit set of the tasks that finish before it starts."""
    name, number = tasks.schedule.name, {task: n for n, task in enumerate(given)}
    before: dict[Task, int] = {}
    lane_tail: dict[str, Task] = {}
    for n, task in enumerate(given):
        lane = tasks.schedule[task.stage].lane
        earlier = [*tasks.waits_for(task)]
        if lane in lane_tail:
            earlier.append(lane_tail[lane])
        reach = 0
        for other in earlier:
            if other not in number:
                raise ScheduleError(f"{name}: {task} waits for {other}, which never runs")
            if number[other] >= n:
                # Lanes run their tasks in the order given, so waiting for a later one can never end.
                raise ScheduleError(f"{name}: {task} waits for {other}, which is queued behind it")
            # `given` lists each task behind all it waits for, so one pass closes the relation under "before".
            reach |= before[other] | 1 << number[other]
        before[task] = reach
        lane_tail[lane] = task
    return before


def _launches_in_turn(tasks: Tasks) -> None:
    """Raise where a task would wait for one that launches its collectives after it.

    Waits lead to the same or earlier batches, and turns mix neighbouring batches alone: three are enough.
    """
    schedule = tasks.schedule
    if schedule.ahead and schedule.batches_in_flight < 2:
        raise ScheduleError(
            f"{schedule.name}: {', '.join(schedule.ahead)} of the next batch cannot launch before a "
            f"window: with one batch in flight there is no next one"
        )
    given = [task for batch in range(3) for task in tasks.of(batch)]
    number = {task: n for n, task in enumerate(given)}
    before = _happens_before(tasks, given)
    order = tasks.launch_order(3)
    for n, later in enumerate(order):
        for earlier in order[:n]:
            # `earlier` may not launch until `later` has ended, and
            # `later` may not launch before `earlier`: a deadlock.
            if before[earlier] >> number[later] & 1:
                raise ScheduleError(
                    f"{schedule.name}: {earlier} launches its collectives before {later}, and waits for it"
                )


def _locations(schedule: Schedule, access: Access, task: Task, micro_batches: int) -> list[Hashable]:
    """The things an access touches; buffers alternate between batches."""
    if access.place == "buffer":
        return [("buffer", (task.batch - access.batch) % 2)]
    # A place of the run is one place for all batches; of a place with rows the check follows a single row.
    if access.per == "run":
        return [access.place]
    if access.per == "bucket":
        one = schedule[task.stage].per_bucket
        return [f"{access.place} {j}" for j in range(schedule.buckets) if not one or j == task.micro_batch]
    # The first batch of a pipeline has none before it: an optional place is then None.
    if access.batch > task.batch:
        return []
    if access.per == "batch":
        return [(access.place, task.batch - access.batch)]
    if access.micro_batches == "all":
        return [(access.place, task.batch, i) for i in range(micro_batches)]
    own = task.micro_batch
    assert own is not None
    # micro-batch   0   1   2   3   4        of a task of micro-batch 2
    # "up_to"       x   x   x                rows that came with an earlier micro-batch serve this one
    # "from"                x   x   x        gradients that leave with a later one are added up here
    places = {"own": range(own, own + 1), "up_to": range(own + 1), "from": range(own, micro_batches)}
    return [(access.place, task.batch, i) for i in places[access.micro_batches]]


def _accesses(
    schedule: Schedule, task: Task, before: bool, now: bool, micro_batches: int
) -> Iterable[tuple[Access, Hashable, bool]]:
    """(access, location, whether it may be stale) of a task as far as a row is concerned.

    Args:
        before, now: whether the batch before the task's uses the row, and whether its own does.
    """
    holds = {
        "none": True,
        "batch": now,
        "kept": now and before,
        "new": now and not before,
        "dropped": before and not now,
        "idle": not now and not before,
    }
    touches = schedule[task.stage].touches
    if task.micro_batch is not None and task.micro_batch < micro_batches - 1:
        parts = [each for stage in schedule.stages if stage.within == task.stage for each in stage.touches]
        touches += tuple(each for each in parts if each.per == "bucket")
    for access in touches:
        if holds[access.rows]:
            for location in _locations(schedule, access, task, micro_batches):
                # Only a kept row can be stale in the tables, and
                # only where a second buffer has its newer value.
                yield access, location, access.stale and holds["kept"] and schedule.dual_buffer


def _no_race(tasks: Tasks, batches: int) -> None:
    """Raise for the race with the fewest uses of its row, and then the earliest, among so many batches."""
    given = [task for batch in range(batches) for task in tasks.of(batch)]
    before = _happens_before(tasks, given)
    uses = [(False, False), (False, True), (True, False), (True, True)]
    touched = [{use: _touched(tasks, task, use) for use in uses} for task in given]
    # Most pairs share no place for any use of a row: this set sorts them out before uses are tried.
    everywhere = [set().union(*each.values()) for each in touched]
    found = []
    for n, task in enumerate(given):
        for m in range(n):
            if before[task] >> m & 1 or everywhere[n].isdisjoint(everywhere[m]):
                continue
            for used_by in _uses(given[m].batch, task.batch, batches):
                here, there = (touched[k][_use(used_by, given[k].batch)] for k in (n, m))
                for location, writes in here.items():
                    if location in there and (writes or there[location]):
                        found.append((used_by, n, m, location))
    if found:
        used_by, n, m, location = min(found, key=lambda each: each[:3])
        verb, other_verb = (
            "writes" if touched[k][_use(used_by, given[k].batch)][location] else "reads" for k in (n, m)
        )
        raise ScheduleError(
            f"{tasks.schedule.name}: {given[n]} {verb} {_name(location)} while {given[m]}, which "
            f"{other_verb} it, may still run{_row(used_by)}; add an edge from {given[m].stage} to "
            f"{given[n].stage}"
        )


def _touched(tasks: Tasks, task: Task, use: tuple[bool, bool]) -> dict[Hashable, bool]:
    """Locations that a task accesses, and whether it writes them; stale reads left out."""
    touched: dict[Hashable, bool] = {}
    for each in tasks.does(task):
        for access, location, stale in _accesses(tasks.schedule, each, *use, tasks.micro_batches):
            if not stale:
                touched[location] = touched.get(location, False) or access.mode != "read"
    return touched


def _uses(first: int, second: int, batches: int) -> Iterable[tuple[bool, ...]]:
    """Every use of a row by two batches and those before them; no other batch uses it."""
    concerned = sorted({batch for batch in (first - 1, first, second - 1, second) if batch >= 0})
    for uses in product((False, True), repeat=len(concerned)):
        used_by = dict(zip(concerned, uses, strict=True))
        yield tuple(used_by.get(batch, False) for batch in range(batches))


def _use(used_by: tuple[bool, ...], batch: int) -> tuple[bool, bool]:
    """Whether the batch before and the batch itself use the row."""
    return batch > 0 and used_by[batch - 1], used_by[batch]


def _same_values(tasks: Tasks) -> None:
    """Follow every use of a row, batch by batch, until each state has been seen before."""
    seen: set[Hashable] = set()
    ends: list[tuple[tuple[bool, ...], Values, Values]] = [((), {}, {})]
    while ends:
        further: list[tuple[tuple[bool, ...], Values, Values]] = []
        for used_by, expected, got in ends:
            for now in (False, True):
                # Both continuations of every state: the next batch uses the row or does not.
                uses = (*used_by, now)
                values = _after_batch(tasks, uses, expected, got)
                _reaches_the_tables(tasks.schedule, uses, values[1])
                state = _state(tasks.schedule, uses, *values)
                if state not in seen:
                    seen.add(state)
                    further.append((uses, *values))
        ends = further


def _after_batch(
    tasks: Tasks, used_by: tuple[bool, ...], expected: Values, got: Values
) -> tuple[Values, Values]:
    """The values after the last batch of `used_by`: of every micro-batch's own tasks without stale reads, and
    of those that run, with them. No task may read another value.
    """
    schedule, count, batch = tasks.schedule, tasks.micro_batches, len(used_by) - 1
    expected, got = dict(expected), dict(got)
    # `expected` sees one task a micro-batch, in the order of the stages. `got` sees the tasks that run, in
    # the order of their lanes: any of the orders that edges allow gives the same values, since nothing races.
    right = {
        task: _run_task(schedule, task, used_by, expected, count, stale_reads=False)
        for task in schedule.tasks(batch, count)
    }
    for shared in tasks.of(batch):
        for task in tasks.does(shared):
            reads = _run_task(schedule, task, used_by, got, count, stale_reads=True)
            if reads != right[task]:
                what = "a stale row" if _STALE in reads else "another value"
                raise ScheduleError(
                    f"{schedule.name}: {task} reads {what} than stages run one after another would give it"
                    f"{_row(used_by)}"
                )
    return expected, got


def _run_task(
    schedule: Schedule,
    task: Task,
    used_by: tuple[bool, ...],
    values: Values,
    micro_batches: int,
    stale_reads: bool,
) -> tuple[Hashable, ...]:
    """What a task reads; its results are put into `values`.

    Rows pass through a stage that moves them; whatever computes with them must see the right ones. The tables
    and dense parameters have initial values, everything else must be written. Process groups have no value.
    """
    stage = schedule[task.stage]
    reads: list[Hashable] = []
    writes: list[tuple[Hashable, bool]] = []  # with whether rows are written
    moved: Hashable = _UNFETCHED
    use = _use(used_by, task.batch)
    for access, location, stale in _accesses(schedule, task, *use, micro_batches):
        if access.group:
            continue
        moves = stage.moves and access.rows != "none"
        if access.mode != "write":
            # An update may start from nothing (the first micro-batch makes the sums); a plain read may not.
            made_here = access.per not in ("run", "bucket") or access.place == "buffer"
            if access.mode == "read" and made_here and location not in values:
                raise ScheduleError(
                    f"{schedule.name}: {task} reads {_name(location)}, which nobody has written"
                    f"{_row(used_by)}"
                )
            found = _STALE if stale and stale_reads else values.get(location, _INITIAL)
            if found == _UNFETCHED and not stage.moves:
                raise ScheduleError(
                    f"{schedule.name}: {task} reads {_name(location)}, which holds no row{_row(used_by)}"
                )
            # A stage that moves rows leaves no trace in them:
            # the value stays what the last computation made it.
            if moves:
                moved = found
            else:
                reads.append(found)
        if access.mode != "read":
            writes.append((location, moves))
    made = hash((task, tuple(reads)))
    for location, moves in writes:
        values[location] = moved if moves else made
    return tuple(reads)


def _reaches_the_tables(schedule: Schedule, used_by: tuple[bool, ...], values: Values) -> None:
    """Raise unless the tables hold the row as the last batch that uses it has left it, if no other follows.

    A row that stays in the buffer of the very last batch is written when the pipeline runs empty.
    """
    last = max((batch for batch, used in enumerate(used_by) if used), default=None)
    if last is None or (schedule.keeps_rows and last == len(used_by) - 1):
        return
    if values.get("tables") != values.get(("buffer", last % 2)):
        raise ScheduleError(
            f"{schedule.name}: the update of batch {last} never reaches the tables{_row(used_by)}"
        )


def _state(schedule: Schedule, used_by: tuple[bool, ...], expected: Values, got: Values) -> Hashable:
    """What later batches can tell of the values: which of them are equal, with the batches counted from here.

    Places of a batch are left out where no stage reads so far back.
    """
    back = max((access.batch for stage in schedule.stages for access in stage.touches), default=0)
    last = len(used_by) - 1
    numbers: dict[Hashable, int] = {}

    def here(location: Hashable) -> Hashable | None:
        if not isinstance(location, tuple):
            return location
        name, batch, *rest = location
        if name == "buffer":
            return name, (last - batch) % 2
        return (name, last - batch, *rest) if last - batch < back else None

    shape = []
    for run, values in enumerate((expected, got)):
        places = ((here(location), value) for location, value in values.items())
        for place, value in sorted(places, key=str):
            if place is not None:
                # Hashes are numbered in the order of the sorted places:
                # two states with the same equalities get one shape.
                token = value if isinstance(value, str) else numbers.setdefault(value, len(numbers))
                shape.append((run, place, token))
    since = min((last - batch for batch, now in enumerate(used_by) if now), default=-1)
    # Beyond two batches only the parity matters: it says which of the two buffers had the row last.
    since = since if since < 2 else 2 + since % 2  # the buffer of the last use, and whether it may be read
    return tuple(shape), since


def _name(location: Hashable) -> str:
    if isinstance(location, tuple):
        return f"{location[0]}[{', '.join(str(part) for part in location[1:])}]"
    return str(location)


def _row(used_by: tuple[bool, ...]) -> str:
    batches = [str(batch) for batch, used in enumerate(used_by) if used]
    return f" (a row used by batches {', '.join(batches)})" if batches else ""
