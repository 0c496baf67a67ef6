"""A few steps of a run on all of its ranks, with memory and time measured on each."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...capacity import Sizes, peak_bytes, resident_bytes, sizes_of
from ...distributed import Communicators
from ...kernels.compilation import compiling
from ...pipeline import Trainer
from ..devices import kernels_of
from ..progress import Pace
from ..train.evaluate import baseline, evaluate_model
from ..train.run import Run

WARMING_STEPS = 3
"""Steps at first that are not timed: they compile kernels, fill the pipeline and find the model's path."""
FEWEST, MOST, SECONDS = 12, 100, 20.0
"""Steps of a trial: as many as these seconds hold. Buffers of windows in flight grow to their full size only
while lanes meet by chance, over some hundred steps.
"""


@dataclass
class Rank:
    """What a rank's process took. Bytes are resident.

    Args:
        began: before its first step, with libraries, log and dense model. trained: at most while it trained,
            with `rows` by table. evaluated, saved: at most in an evaluation and a save; 0 without one.
        tables: `Sizes` of each table after the steps. dense_bytes: of parameters and optimizer states;
            dense_began: of these before the first step.
        step_seconds, evaluation_seconds, save_seconds: time. link_bytes: sent a step.
        disk_read, disk_written: of rows on disk, a step.
        compiled: whether a compiler's memory and time are among them.
    """

    began: int = 0
    trained: int = 0
    evaluated: int = 0
    saved: int = 0
    tables: list[Sizes] = field(default_factory=list)
    dense_bytes: int = 0
    dense_began: int = 0
    step_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    save_seconds: float = 0.0
    link_bytes: float = 0.0
    disk_read: float = 0.0
    disk_written: float = 0.0
    compiled: bool = False


def trial(communicators: Communicators, run: Run, steps: int | None = None) -> dict[str, Any]:
    """`Rank` of this rank as plain values: some steps, an evaluation, and a save if the run saves.

    `steps` are as many as `SECONDS` hold by default. Collective.
    """
    job, found = run.job, Rank()

    def note() -> None:
        found.compiled = True

    compiling.append(note)
    model, tables, optimizer = job.build(run.optimizer)
    loader, held_out = job.loader(communicators.rank, communicators.world_size), job.epochs()
    with (
        kernels_of(job.target),
        Trainer(
            model, tables, optimizer, communicators, run.mode, run.window, trust_model=run.trust_model,
            **job.recipe(model, optimizer), **vars(job.target),
        ) as trainer,
    ):  # fmt: skip
        found.began = resident_bytes()
        found.dense_began = sum(each.nbytes for each in trainer.dense.tensors().values())
        ends: list[float] = []
        with _highest() as trained:
            for _ in trainer.run(loader.batch(step) for step in range(min(steps or FEWEST, run.steps))):
                ends.append(time.perf_counter())
            if steps is None:
                for _ in trainer.run(map(loader.batch, _more(communicators, run, ends))):
                    ends.append(time.perf_counter())
        found.step_seconds = _pace_of(ends, run.window.accumulate)
        sent = trainer.counts
        found.link_bytes = (sent.key_bytes + sent.row_bytes) / len(ends)  # of this rank
        found.trained, found.tables = trained[0], [sizes_of(group.table) for group in tables.groups]
        for size, group in zip(found.tables, tables.groups, strict=True):
            moved = group.table.counters
            found.disk_read += moved.disk_read * size.row_bytes / len(ends)
            found.disk_written += moved.disk_written * size.row_bytes / len(ends)
        found.dense_bytes = sum(each.nbytes for each in trainer.dense.tensors().values())
        began = time.perf_counter()
        with _highest() as evaluated:
            evaluate_model(trainer.dense.evaluated, trainer.rows_of_ranks(), held_out, run.window.precision)
            baseline(held_out)
        found.evaluated, found.evaluation_seconds = evaluated[0], time.perf_counter() - began
        if run.checkpoint:
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder, _highest() as saved:
                name = communicators.control.all_gather_texts(folder)[0]
                trainer.save(Path(name))
            found.saved, found.save_seconds = saved[0], time.perf_counter() - began
    if note in compiling:
        compiling.remove(note)
    return asdict(found)


def trials(communicators: Communicators, run: Run, steps: int | None = None) -> dict[str, Any]:
    """`trial` of every rank, under the key ``"ranks"``. Collective."""
    if communicators.machines > 1:
        raise ValueError("plan tries a run on one machine: start all ranks on it")
    own = json.dumps(trial(communicators, run, steps))
    return {"ranks": [json.loads(each) for each in communicators.control.all_gather_texts(own)]}


def _pace_of(ends: list[float], accumulate: int) -> float:
    """Seconds of a step, as a run says them of its own (`Pace`); of few steps the mean."""
    first, pace = min(WARMING_STEPS, len(ends) - 1), Pace(accumulate)
    for step in range(max(first, 1), len(ends)):
        pace.on_step_end(step, ends[step] - ends[step - 1], step == len(ends) - 1)
    return pace.seconds_per_step or (ends[-1] - ends[first - 1]) / max(len(ends) - first, 1) * (first > 0)


def _more(communicators: Communicators, run: Run, ends: list[float]) -> range:
    """Further steps, the same on all ranks, from the times at which a rank's first ones ended."""
    warm = min(WARMING_STEPS, len(ends) - 1)
    own = (ends[-1] - ends[warm]) / max(len(ends) - 1 - warm, 1)
    slowest = max(float(text) for text in communicators.control.all_gather_texts(repr(own)))
    most = min(run.steps, MOST, FEWEST + int(SECONDS / max(slowest, 1e-6)))
    return range(len(ends), most)


@contextmanager
def _highest() -> Iterator[list[int]]:
    """Around a phase: the first item becomes the most bytes that were resident in it."""
    most = [0]
    with suppress(OSError):  # where that is forbidden, the most since the process began is a bound
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5): begin VmHWM anew
    yield most
    most[0] = peak_bytes()
