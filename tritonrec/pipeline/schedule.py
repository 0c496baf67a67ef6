"""A schedule is data: stages, the lane each runs on, what it touches, and what it waits for.

Every mode is a table of the same twelve stages (NestPipe, sections IV and V). One executor runs any table;
`tritonrec.pipeline.check` proves a table equivalent to running its stages one after another before a single
batch moves.

    batch t       prefetch  h2d  route  retrieve  copy_kept_rows
    window of t   exchange[i]  compute[i]  gradient_exchange[i]        i = 0 .. N-1
    end of t      dense_reduce  sparse_update  dense_update  write_back
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

Which = Literal["none", "same", "previous", "all"]
"""Which micro-batches of the awaited stage: ``none`` (it runs once a batch), ``same`` index, the ``previous``
index (nothing for index 0), or ``all``."""


@dataclass(frozen=True)
class Edge:
    """Wait for `stage` of the batch `batch` steps back."""

    stage: str
    micro_batch: Which = "none"
    batch: int = 0


@dataclass(frozen=True)
class Access:
    """What a stage reads or writes.

    `place` lives once per run (``host`` table, either ``buffer``, ``dense`` and ``dense_gradient``), once per
    ``batch`` or once per ``micro_batch``. A process group is such a place too: its collectives need one order
    on all ranks. Of a place per micro-batch a stage touches its ``own``, those ``up_to`` its own, those
    ``from`` its own, or ``all``: rows that came for a micro-batch serve all later ones, and gradients that
    leave after a micro-batch are added up in all earlier ones.

    `rows` narrows a place to the rows of the batch's keys K(t), to those ``kept`` from the batch before,
    K(t) & K(t-1), to ``new`` ones that it did not have, to those ``dropped`` since, K(t-1) - K(t), or to
    ``idle`` ones of neither batch. `batch` = 1 names the buffer of the batch before.

    A ``stale`` read may race with a write to the kept rows, because somebody overwrites them before use; the
    check demands that somebody does.
    """

    mode: Literal["read", "write", "update"]
    place: str
    per: Literal["run", "batch", "micro_batch"] = "run"
    rows: Literal["none", "batch", "kept", "new", "dropped", "idle"] = "none"
    batch: int = 0
    micro_batches: Literal["own", "up_to", "from", "all"] = "own"
    stale: bool = False


@dataclass(frozen=True)
class Stage:
    """One kind of task. A stage that `moves` rows passes their values on unchanged."""

    name: str
    lane: str
    after: tuple[Edge, ...]
    touches: tuple[Access, ...]
    per_micro_batch: bool = False
    moves: bool = False


@dataclass(frozen=True)
class Task:
    """A stage of one batch, and of one micro-batch where the stage runs once per micro-batch."""

    stage: str
    batch: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        at = f"{self.batch}" if self.micro_batch is None else f"{self.batch}, {self.micro_batch}"
        return f"{self.stage}({at})"


@dataclass(frozen=True)
class Schedule:
    """A mode: its table, how many batches may be in flight, and how a window's tasks are queued.

    With ``early`` exchanges the lanes get all exchanges of a window before anything else of it (NestPipe,
    section V.B: communication is launched as early as possible); without, one micro-batch is done with before
    the next begins.
    """

    name: str
    stages: tuple[Stage, ...]
    batches_in_flight: int
    early: bool = True
    keeps_rows: bool = False  # rows stay in a buffer while the next batch uses them; see `keep_rows`

    def __getitem__(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def tasks(self, batch: int, micro_batches: int) -> Iterator[Task]:
        """Tasks of one batch in the order in which they are given to their lanes."""
        for window, stages in groupby(self.stages, key=lambda stage: stage.per_micro_batch):
            names = [stage.name for stage in stages]
            if not window:
                yield from (Task(name, batch) for name in names)
                continue
            if self.early:
                first, *names = names
                yield from (Task(first, batch, i) for i in range(micro_batches))
            yield from (Task(name, batch, i) for i in range(micro_batches) for name in names)

    def waits_for(self, task: Task, micro_batches: int) -> Iterator[Task]:
        """Tasks that the table orders before `task`, as far as they exist."""
        for edge in self[task.stage].after:
            batch = task.batch - edge.batch
            if batch < 0:
                continue
            if edge.micro_batch == "all":
                yield from (Task(edge.stage, batch, i) for i in range(micro_batches))
            elif edge.micro_batch == "none":
                yield Task(edge.stage, batch)
            else:
                assert task.micro_batch is not None
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
        """The same table with one edge left out; for tests and injected faults."""
        if edge not in self[stage].after:
            raise ValueError(f"{stage} of {self.name} has no edge {edge}")
        return self._with(stage, after=tuple(e for e in self[stage].after if e != edge))

    def without_stage(self, name: str, instead: str) -> Schedule:
        """The same table without a stage; whoever waited for it waits for `instead` of the same batch."""
        stages = []
        for stage in self.stages:
            if stage.name == name:
                continue
            after = [Edge(instead) if e.stage == name and e.batch == 0 else e for e in stage.after]
            stages.append(replace(stage, after=tuple(e for e in after if e.stage != name)))
        return replace(self, stages=tuple(stages))

    def with_edges(self, stage: str, *edges: Edge) -> Schedule:
        """The same table with further edges."""
        return self._with(stage, after=(*self[stage].after, *edges))

    def _with(self, stage: str, **changes: object) -> Schedule:
        stages = tuple(replace(s, **changes) if s.name == stage else s for s in self.stages)  # type: ignore[arg-type]
        return replace(self, stages=stages)


def _nested() -> tuple[Stage, ...]:
    def read(place: str, **kw: object) -> Access:
        return Access("read", place, **kw)  # type: ignore[arg-type]

    def write(place: str, **kw: object) -> Access:
        return Access("write", place, **kw)  # type: ignore[arg-type]

    def update(place: str, **kw: object) -> Access:
        return Access("update", place, **kw)  # type: ignore[arg-type]

    one = "micro_batch"
    return (
        Stage("prefetch", "prefetch", (), (write("samples", per="batch"),)),
        Stage(
            "h2d",
            "h2d",
            (Edge("prefetch"),),
            (read("samples", per="batch"), write("device_samples", per="batch")),
        ),
        Stage(
            "route",
            "routing",
            (Edge("h2d"),),
            (
                read("device_samples", per="batch"),
                update("routing_group"),
                write("routes", per="batch"),
            ),
        ),
        # The buffer was batch t-2's: its rows must be home, and batch t-1 must have taken the ones it kept.
        # Rows of t-2 that t-1 did not touch are then fresh in the host table; those that t-1 holds are not,
        # and are overwritten by `copy_kept_rows`. Rows of neither may be evicted or demoted here: their last
        # update must have come home.
        Stage(
            "retrieve",
            "retrieval",
            (Edge("route"), Edge("write_back", batch=2), Edge("copy_kept_rows", batch=1)),
            (
                read("routes", per="batch"),
                update("retrieval_group"),
                update("host", rows="idle"),
                read("host", rows="batch", stale=True),
                write("buffer", rows="batch"),
                write("kept_rows", per="batch"),
            ),
            moves=True,
        ),
        Stage(
            "copy_kept_rows",
            "copy",
            (Edge("retrieve"), Edge("sparse_update", batch=1)),
            (
                read("kept_rows", per="batch"),
                read("buffer", rows="kept", batch=1),
                write("buffer", rows="kept"),
            ),
            moves=True,
        ),
        Stage(
            "exchange",
            "communication",
            (Edge("copy_kept_rows"),),
            (
                read("routes", per="batch"),
                read("buffer", rows="batch"),
                update("communication_group"),
                write("embeddings", per=one),
            ),
            per_micro_batch=True,
        ),
        Stage(
            "compute",
            "compute",
            (Edge("exchange", "same"), Edge("dense_update", batch=1)),
            (
                read("device_samples", per="batch"),
                read("routes", per="batch"),
                read("embeddings", per=one, micro_batches="up_to"),
                read("dense"),
                update("dense_gradient"),
                update("gradients", per=one, micro_batches="from"),
            ),
            per_micro_batch=True,
        ),
        Stage(
            "gradient_exchange",
            "communication",
            (Edge("compute", "same"),),
            (
                read("routes", per="batch"),
                read("gradients", per=one),
                update("communication_group"),
                update("row_gradient", per=one, micro_batches="from"),
            ),
            per_micro_batch=True,
        ),
        Stage(
            "dense_reduce",
            "reduce",
            (Edge("compute", "all"),),
            (read("routes", per="batch"), update("reduce_group"), update("dense_gradient")),
        ),
        Stage(
            "sparse_update",
            "compute",
            (Edge("gradient_exchange", "all"),),
            (
                read("routes", per="batch"),
                read("row_gradient", per=one, micro_batches="all"),
                update("buffer", rows="batch"),
            ),
        ),
        Stage(
            "dense_update",
            "compute",
            (Edge("dense_reduce"),),
            (update("dense_gradient"), update("dense")),
        ),
        Stage(
            "write_back",
            "write_back",
            (Edge("sparse_update"),),
            (read("buffer", rows="batch"), write("host", rows="batch")),
            moves=True,
        ),
    )


NESTPIPE = Schedule("nestpipe", _nested(), batches_in_flight=4)
"""Dual-buffer pipelining between batches and frozen-window pipelining inside one (NestPipe, Fig. 3)."""

DBP = replace(
    NESTPIPE.with_edges("exchange", Edge("gradient_exchange", "previous")).with_edges(
        "dense_reduce", Edge("gradient_exchange", "all")
    ),
    name="dbp",
    early=False,
)
"""Dual-buffer pipelining alone (section IV): lookups of later batches overlap, the window runs serially."""

FWP = replace(
    NESTPIPE.without_stage("copy_kept_rows", instead="retrieve")
    .with_edges("prefetch", Edge("write_back", batch=1), Edge("dense_update", batch=1))
    .with_edges("retrieve", Edge("write_back", batch=1)),
    name="fwp",
    batches_in_flight=1,
)
"""Frozen-window pipelining alone (section V): one batch at a time, exchanges overlap inside its window."""


def keep_rows(schedule: Schedule) -> Schedule:
    """The table with rows that stay in a buffer while consecutive batches use them.

    Rows of K(t-1) & K(t) would be overwritten by `copy_kept_rows`: they are not fetched, and not written back
    until a batch does without them. `write_back` of batch t thus brings home what batch t-1 had and t has
    not; the last batch's rows go home when the pipeline runs empty.

    Raises ValueError for a table without two buffers.
    """
    if not any(stage.name == "copy_kept_rows" for stage in schedule.stages):
        raise ValueError(f"schedule {schedule.name!r} has no second buffer, so no row can stay in one")
    home = Edge("write_back", batch=2)
    after = [Edge("write_back", batch=1) if edge == home else edge for edge in schedule["retrieve"].after]
    kept = schedule._with(
        "retrieve",
        after=tuple(after),
        touches=tuple(
            replace(access, rows="new", stale=False) if access.stale else access
            for access in schedule["retrieve"].touches
        ),
    )
    return replace(
        kept._with(
            "write_back",
            after=(Edge("retrieve"), Edge("sparse_update", batch=1)),
            touches=(
                Access("read", "kept_rows", per="batch"),
                Access("read", "buffer", rows="dropped", batch=1),
                Access("write", "host", rows="dropped"),
            ),
        ),
        keeps_rows=True,
    )


SEQUENTIAL = replace(
    NESTPIPE.without_stage("copy_kept_rows", instead="retrieve"),
    name="sequential",
    batches_in_flight=1,
    early=False,
)
"""What mode ``sequential`` runs, one stage after another, so that its edges hold by themselves."""


def with_replicas(schedule: Schedule) -> Schedule:
    """The table for 2D sparse parallelism with exact gradients: the sums of a row meet before its update.

    `route` also tells a part's replicas which keys each was asked for, so that all of them hold, update and
    keep the same rows; `replica_reduce` adds up the gradients of those that no later micro-batch uses, or
    without ``first_use`` of all of them after the last one.
    """
    reduce = Stage(
        "replica_reduce",
        "replica",
        (Edge("gradient_exchange", "same"),),
        (
            Access("update", "replica_group"),
            Access("read", "row_gradient", per="micro_batch"),
            Access("write", "mean_gradient", per="micro_batch"),
        ),
        per_micro_batch=True,
    )
    routed = schedule._with(
        "route", touches=(*schedule["route"].touches, Access("update", "replica_routing_group"))
    )
    updated = routed._with(
        "sparse_update",
        after=(Edge("replica_reduce", "all"),),
        touches=tuple(
            replace(access, place="mean_gradient") if access.place == "row_gradient" else access
            for access in schedule["sparse_update"].touches
        ),
    )
    place = [stage.name for stage in updated.stages].index("gradient_exchange") + 1
    return replace(updated, stages=(*updated.stages[:place], reduce, *updated.stages[place:]))


SCHEDULES = {schedule.name: schedule for schedule in (DBP, FWP, NESTPIPE)}
