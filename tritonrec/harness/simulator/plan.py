"""How a step is scheduled: a table, and the switches on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tritonrec.pipeline.schedule import DBP, FWP, NESTPIPE, Access, Edge, Schedule, Stage

Pipeline = Literal["synchronous", "prefetch", "dbp", "fwp", "nestpipe"]

SYNCHRONOUS = replace(
    FWP.with_edges("exchange", Edge("gradient_exchange", "previous"))
    .with_edges("dense_reduce", Edge("gradient_exchange", "all"))
    .with_edges("sparse_update", Edge("dense_reduce"))
    .with_edges("write_back", Edge("dense_update")),
    name="synchronous",
    early=False,
)
"""One batch, one micro-batch, one stage at a time."""

TABLES: dict[str, Schedule] = {
    "synchronous": SYNCHRONOUS,
    # Lookups of later batches overlap, and nobody makes their rows fresh: stale, so the check rejects it.
    "prefetch": replace(DBP.without_stage("synchronise", instead="retrieve"), name="prefetch"),
    "dbp": DBP,
    "fwp": FWP,
    "nestpipe": NESTPIPE,
}


@dataclass(frozen=True)
class Plan:
    """One way to schedule the steps.

    Args:
        pipeline: the table.
        micro_batches: N.
        depth: batches in flight; None: the table's own number.
        replicas: R of 2D sparse parallelism: copies of the tables, each sharded over world size / R workers.
        clustered: micro-batches of samples that share keys (NestPipe, section V.C).
        taper: (N,) relative sizes of the micro-batches, in samples; None: all alike.
        first_use: each row travels for the first micro-batch that uses it, each gradient after the last.
        skip_fetch: rows that the next batch uses too are neither written back nor fetched.
    """

    pipeline: Pipeline = "nestpipe"
    micro_batches: int = 1
    depth: int | None = None
    replicas: int = 1
    clustered: bool = False
    taper: tuple[float, ...] | None = None
    first_use: bool = False
    skip_fetch: bool = False

    def __post_init__(self) -> None:
        if self.pipeline not in TABLES:
            raise ValueError(f"pipeline must be one of {', '.join(TABLES)}, got {self.pipeline!r}")
        for name in ("micro_batches", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"depth must be at least 1 batch in flight, got {self.depth}")
        if self.taper is not None and (len(self.taper) != self.micro_batches or min(self.taper) <= 0):
            raise ValueError(f"taper must be {self.micro_batches} positive sizes, got {self.taper}")
        if self.skip_fetch and self.pipeline not in ("dbp", "nestpipe"):
            raise ValueError(f"skip_fetch needs two buffers, which {self.pipeline} has not")

    @property
    def fractions(self) -> tuple[float, ...]:
        """(N,) each micro-batch's share of the batch."""
        sizes = self.taper or (1.0,) * self.micro_batches
        return tuple(size / sum(sizes) for size in sizes)

    def schedule(self) -> Schedule:
        """The table with this depth; with replicas, row gradients are summed over them before the update."""
        table = TABLES[self.pipeline]
        if self.replicas > 1:
            table = with_replica_reduce(table)
        return table if self.depth is None else replace(table, batches_in_flight=self.depth)

    def groups(self) -> dict[str, int]:
        """The collectives' groups, as `simulate` takes them; reductions span all workers."""
        if self.replicas == 1:
            return {}
        shards = dict.fromkeys(("routing_group", "retrieval_group", "communication_group"), self.replicas)
        return {**shards, "replica_group": -self.replicas}


def tapered(micro_batches: int, ends: float) -> tuple[float, ...]:
    """Sizes of a window whose first and last micro-batches are `ends` times as large as the others."""
    return (ends, *(1.0,) * (micro_batches - 2), ends)[:micro_batches]


def with_replica_reduce(table: Schedule) -> Schedule:
    """The table with an all-reduce of the rows' gradients over the replicas (2D sparse parallelism)."""
    reduce = Stage(
        "replica_reduce",
        "communication",
        (Edge("gradient_exchange", "all"),),
        (Access("update", "replica_group"), Access("update", "row_gradient", per="batch")),
    )
    place = [stage.name for stage in table.stages].index("sparse_update")
    stages: Sequence[Stage] = (*table.stages[:place], reduce, *table.stages[place:])
    return replace(table, stages=tuple(stages)).with_edges("sparse_update", Edge("replica_reduce"))
