"""A case of which a rank is killed in the middle of a step, and the others go on without it."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from ...data import Batch
from ...distributed import Communicators
from ...pipeline import Trainer, Window
from ...resilience import PeerCopies
from ..devices import kernels_of
from ..job import Job
from .cases import Case
from .corpus import injection_of
from .injections import Injection
from .run_case import RankReport, Recorded, compare_run, prepared, require_compared
from .state import Comparison, earliest

VICTIM, LOST_AT = 1, 5
"""The rank that is killed, and the step that it never finishes."""
COPY_EVERY = 2
"""Steps between copies in memory."""


@dataclass
class Memory:
    """What a rank remembers from one call of `run_losing` to the next."""

    copies: PeerCopies = field(default_factory=PeerCopies)
    comparisons: list[Comparison] = field(default_factory=list)


def run_losing(
    communicators: Communicators, job: Job, case: Case, references: str, fault: str | None, memory: Memory
) -> RankReport:
    """As `run_case`, called by `run_elastic`: rank `VICTIM` is killed in the first call, and the others go
    on from their copies in the second one. Counts are of the second.
    """
    started, first = time.perf_counter(), not memory.comparisons
    injected = injection_of(fault) if fault else Injection()
    if first and injected.copies is not None:
        injected.copies(memory.copies)
    warnings.filterwarnings("ignore", "lost rank")  # of `run_elastic`, as it should be
    with ExitStack() as stack:
        stack.enter_context(kernels_of(job.target))
        file = stack.enter_context(safe_open(Path(references, case.reference(job).file_name), "pt"))
        trainer, loader = stack.enter_context(prepared(communicators, job, case, injected=injected))
        tables = trainer.program.tables
        comparison = Comparison(tables, communicators.shard, communicators.shards)
        memory.comparisons.append(comparison)
        if first and communicators.rank == VICTIM:
            trainer.program.before("compute", _die)
        start = memory.copies.restore(trainer)
        restored = sum(len(group.table) for group in tables.groups)
        batches = [loader.batch(step) for step in range(start, case.steps)]
        compare_run(
            trainer,
            _kept_between(trainer, batches, memory.copies),
            comparison,
            lambda step: Recorded(file, step),
            case.steps - 1,
        )
        require_compared(case, comparison, range(start, case.steps))
    counts = Counter(vars(trainer.counts))
    for group in tables.groups:
        counts.update(vars(group.table.counters))
    counts["restored"] = restored
    difference = earliest([each.first for each in memory.comparisons])
    seconds = time.perf_counter() - started
    return RankReport(
        difference, comparison.tensors_compared, comparison.bytes_compared, seconds, dict(counts)
    )


def _die(window: Window) -> None:
    if window.step == LOST_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def _kept_between(
    trainer: Trainer, batches: Sequence[Batch], copies: PeerCopies
) -> Iterator[Sequence[Batch]]:
    """`batches` in parts, after each of which a copy is kept."""
    for first in range(0, len(batches), COPY_EVERY):
        yield batches[first : first + COPY_EVERY]
        copies.keep(trainer)
