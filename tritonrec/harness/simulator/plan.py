"""How a step is scheduled: a table, and the switches on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from tritonrec.data import tapered
from tritonrec.pipeline.schedule import (
    DBP,
    FWP,
    NESTPIPE,
    SEQUENTIAL,
    Edge,
    Schedule,
    keep_rows,
    with_replicas,
)

Pipeline = Literal["sequential", "prefetch", "dbp", "fwp", "nestpipe"]

TABLES: dict[str, Schedule] = {
    "sequential": SEQUENTIAL,
    # Lookups of later batches overlap, and nobody makes their rows fresh: stale, so the check rejects it.
    "prefetch": replace(DBP.without_stage("copy_kept_rows", instead="retrieve"), name="prefetch"),
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
        taper: ratio of a micro-batch's size to its neighbour's nearer to the middle; 1: all alike.
        first_use: each row is sent for the first micro-batch that uses it, each gradient after the last.
        skip_fetch: rows that the next batch uses too are neither written back nor fetched.
    """

    pipeline: Pipeline = "nestpipe"
    micro_batches: int = 1
    depth: int | None = None
    replicas: int = 1
    clustered: bool = False
    taper: float = 1.0
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
        if not 0 < self.taper <= 1:
            raise ValueError(f"taper is a ratio of sizes in (0, 1], got {self.taper}")
        if self.skip_fetch and not TABLES[self.pipeline].dual_buffer:
            raise ValueError(f"skip_fetch needs two buffers, which {self.pipeline} has not")
        if self.skip_fetch and self.depth == 1:
            raise ValueError("skip_fetch keeps rows for the next batch, which depth 1 does not read ahead")

    @property
    def fractions(self) -> tuple[float, ...]:
        """(N,) each micro-batch's share of the batch."""
        return tuple(tapered(self.micro_batches, self.taper).tolist())

    def schedule(self) -> Schedule:
        """The table with this depth and these switches."""
        table = TABLES[self.pipeline]
        if self.skip_fetch:
            table = keep_rows(table)
        if self.replicas > 1:
            table = with_replicas(table)
        if not table.concurrent:
            table = one_after_another(table)
        return table if self.depth is None else replace(table, batches_in_flight=self.depth)

    def groups(self) -> dict[str, int]:
        """The collectives' groups, as `simulate` takes them; reductions span all workers."""
        if self.replicas == 1:
            return {}
        shards = dict.fromkeys(("routing_group", "retrieval_group", "communication_group"), self.replicas)
        return {**shards, "replica_group": -self.replicas, "replica_routing_group": -self.replicas}


def one_after_another(table: Schedule) -> Schedule:
    """The table with every stage waiting for the one before it, micro-batch by micro-batch."""
    window = [stage.name for stage in table.stages if stage.per_micro_batch]
    serial = table.with_edges(window[0], Edge(window[-1], "previous"))
    for before, stage in pairwise(table.stages):
        if not before.per_micro_batch:
            edge = Edge(before.name)
        else:
            edge = Edge(before.name, "same" if stage.per_micro_batch else "all")
        serial = serial.with_edges(stage.name, edge)
    return serial
