"""A schedule is data: stages, the lane each runs on, what it accesses, and what it waits for.

Every mode is a schedule of the same stages (NestPipe, sections IV and V). One batch, with lanes as rows and
time to the right; a stage begins to the right of all that it waits for, and ``[i]`` runs once per
micro-batch::

    prefetch       prefetch
    h2d                 h2d
    routing                  route
    retrieval                     retrieve
    copy                               copy_kept_rows
    communication                           exchange[i] gradient_exchange[i]
    compute                                      compute[i]             sparse_update dense_update
    replica                                                  replica_reduce[i]
    reduce                                            dense_reduce gradient_norm
    write_back                                                               write_back

Stages of the next batches run beside it, as far as `Schedule.batches_in_flight` and the edges across batches
let them. `copy_kept_rows` is in schedules with two buffers, `replica_reduce` where replicas of the tables add
up their gradients (`with_replicas`), and `gradient_norm` where gradients have limits (`with_norm`). With
a loss of the whole global batch (`with_window_loss`) `represent[i]` and `window_loss` precede `compute[i]`.
Where dense gradients are reduced beside the last backward (`with_early_dense`), bucket j of them waits for
`early_gradients[j]`, a part of that backward's `compute`.
Each declares so (`Stage.feature`); other stages declare what they take from it, and do without where it is
absent.

One executor runs any schedule; `tritonrec.pipeline.check` proves it equivalent to running its stages one
after another before a single batch moves. What a mode can do, its schedule says: `Schedule.dual_buffer`, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from . import stages
from .stage import Access, Edge, Feature, Stage, Which

__all__ = [
    "DBP", "FWP", "NESTPIPE", "SCHEDULES", "SEQUENTIAL",
    "Access", "Edge", "Schedule", "Stage", "Task", "Which", "keep_rows", "over_nodes",
    "with_early_dense", "with_norm", "with_replicas", "with_window_loss",
]  # fmt: skip


class Task(NamedTuple):
    """A stage of one batch, and of one micro-batch, or bucket, where the stage runs once for each."""

    stage: str
    batch: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        at = f"{self.batch}" if self.micro_batch is None else f"{self.batch}, {self.micro_batch}"
        return f"{self.stage}({at})"


@dataclass(frozen=True)
class Schedule:
    """A mode: its stages, how many batches may be in flight, and how a window's tasks are queued.

    With ``early`` exchanges the lanes get all exchanges of a window before anything else of it (NestPipe,
    section V.B: communication is launched as early as possible); without, one micro-batch is done with before
    the next begins. The lanes of a ``concurrent`` schedule run at the same time; of any other, one stage
    runs after another.

    Devices deadlock unless all ranks launch the collectives of all groups in one order, which `launch_turn`
    defines. Those of the stages ``ahead`` come before the window of the batch before.

    ``buckets`` of dense gradients are reduced before the last backward has ended.
    """

    name: str
    stages: tuple[Stage, ...]
    batches_in_flight: int
    early: bool = True
    concurrent: bool = True
    ahead: tuple[str, ...] = ()
    buckets: int = 0

    def __post_init__(self) -> None:
        for name in ("stages", "ahead"):  # lists too: a schedule is hashed
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def overlaps_window(self) -> bool:
        """Whether exchanges of a window run beside its computation."""
        return self.concurrent and self.early

    @property
    def dual_buffer(self) -> bool:
        """Whether a batch's rows are fetched while the batch before still trains on its own."""
        return self._has("dual_buffer")

    @property
    def keeps_rows(self) -> bool:
        """Whether rows stay in a buffer while consecutive batches use them; see `keep_rows`."""
        return any(access.rows == "dropped" for stage in self.stages for access in stage.touches)

    @property
    def relays(self) -> bool:
        """Whether lookups go within a node and between nodes, a step each; see `over_nodes`."""
        return any(access.place == "relayed" for stage in self.stages for access in stage.touches)

    @property
    def replicated(self) -> bool:
        """Whether gradients are added up over replicas of the tables; see `with_replicas`."""
        return self._has("replicated")

    @property
    def clips(self) -> bool:
        """Whether the norm of all gradients is known before the updates; see `with_norm`."""
        return self._has("clips")

    @property
    def sees_window(self) -> bool:
        """Whether losses are of the whole global batch; see `with_window_loss`."""
        return self._has("sees_window")

    @property
    def reduces_early(self) -> bool:
        """Whether dense gradients are reduced while backward goes on; see `with_early_dense`."""
        return self._has("early_dense")

    def _has(self, feature: Feature) -> bool:
        return any(stage.feature == feature for stage in self.stages)

    @property
    def overlaps_batches(self) -> bool:
        """Whether several batches may be in flight: stages of the next run beside those of this one."""
        return self.batches_in_flight > 1

    @cached_property
    def _by_name(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    def __getitem__(self, name: str) -> Stage:
        return self._by_name[name]

    def tasks(self, batch: int, micro_batches: int) -> Iterator[Task]:
        """Tasks of one batch in the order in which they are given to their lanes."""
        # Only the order within a lane counts. ``early`` moves all exchanges in front of the first gradient
        # exchange, which has the same lane; the other lanes get their tasks in the same order either way.
        parts = {stage.within: stage.name for stage in self.stages if stage.within}
        whole = (stage for stage in self.stages if not stage.within)
        for window, stages_of in groupby(whole, key=lambda stage: stage.per_micro_batch):
            if not window:
                for stage in stages_of:
                    every = range(self.buckets) if stage.per_bucket else [None]
                    yield from (Task(stage.name, batch, j) for j in every)
                continue
            names = [stage.name for stage in stages_of]
            if self.early:
                first, *names = names
                yield from (Task(first, batch, i) for i in range(micro_batches))
            for i in range(micro_batches):
                for name in names:
                    if name in parts and i == micro_batches - 1:
                        yield from (Task(parts[name], batch, j) for j in range(self.buckets))
                    yield Task(name, batch, i)

    def launch_turn(self, task: Task) -> tuple[int, bool]:
        """When the collectives of a task are launched, by batch: those ahead of its window, then its own.

        Tasks of one turn follow each other in the order in which lanes get them (`Tasks.of`).
        """
        # Turns sort as  (t, False) route of t + 1,  (t, True) window of t,  (t + 1, False) route of t + 2:
        # the keys of the next batch are routed before a device is busy with this window's exchanges.
        is_ahead = task.stage in self.ahead
        return task.batch - is_ahead, not is_ahead

    def drawn(self) -> str:
        """One batch in text: lanes are rows, and a stage begins to the right of all that it waits for.

        A stage with ``[i]`` runs once per micro-batch, one with ``[j]`` once per bucket.
        """
        starts: dict[str, int] = {}
        rows: dict[str, str] = {}
        for stage in self.stages:
            row = rows.get(stage.lane, f"{stage.lane:<15}")
            # Five columns to the right read as "later" and leave room for the names of overlapping stages.
            awaited = [starts[edge.stage] + 5 for edge in stage.after if not edge.batch]
            starts[stage.name] = max([15, *awaited, len(row) + (stage.lane in rows)])
            index = "[i]" * stage.per_micro_batch + "[j]" * stage.per_bucket
            rows[stage.lane] = row.ljust(starts[stage.name]) + stage.name + index
        return "\n".join(rows.values())

    @property
    def reach(self) -> int:
        """How many batches the longest edge leads back."""
        return max((edge.batch for stage in self.stages for edge in stage.after), default=0)

    def waits_for(self, task: Task, micro_batches: int) -> Iterator[Task]:
        """Tasks that the schedule orders before `task`, as far as they exist."""
        for edge in self[task.stage].after:
            batch = task.batch - edge.batch
            if batch < 0:
                continue
            if edge.micro_batch == "all":
                count = self.buckets if self[edge.stage].per_bucket else micro_batches
                yield from (Task(edge.stage, batch, i) for i in range(count))
            elif edge.micro_batch == "none":
                yield Task(edge.stage, batch)
            else:
                assert task.micro_batch is not None
                # The first micro-batch has no previous one to wait for.
                index = task.micro_batch - (edge.micro_batch == "previous")
                if index >= 0:
                    yield Task(edge.stage, batch, index)

    def edges(self) -> list[tuple[str, str, int, str]]:
        """Edges as (from stage, to stage, batches back, micro-batch rule), the form that traces carry."""
        return [
            (edge.stage, stage.name, edge.batch, edge.micro_batch)
            for stage in self.stages
            for edge in stage.after
        ]

    def without_edge(self, stage: str, edge: Edge) -> Schedule:
        """The same schedule with one edge left out; for tests and injected faults."""
        if edge not in self[stage].after:
            raise ValueError(f"{stage} of {self.name} has no edge {edge}")
        return self._with(stage, after=tuple(e for e in self[stage].after if e != edge))

    def without_stage(self, name: str, instead: str) -> Schedule:
        """The same schedule without a stage; what waited for it waits for `instead` of the same batch."""
        left = []
        for stage in (each for each in self.stages if each.name != name):
            after = [Edge(instead) if e == Edge(name, e.micro_batch) else e for e in stage.after]
            # Left over are edges to earlier batches of the stage; they order nothing once it is gone.
            left.append(replace(stage, after=tuple(e for e in after if e.stage != name)))
        return replace(self, stages=tuple(left))

    def with_one_buffer(self) -> Schedule:
        """The same schedule without a second buffer: no stage accesses a place of the batch before."""
        single = self.without_stage("copy_kept_rows", instead="retrieve")
        here = (replace(s, touches=tuple(a for a in s.touches if not a.batch)) for s in single.stages)
        return replace(single, stages=_fitted(here))

    def with_stage(self, more: Stage) -> Schedule:
        """The schedule with one of `STAGES` more, and with what the others declare about it."""
        # `STAGES` has each stage with all its edges and optional accesses; a schedule has them cut to what is
        # there. This gives back those that concern the stage that is added.
        written, chosen = {access.place for access in more.touches if access.mode != "read"}, [more]
        for stage in self.stages:
            full = next(each for each in STAGES if each.name == stage.name)
            waits = [edge for edge in full.after if edge.stage == more.name]
            takes = [a for a in full.touches if a.optional and a.place in written and a not in stage.touches]
            chosen.append(replace(stage, after=(*stage.after, *waits), touches=(*stage.touches, *takes)))
        order = [stage.name for stage in STAGES]
        return replace(self, stages=_fitted(sorted(chosen, key=lambda each: order.index(each.name))))

    def with_stages(self, *others: Stage) -> Schedule:
        """The same schedule with other forms of the stages of these names."""
        named = {stage.name: stage for stage in others}
        return replace(self, stages=tuple(named.get(stage.name, stage) for stage in self.stages))

    def with_edges(self, stage: str, *edges: Edge) -> Schedule:
        """The same schedule with further edges."""
        return self._with(stage, after=(*self[stage].after, *edges))

    def _with(self, stage: str, **changes: object) -> Schedule:
        changed = tuple(replace(s, **changes) if s.name == stage else s for s in self.stages)  # type: ignore[arg-type]
        return replace(self, stages=changed)


STAGES: tuple[Stage, ...] = (
    stages.prefetch,
    stages.h2d,
    stages.route,
    stages.retrieve,
    stages.copy_kept_rows,
    stages.exchange,
    stages.represent,
    stages.window_loss,
    stages.early_gradients,
    stages.compute,
    stages.gradient_exchange,
    stages.replica_reduce,
    stages.early_dense_reduce,
    stages.dense_reduce,
    stages.gradient_norm,
    stages.sparse_update,
    stages.dense_update,
    stages.write_back,
)
"""Every stage, in the order in which lanes are given those of a batch."""


def _fitted(chosen: Iterable[Stage]) -> tuple[Stage, ...]:
    """These of `STAGES`, without what they would take from, leave to or wait for one that is not chosen."""
    chosen = tuple(chosen)
    absent = {stage.name for stage in STAGES} - {stage.name for stage in chosen}
    every = [access for stage in chosen for access in stage.touches]
    # A place that nobody writes has no value, and one that nobody reads need not be filled.
    read = {access.place for access in every if access.mode != "write"}
    written = {access.place for access in every if access.mode != "read"}
    fitted = []
    for stage in chosen:
        after = tuple(edge for edge in stage.after if edge.stage not in absent)
        touches = tuple(a for a in stage.touches if not a.optional or a.place in read & written)
        fitted.append(replace(stage, after=after, touches=touches))
    return tuple(fitted)


NESTPIPE = Schedule(
    "nestpipe",
    _fitted(stage for stage in STAGES if stage.feature in ("", "dual_buffer")),
    batches_in_flight=4,
    ahead=("route",),
)
"""Dual-buffer pipelining between batches and frozen-window pipelining inside one (NestPipe, Fig. 3)."""

DBP = replace(
    # Each micro-batch sends its gradients before the next one gets its rows, and the dense sums go last: no
    # message of the window is beside its computation.
    NESTPIPE.with_edges("exchange", Edge("gradient_exchange", "previous")).with_edges(
        "dense_reduce", Edge("gradient_exchange", "all")
    ),
    name="dbp",
    early=False,
)
"""Dual-buffer pipelining alone (section IV): lookups of later batches overlap, the window runs serially."""

FWP = replace(
    NESTPIPE.with_one_buffer()
    # One batch at a time as edges, since the proof takes nothing from `batches_in_flight`. With a single
    # buffer no row is copied from the batch before: it has to be in the tables when `retrieve` reads it.
    .with_edges("prefetch", Edge("write_back", batch=1), Edge("dense_update", batch=1))
    .with_edges("retrieve", Edge("write_back", batch=1)),
    name="fwp",
    batches_in_flight=1,
    ahead=(),
)
"""Frozen-window pipelining alone (section V): one batch at a time, exchanges overlap inside its window."""

SEQUENTIAL = replace(
    NESTPIPE.with_one_buffer(),
    name="sequential",
    batches_in_flight=1,
    early=False,
    concurrent=False,
    ahead=(),
)
"""What mode ``sequential`` runs, one stage after another, so that its edges hold by themselves."""

SCHEDULES = {schedule.name: schedule for schedule in (DBP, FWP, NESTPIPE)}


def keep_rows(schedule: Schedule) -> Schedule:
    """The schedule with rows that stay in a buffer while consecutive batches use them.

    Rows of K(t-1) & K(t) would be overwritten by `copy_kept_rows`: they are not fetched, and not written back
    until a batch does without them. `write_back` of batch t thus writes rows that batch t-1 had and t has
    not; the last batch's rows are written when the pipeline runs empty.

    Raises ValueError for a schedule without two buffers.
    """
    if not schedule.dual_buffer:
        raise ValueError(f"schedule {schedule.name!r} has no second buffer, so no row can stay in one")
    return schedule.with_stages(stages.retrieve_new_rows, stages.write_back_dropped_rows)


def over_nodes(schedule: Schedule) -> Schedule:
    """The schedule whose lookups go within a node and between nodes, a step each (`relays`).

    The stages wait for what they waited for.
    """
    # The forms are declared without edges, so that those of a mode (of `DBP` above all) are written once.
    forms = stages.route_over_nodes, stages.exchange_over_nodes, stages.gradient_exchange_over_nodes
    return schedule.with_stages(*(replace(form, after=schedule[form.name].after) for form in forms))


def with_replicas(schedule: Schedule) -> Schedule:
    """The schedule of 2D sparse parallelism with exact gradients: all replicas' sums make a row's update.

    `replica_reduce` adds up the gradients of the rows that no later micro-batch uses, or without
    ``first_use`` of all of them after the last one.
    """
    return schedule.with_stage(stages.replica_reduce)


def with_norm(schedule: Schedule) -> Schedule:
    """The schedule with updates from gradients within limits: they wait for the norm of all gradients."""
    return schedule.with_stage(stages.gradient_norm)


def with_early_dense(schedule: Schedule, buckets: int = 1) -> Schedule:
    """The schedule in which `buckets` of dense gradients are reduced beside the rest of the last backward.

    As DDP's are (Li et al., VLDB 2020, section 3.2.3), in the order in which backward completes them.
    `dense_reduce` has the last parameters', all that is left exposed.
    """
    early = schedule.with_stage(stages.early_gradients).with_stage(stages.early_dense_reduce)
    return replace(early, buckets=buckets)


def with_window_loss(schedule: Schedule) -> Schedule:
    """The schedule of a model with a `window_loss`: all micro-batches show their samples before any backward.

    Where micro-batches exchanged one after the other (`DBP`), now their forwards do.
    """
    seen = schedule.with_stage(stages.represent).with_stage(stages.window_loss)
    waits = Edge("gradient_exchange", "previous")
    if waits in seen["exchange"].after:
        seen = seen.without_edge("exchange", waits).with_edges("exchange", Edge("represent", "previous"))
    return seen
