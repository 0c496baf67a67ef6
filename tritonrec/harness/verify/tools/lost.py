"""A case of which a rank is killed in the middle of a step, and the others go on without it."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch

from ....data import Batch
from ....distributed import Communicators
from ....pipeline import Window
from ....resilience import ElasticPool, PeerCopies
from ...job import Job
from ..cases import Case
from ..faults import case, fault
from ..run_case import RankReport, Stretch, run_case
from ..state import Comparison, earliest
from ..variants import MADE, POLICIES, SMALL, Run, Variant, add_variants

VICTIM, LOST_AT = 1, 5
"""The rank that is killed, and the step that it never finishes."""
COPY_EVERY = 2
"""Steps between copies in memory."""


@dataclass
class Memory:
    """What a rank remembers from one call of `run_losing` to the next."""

    copies: PeerCopies = field(default_factory=PeerCopies)
    comparisons: list[Comparison] = field(default_factory=list)


def on_ranks(
    job: Job, case: Case, references: str, fault: str | None, timeout: timedelta
) -> list[RankReport]:
    """Run `case` on processes that go on without one of them."""
    with ElasticPool(case.world_size, timeout, case.replicas, min_ranks=case.world_size - 1) as pool:
        return pool.run(run_losing, job, case, references, fault, Memory())


def run_losing(
    communicators: Communicators, job: Job, case: Case, references: str, fault: str | None, memory: Memory
) -> RankReport:
    """As `run_case`, called by `run_elastic`: rank `VICTIM` is killed in the first call, and the others go
    on from their copies in the second one. Counts are of the second.
    """
    stretch = Stretch(0, case.steps, memory=memory)
    report = run_case(communicators, job, case, references, fault, stretch)
    return replace(report, first_difference=earliest([each.first for each in memory.comparisons]))


def going_on(run: Run) -> Iterator[Sequence[Batch]]:
    """The batches from the newest copy on. A fault's tool changes the copies in the rank's memory."""
    memory, tables = run.memory, run.trainer.program.tables
    if not memory.comparisons:
        warnings.filterwarnings("ignore", "lost rank")  # of `run_elastic`, as it should be
        if run.injected:
            run.injected(memory.copies)
        if run.trainer.communicators.rank == VICTIM:
            run.trainer.program.before("compute", _die)
    memory.comparisons.append(run.comparison)
    run.steps = range(memory.copies.restore(run.trainer), run.steps.stop)
    run.counts["restored"] = sum(len(group.table) for group in tables.groups)
    return _kept_between(run)


def _die(window: Window) -> None:
    if window.step == LOST_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def _kept_between(run: Run) -> Iterator[Sequence[Batch]]:
    """The batches in parts, after each of which a copy is kept."""
    for first in range(0, len(run.steps), COPY_EVERY):
        yield [run.loader.batch(step) for step in run.steps[first : first + COPY_EVERY]]
        run.memory.copies.keep(run.trainer)


Parts = dict[int, dict[str, dict[str, torch.Tensor]]]
"""By shard, table and column what a copy holds, the rank's own shard first."""


def _parts_restored(copies: PeerCopies, change: Callable[[list[Parts]], Parts]) -> None:
    """Change the newest copy's parts, which `change` makes of those of all copies, before it is restored."""
    restore: Any = copies.restore

    def changed(*arguments: Any) -> int:
        if copies._copies:
            parts = change([copy.parts for copy in copies._copies])
            copies._copies.append(replace(copies._copies.pop(), parts=parts))
        return restore(*arguments)

    copies.restore = changed  # type: ignore[method-assign, assignment]


def _columns(parts: Parts, change: Callable[[str, str, torch.Tensor], torch.Tensor]) -> Parts:
    return {
        shard: {
            table: {name: change(table, name, column) for name, column in columns.items()}
            for table, columns in tables.items()
        }
        for shard, tables in parts.items()
    }


add_variants(
    {
        "lost-rank": Variant(
            "rank 1 is killed in a step, and the others go on from the copies in their memory",
            {**SMALL, "data": MADE, "policy": POLICIES},
            shows=("rejected", "restored"),
            tool=going_on,
            on_ranks=on_ranks,
            alone=True,
        ),
    },
    before="restart",
)


@fault(case(world_size=3, variant="lost-rank", steps=6), of="tool")
def copy_one_keep_late(copies: PeerCopies) -> None:
    """After the loss of a rank, rows come from the copy before the newest."""
    _parts_restored(copies, lambda parts: parts[0])


@fault(case(world_size=3, variant="lost-rank", steps=6), of="tool")
def copy_of_the_wrong_rank(copies: PeerCopies) -> None:
    """A copy has the keys of the neighbour's shard and rows of the rank's own."""

    def mixed(parts: list[Parts]) -> Parts:
        own, *_ = parts[-1].values()

        def of_own(table: str, name: str, column: torch.Tensor) -> torch.Tensor:
            rows = own[table][name].repeat_interleave(2, 0)  # the neighbour may have more
            return column if name == "keys" else rows[: len(column)]

        return _columns(parts[-1], of_own)

    _parts_restored(copies, mixed)


@fault(case(world_size=3, variant="lost-rank", steps=6), of="tool")
def copy_without_a_key(copies: PeerCopies) -> None:
    """The first row of a shard is missing in a copy."""
    _parts_restored(copies, lambda parts: _columns(parts[-1], lambda table, name, column: column[1:]))
