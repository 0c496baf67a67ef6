"""Memory, time and bytes of a whole run, from the trial of its first steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from ...capacity import Room, memory_left
from ...capacity.footprint import (
    LAST_STEPS_BYTES,
    METADATA_BYTES,
    PASS_BYTES,
    WAITING_BYTES,
    WAITING_SAVED,
)
from ...embedding.candidates import Candidates
from ...embedding.key_index import KeyIndex
from ...embedding.policy import ROW_BYTES
from ...settings import in_bytes
from ..train.run import Run
from .trial import Rank

COUNT_SECONDS = 20.0
PLACE_BYTES = 8
"""Of a row on disk: its place in memory, while these double."""
CACHED_BYTES = 11
"""Of a row in memory before a disk, beside its values and place (`tritonrec.embedding.cached_storage`)."""
EVICTED_BYTES = 32
"""Of a key in a structure that is 3/8 full."""


@dataclass(frozen=True)
class Counted:
    """Rows of each table, over all ranks, that a run of so many steps looks up.

    Args:
        rows: at its end. waiting: keys at most that wait for a row, of those counted. logical: tables.
        steps: whose batches were counted; beyond them rows go on growing as over the second half of these, by
            a power of the steps.
    """

    rows: list[int]
    steps: int
    waiting: list[int] = field(default_factory=list)
    logical: int = 1


def count_rows(run: Run, seconds: float = COUNT_SECONDS) -> Counted:
    """Read batches of the run for `seconds` at most, without training; admission delays rows, and capacities
    of eviction bound them.
    """
    tables, loader = run.job.tables(run.optimizer), run.job.loader()
    indices = [KeyIndex() for _ in tables.groups]
    policies = [group.table.policy for group in tables.groups]
    candidates = [Candidates(each.admission, each.admission_window, 1024) for each in policies]
    waiting = [0] * len(indices)
    counts: list[list[int]] = []
    began = time.monotonic()
    while len(counts) < run.steps and (not counts or time.monotonic() - began < seconds):
        step = len(counts)
        for number, keys in enumerate(tables.keys(loader.batch(step).lookups())):
            index, new = indices[number], keys.unique()
            if policies[number].admission > 1:
                candidates[number].forget(step)
                new = new[index.find(new) < 0]
                new = candidates[number].count(new, step).take(new)
                waiting[number] = max(waiting[number], len(candidates[number]))
            index.find_or_insert(new)
        counts.append([len(index) for index in indices])
    steps = len(counts)
    rows = []
    for group, seen in zip(tables.groups, zip(*counts, strict=True), strict=True):
        now, half = seen[-1], seen[max(steps // 2 - 1, 0)]
        if steps < run.steps:
            power = math.log(now / half, steps / max(steps // 2, 1)) if half and steps > 1 else 1.0
            now = int(now * (run.steps / steps) ** power)
        eviction = group.table.policy.eviction
        capacity = eviction and eviction.rows_of(group.table.row_width)
        if capacity:
            now = min(now, capacity * len(group.layout.names) + max(seen[:2]))
        rows.append(now)
    return Counted(rows, steps, waiting, sum(len(group.layout.names) for group in tables.groups))


@dataclass(frozen=True)
class Need:
    """Bytes of one rank's process at the end of the run.

    Args:
        process: libraries, log. dense: the dense model with the states of its optimizer.
        work: windows in flight, activations. rows: weights. states: of their update rule.
        keys: with scores and counts. doubling: of the key structure, for a while. evaluation, saving: what
            these take beyond training.
        peak: at most at one time.
    """

    process: int
    dense: int
    work: int
    rows: int
    states: int
    keys: int
    doubling: int
    evaluation: int
    saving: int
    peak: int

    @property
    def values(self) -> int:
        """Of rows with their states."""
        return self.rows + self.states

    @property
    def tables(self) -> int:
        """What goes by rows."""
        return self.values + self.keys + self.doubling


@dataclass(frozen=True)
class Forecast:
    """Of a run whose ranks are all on this machine.

    Args:
        ranks: what each needs. room: bytes that the machine has for all of them.
        rows: of all tables and ranks at the end. steps, steps_counted: of the run, and see `Counted`.
        step_seconds, seconds: of a step, and of all with evaluations and saves, beyond the start.
        link_bytes: sent by a rank in a step. disk_read, disk_written: bytes of rows on disk, as well.
        checkpoint: bytes of a whole one. merged: tables that each rank has a part of. replicas: of
            these. logical: tables in all of these, which policies bound one by one.
    """

    ranks: list[Need]
    room: Room
    rows: int
    steps: int
    steps_counted: int
    step_seconds: float
    seconds: float
    link_bytes: float
    disk_read: float
    disk_written: float
    checkpoint: int
    merged: int = 1
    replicas: int = 1
    logical: int = 1

    @property
    def lacking(self) -> int:
        """Bytes that the machine lacks; not positive where all fits."""
        return sum(rank.peak for rank in self.ranks) - self.room.left

    def advice(self) -> list[str]:
        """What would make it fit; empty where it does."""
        if self.lacking <= 0:
            return []
        tables = sum(rank.tables for rank in self.ranks)
        rest = sum(rank.peak for rank in self.ranks) - tables
        left = self.room.left - rest
        work = sum(rank.work for rank in self.ranks)
        if left <= 0:
            share = max(work + left, 0) / max(work, 1)
            ranks = self.room.left // max(-(-rest // len(self.ranks)), 1)
            smaller = (
                f"at most {share:.0%} of this batch (--batch-size)" if share else "no batch is small enough"
            )
            fewer = f"at most {ranks} ranks here" if ranks else "a larger machine: one rank does not fit"
            return [
                f"{in_bytes(rest)} of it are no tables; {in_bytes(work)} of these, windows in flight and "
                f"activations, go by the batch: {smaller}, more micro-batches (--micro-batches), or {fewer}"
            ]
        machines, rows = -(-tables // left), max(self.rows * self.replicas, 1)
        values = sum(rank.values for rank in self.ranks)
        half, keys, row = values // 2, tables - values, max(values // rows, 1)
        evicting = EVICTED_BYTES + METADATA_BYTES + LAST_STEPS_BYTES + PASS_BYTES
        kept = left // (row + evicting) * (row + ROW_BYTES) // self.replicas // self.logical
        passing = (METADATA_BYTES + PASS_BYTES) * rows + keys // 2
        size = ((left - keys - passing) // self.replicas + ROW_BYTES * self.rows) // self.logical >> 20
        places, cached = PLACE_BYTES * rows, row / (row + CACHED_BYTES)

        def in_memory(free: int) -> int:
            """Of `--disk-memory`, which each rank has for each of its tables."""
            return int(free * cached) // (len(self.ranks) * self.merged)

        memory = in_memory(left - keys - keys // 2 - places)  # keys may double where rows no longer grow
        share = memory * len(self.ranks) * self.merged / max(values, 1)
        disk = f"--disk-memory {memory >> 20}MiB, {share:.0%} of the rows in memory, the others in a file"
        if memory < 1 << 20:
            memory = in_memory(left - places)
            disk = f"{in_bytes(keys)} of keys alone do not fit"
            if memory < 1 << 20:
                disk += f", nor do {in_bytes(places)} of places of rows where keys are on disk, too"
            else:
                disk = f"--disk-memory {memory >> 20}MiB --disk-index-memory 1MiB, for {disk}"
        copies = [count for count in range(1, self.replicas) if self.replicas % count == 0]
        copies = [count for count in copies if tables * count <= left * self.replicas][-1:]
        return [
            *(f"--replicas {count}: one takes {in_bytes(tables // self.replicas)}" for count in copies),
            f"tables on {machines} machines of {len(self.ranks)} ranks each",
            f"--evict lru:{kept >> 20}MiB, which keeps the rows used last",
            f"--storage disk: {disk}",
            f"--precision-tiers {max(size, 1)}MiB:100, which stores the rows used least in 16 bits: up to "
            f"{in_bytes(half)} less, and {in_bytes(passing)} more while it chooses"
            + ("" if half - passing >= self.lacking else ", not enough alone"),
        ]


def forecast(
    run: Run, ranks: list[Rank], counted: Counted, room: Room | None = None, replicas: int = 1
) -> Forecast:
    """Of a run from what a trial found on each of its ranks; `replicas` copies of the tables share them."""
    needs = [_need(run, rank, counted, len(ranks) // replicas) for rank in ranks]
    evaluations, saves = _count(run.steps, run.evaluate_every), _count(run.steps, run.save_every)
    beside = max(
        rank.evaluation_seconds * evaluations + rank.save_seconds * saves * bool(run.checkpoint)
        for rank in ranks
    )
    step = max(rank.step_seconds for rank in ranks)
    tables = zip(counted.rows, ranks[0].tables, strict=True)
    return Forecast(
        needs, room or memory_left(), sum(counted.rows), run.steps, counted.steps, step,
        run.steps * step + beside, max(rank.link_bytes for rank in ranks),
        max(rank.disk_read for rank in ranks), max(rank.disk_written for rank in ranks),
        ranks[0].dense_bytes + sum(rows * (table.row_bytes + 8) for rows, table in tables),
        len(counted.rows), replicas, max(counted.logical, len(counted.rows)),
    )  # fmt: skip


def _need(run: Run, rank: Rank, counted: Counted, shards: int) -> Need:
    """Of a rank that has one of so many equal shards of the rows."""
    tables = [table.shard(shards) for table in rank.tables]
    at_the_end = [
        (table, max(-(-rows // shards) - table.rows, 0))
        for rows, table in zip(counted.rows, tables, strict=True)
    ]
    waits = [-(-count // shards) for count in counted.waiting]
    waiting = max(WAITING_BYTES * sum(waits) - sum(table.waiting for table in tables), 0)
    had = sum(table.values(table.rows) + table.keys + table.metadata + table.waiting for table in tables)
    added = sum(table.added(more, at_peak=False) for table, more in at_the_end) + waiting
    peak = sum(table.added(more) for table, more in at_the_end) + waiting
    values = sum(table.values(table.rows + more) for table, more in at_the_end)
    weights = sum(table.weights(table.rows + more) for table, more in at_the_end)
    training = rank.trained + peak
    evaluating = rank.evaluated + added
    saving = (
        rank.saved
        + added
        + sum(table.saving(table.rows + more) - table.saving(table.rows) for table, more in at_the_end)
    )
    saving += WAITING_SAVED * waiting // WAITING_BYTES
    highest = max(training, evaluating, saving if run.checkpoint else 0)
    return Need(
        process=rank.began - rank.dense_began,
        dense=rank.dense_bytes,
        work=max(rank.trained - rank.began - had - rank.dense_bytes + rank.dense_began, 0),
        rows=weights,
        states=values - weights,
        keys=had + added - values,
        doubling=peak - added,
        evaluation=max(evaluating - training, 0),
        saving=max(saving - training, 0) if run.checkpoint else 0,
        peak=highest,
    )


def _count(steps: int, every: int) -> int:
    """Times in a run of `steps` that something comes `every` so many, and at the end."""
    return -(-steps // every) if every else 1
