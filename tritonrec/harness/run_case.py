"""One case of the contract table, on one rank: run the mode, compare every step with the reference."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..data import NextItemLoader
from ..distributed import Communicators
from ..embedding import OptimizerName
from ..pipeline import SCHEDULES, Task, Trainer, Window, WindowConfig, WindowProgram
from ..trace import SupportsRecording
from .cases import Case
from .mutations import Plant, plant
from .setup import Job
from .state import Comparison, Difference, State, dense_state, loss_state, table_state

MAX_DELAY = 0.004
"""Seconds; longer than a stage of the harness's small job, so that random waits reorder the lanes."""


@dataclass(frozen=True)
class RankReport:
    """What one rank found."""

    first_difference: Difference | None
    tensors_compared: int
    bytes_compared: int
    seconds: float


def reference_file(directory: str, optimizer: OptimizerName, data: str = "") -> str:
    return os.path.join(directory, f"synchronous-{optimizer}{'-hostile' if data else ''}.safetensors")


def record_reference(job: Job, optimizer: OptimizerName, steps: int, directory: str, data: str = "") -> None:
    """Run `Synchronous` and store its state after every step; the file is replaced whole."""
    job = job.on(data)
    model, table, rule, dense = job.build(optimizer)
    loader = job.loader()
    states: dict[str, torch.Tensor] = {}
    with Trainer(
        model, table, rule, dense, Communicators.local(), "sync", WindowConfig(seed=job.seed)
    ) as trainer:
        for step in range(steps):
            result = trainer.step(loader.batch(step))
            state = {
                **loss_state(result.sample_ids, result.losses), **dense_state(dense), **table_state(table)
            }  # fmt: skip
            states.update({f"{step}/{name}": tensor for name, tensor in state.items()})
    path = Path(reference_file(directory, optimizer, data))
    save_file(states, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


class _Recorded(Mapping[str, torch.Tensor]):
    """One step of a reference file, read as it is asked for."""

    def __init__(self, file, step: int):
        self._file, self._step = file, step

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(f"{self._step}/{name}")

    def __iter__(self):
        prefix, names = f"{self._step}/", self._file.keys()
        return (name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def run_case(
    communicators: Communicators,
    job: Job,
    case: Case,
    references: str,
    mutation: str | None = None,
) -> RankReport:
    """Run `case` on this rank and compare losses, dense parameters and every row after every step.

    Args:
        references: directory of `record_reference`'s files.
        mutation: name of a bug to plant.
    """
    started = time.perf_counter()
    job = job.on(case.data)
    if case.consistency == "window":
        states = _in_turn(communicators, job, case)
        return _compared(communicators, job, case, states.__getitem__, started, mutation)
    with safe_open(reference_file(references, case.optimizer, case.data), "pt") as file:
        return _compared(communicators, job, case, lambda step: _Recorded(file, step), started, mutation)


def _in_turn(communicators: Communicators, job: Job, case: Case) -> list[State]:
    """States of the reference of ``"window"`` consistency, this rank's shard only."""
    in_turn = replace(case, mode="sequential", delay_seed=None)
    states: list[State] = []
    with prepared(communicators, job, in_turn) as (trainer, loader):
        program = trainer.program
        for step in range(case.steps):
            result = trainer.step(loader.batch(step))
            states.append({**loss_state(result.sample_ids, result.losses), **dense_state(program.dense),
                           **table_state(program.table)})  # fmt: skip
    return states


def _compared(
    communicators: Communicators,
    job: Job,
    case: Case,
    expected: Callable[[int], Mapping[str, torch.Tensor]],
    started: float,
    mutation: str | None,
) -> RankReport:
    planted = plant(mutation) if mutation else Plant()
    with prepared(communicators, job, case, planted=planted) as (trainer, loader):
        program = trainer.program
        comparison = Comparison(program.table, communicators.rank, communicators.world_size)
        last = case.steps - 1

        def after(stage: str, state: Callable[[WindowProgram], State]) -> None:
            action = program.actions[stage]

            def compared(window: Window, micro_batch: int | None = None) -> None:
                action(window, micro_batch)
                comparison.compare(
                    window.step, expected(window.step), state(program), final=window.step == last
                )

            program.actions[stage] = compared

        # On the lanes themselves, so that the pipeline goes on running while a step is compared.
        after("dense_update", lambda program: dense_state(program.dense))
        after("write_back", lambda program: table_state(program.table))
        for result in trainer.run(loader.batch(step) for step in range(case.steps)):
            losses = loss_state(result.sample_ids, result.losses)
            comparison.compare(result.step, expected(result.step), losses, final=False)
    missing = {(s, p) for s in range(case.steps) for p in ("loss", "dense", "table")} - comparison.steps_seen
    if missing:
        raise RuntimeError(f"{case}: never compared {sorted(missing)}; a proof that was skipped has failed")
    seconds = time.perf_counter() - started
    return RankReport(comparison.first, comparison.tensors_compared, comparison.bytes_compared, seconds)


@contextmanager
def prepared(
    communicators: Communicators,
    job: Job,
    case: Case,
    recorder: SupportsRecording | None = None,
    planted: Plant | None = None,
) -> Iterator[tuple[Trainer, NextItemLoader]]:
    """A fresh trainer for `case` and this rank's loader; the trainer is closed on the way out."""
    planted = planted or Plant()
    model, table, rule, dense = job.build(case.optimizer)
    config = WindowConfig(case.micro_batches, case.consistency, case.clustering, seed=job.seed)
    schedule = SCHEDULES.get(case.mode)
    if schedule is not None and planted.schedule is not None:
        schedule = planted.schedule(schedule)
    delay = planted.delay or _delays(case, communicators.rank)
    with Trainer(
        model, table, rule, dense, communicators, case.mode, config, recorder, delay, schedule,
        checked=planted.schedule is None,
    ) as trainer:  # fmt: skip
        if planted.program is not None:
            planted.program(trainer.program)
        yield trainer, job.loader(communicators.rank, communicators.world_size)


def _delays(case: Case, rank: int) -> Callable[[Task], float] | None:
    """Waits drawn from (seed, rank, task): the same for a case each time, different for every task."""
    if case.delay_seed is None:
        return None
    seed = case.delay_seed

    def delay(task: Task) -> float:
        return Random(f"{seed}/{rank}/{task}").random() * MAX_DELAY

    return delay
