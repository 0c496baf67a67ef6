"""One setting of a lab: run it on every rank, keep its trace, its losses and its counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from ...distributed import Communicators, RankPool
from ...distributed.machine import machine
from ...embedding import OptimizerName
from ...files.places import place_of
from ...pipeline import Trainer
from ...trace import Recorder, save_joined
from ..job import Job
from ..network import LabError, sent_bytes
from .settings import Emulation, Setting

OPTIMIZER: OptimizerName = "adam"
TOLERANCE = 1e-4
"""Relative, of losses whose gradients were added in float32 in another order."""

Losses = dict[int, tuple[np.ndarray, np.ndarray]]
"""step -> sample ids ascending (B,) int64, losses (B,) float32."""


@dataclass(frozen=True)
class RankRun:
    """The results of one rank: its losses by step, `LookupCounts` as a dict, emulated tasks.

    `machine` is where it ran, whose link has `sent` so many bytes in all, before and after.
    """

    losses: Losses
    counts: dict[str, int]
    tasks: int
    overruns: int
    machine: str
    sent: tuple[int, int]


@dataclass(frozen=True)
class LabRun:
    """One setting, run once by all ranks."""

    setting: Setting
    steps: int
    trace: Path
    losses: Losses
    counts: dict[str, int]
    tasks: int
    overruns: int
    link_bytes: float = 0.0  # that left a machine, mean over the machines


def run_rank(
    communicators: Communicators,
    job: Job,
    setting: Setting,
    seconds: Mapping[str, float],
    steps: int,
    path: str,
) -> RankRun:
    """Train `steps` steps on this rank from the job's beginning; the rank's trace goes to `path`.RANK."""
    model, tables, optimizer = job.build(OPTIMIZER)
    recorder = Recorder(communicators.rank, communicators.world_size)
    loader = job.loader(communicators.rank, communicators.world_size)
    batches = [loader.batch(step) for step in range(steps)]
    emulation, losses = Emulation(seconds), {}
    window = setting.window(job.seed)
    with Trainer(model, tables, optimizer, communicators, setting.mode, window, recorder) as trainer:
        emulation.install(trainer.program)
        communicators.control.all_reduce(torch.zeros(1, dtype=torch.float32), "start together")
        before = sent_bytes()
        for result in trainer.run(batches):
            losses[result.step] = (result.sample_ids.numpy(), result.losses.numpy())
    recorder.save(f"{path}.{communicators.rank}")
    sent = before, sent_bytes()
    return RankRun(losses, vars(trainer.counts), emulation.tasks, emulation.overruns, machine(), sent)


def run_once(
    pool: RankPool,
    ranks: int,
    job: Job,
    setting: Setting,
    seconds: Mapping[str, float],
    steps: int,
    path: Path,
) -> LabRun:
    """Run a setting on all ranks of the pool; its joined trace goes to `path`."""
    args = job, setting, seconds, steps, str(path)
    mesh = {"replicas": setting.replicas, "nodes": setting.nodes}
    homes: list[RankRun] = pool.run(run_rank, ranks, *args, **mesh)
    parts = [f"{path}.{rank}" for rank in range(ranks)]
    save_joined(parts, path)
    for part in parts:
        place_of(part).unlink()
    losses = {}
    for step in range(steps):
        ids, values = (np.concatenate([home.losses[step][which] for home in homes]) for which in (0, 1))
        order = np.argsort(ids, kind="stable")
        losses[step] = (ids[order], values[order])
    counts = {name: sum(home.counts[name] for home in homes) for name in homes[0].counts}
    tasks, overruns = sum(home.tasks for home in homes), sum(home.overruns for home in homes)
    links = [[home.sent for home in homes if home.machine == each] for each in {h.machine for h in homes}]
    sent = mean(max(after for _, after in link) - min(before for before, _ in link) for link in links)
    return LabRun(setting, steps, path, losses, counts, tasks, overruns, sent)


def compare_losses(run: LabRun, reference: LabRun, tolerance: float) -> str:
    """How the losses agree, in words; a `LabError` naming the first place where they do not.

    Args:
        tolerance: of relative differences. 0 demands the same bits; infinity, for approximate runs, demands
            finite losses and tells how far they are.
    """
    if run.losses.keys() != reference.losses.keys() or not run.losses:
        raise LabError(f"{run.setting} finished steps {sorted(run.losses)}, not {sorted(reference.losses)}")
    worst = 0.0
    for step, (expected_ids, expected) in reference.losses.items():
        ids, values = run.losses[step]
        if not np.array_equal(ids, expected_ids):
            raise LabError(f"{run.setting}, step {step}: other samples than {reference.setting}")
        same = values.view(np.int32) == expected.view(np.int32)
        if tolerance:
            difference = np.abs(values - expected) / np.maximum(np.abs(expected), 1e-30)
            worst = max(worst, float(difference.max(initial=0)))
            same = np.isfinite(difference) & (difference <= tolerance)
        if not same.all():
            at = int(np.flatnonzero(~same)[0])
            raise LabError(
                f"{run.setting}, step {step}, sample {ids[at]}: loss {values[at]!r}, but {expected[at]!r} in "
                f"{reference.setting}; no figure is printed"
            )
    if not tolerance:
        return "identical"
    if tolerance < np.inf:
        return f"within {worst:.0e}"
    last = max(reference.losses)
    means = [float(each.losses[last][1].astype(np.float64).mean()) for each in (run, reference)]
    return f"APPROXIMATE, within {worst:.1%} a sample and {means[0] / means[1] - 1:+.2%} in the last mean"
