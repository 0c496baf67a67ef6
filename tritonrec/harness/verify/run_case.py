"""One case of the contract table, on one rank: run the mode, compare every step with the reference."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ... import ops
from ...data import Batch, DynamicStream, JaggedBatch, Lookup, Stream
from ...distributed import Communicator, Communicators
from ...embedding import TablePolicy
from ...files import atomic_write
from ...pipeline import Task, Trainer, Window, WindowConfig, WindowPlaces, schedule_of
from ...pipeline.places import Buffer, KeptRows, OwnedRows
from ...pipeline.stage import Previous, Read
from ...settings import with_values
from ...trace import SupportsRecording
from ..devices import kernels_of
from ..job import Job, Loader
from .cases import Case, Reference
from .faults import Injection, injection_of
from .jobs import wrap
from .own_code import OwnLoop
from .state import Comparison, Difference, State, dense_state, loss_state, overlay, table_state, used_state
from .variants import Expected, Run


@dataclass(frozen=True)
class Stretch:
    """Steps [first, last) of a case: `load` and `save` are directories of checkpoints, empty for none.

    `folder` is for files of the case's tool, `memory` what the tool keeps on a rank from one call to the
    next.
    """

    first: int
    last: int
    load: str = ""
    save: str = ""
    folder: str = ""
    memory: Any = None


@dataclass(frozen=True)
class RankReport:
    """What one rank found, and the counts of its lookups and tables."""

    first_difference: Difference | None
    tensors_compared: int
    bytes_compared: int
    seconds: float
    counts: dict[str, int]


def record_reference(reference: Reference, steps: int, directory: str) -> None:
    """Run `ReferenceTrainer` and store its state after every step; the file is replaced whole.

    It runs on one thread, as ranks do.
    """
    job, threads = reference.job, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with kernels_of(job.target):
            states = _reference_states(reference, steps)
    finally:
        torch.set_num_threads(threads)
    with atomic_write(Path(directory, reference.file_name)) as part:
        save_file(states, part)


def _reference_states(reference: Reference, steps: int) -> State:
    job = reference.job
    model, tables, optimizer = job.build(reference.optimizer)
    loader = job.loader(0, reference.ranks)
    shared: dict[str, Any] = dict(reference.window)
    config = with_values(WindowConfig(accumulate=reference.accumulate, seed=job.seed), shared)
    states: dict[str, torch.Tensor] = {}
    read: list[Batch] = []  # a stream gives each batch once

    def batches() -> Iterator[Batch]:
        for step in range(steps):
            read.append(loader.global_batch(step))
            yield read[-1]

    with Trainer(
        model, tables, optimizer, Communicators.local(), "reference", config,
        **job.recipe(model, optimizer), **vars(job.target),
    ) as trainer:  # fmt: skip
        for result in trainer.run(batches()):
            state = {
                **loss_state(result.sample_ids, result.losses), **dense_state(trainer.dense),
                **table_state(tables),
            }  # fmt: skip
            if job.policy != TablePolicy():
                update = result.step - result.step % reference.accumulate
                used = read[update : result.step + 1]
                state.update(used_state(tables, [batch.lookups() for batch in used]))
            states.update({f"{result.step}/{name}": tensor for name, tensor in state.items()})
    return states


class Recorded(Mapping[str, torch.Tensor]):
    """One step of a reference file; a tensor is read when it is taken."""

    def __init__(self, file, step: int):
        self._file, self._step = file, step
        prefix, names = f"{step}/", file.keys()
        self._names = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(f"{self._step}/{name}")

    def __iter__(self):
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def run_case(
    communicators: Communicators,
    job: Job,
    case: Case,
    references: str,
    fault: str | None = None,
    stretch: Stretch | None = None,
) -> RankReport:
    """Run `case` on this rank and compare losses, dense parameters and every row after every step.

    Args:
        references: directory of `record_reference`'s files.
        fault: name of a fault to inject.
        stretch: the steps to run, and where their state comes from and goes to; all of them by default.
    """
    started = time.perf_counter()
    injected = injection_of(fault) if fault else Injection()
    stretch = stretch or Stretch(0, case.steps)
    train = _own_loop if case.changes.own_loop else _trained
    with ExitStack() as stack:
        stack.enter_context(kernels_of(job.target))
        if case.consistency == "window":
            expected: Expected = _in_turn(communicators, job, case).__getitem__
        else:
            file = stack.enter_context(safe_open(Path(references, case.reference(job).file_name), "pt"))
            expected = partial(Recorded, file)
        comparison, counts = train(communicators, job, case, expected, injected, stretch)
    for group in comparison.tables.groups:
        counts.update(vars(group.table.counters))
    seconds = time.perf_counter() - started
    return RankReport(
        comparison.first, comparison.tensors_compared, comparison.bytes_compared, seconds, dict(counts)
    )


def _in_turn(communicators: Communicators, job: Job, case: Case) -> list[State]:
    """States of the reference of ``"window"`` consistency, this rank's shard only."""
    in_turn = replace(case, mode="sequential", storage="host", delay_seed=None)
    states: list[State] = []
    used: list[dict[str, Lookup]] = []
    with prepared(communicators, job, in_turn) as (trainer, loader):
        program = trainer.program
        accumulate = program.config.accumulate
        whole = case.job(job).loader(communicators.rank, communicators.world_size)  # a stream is read once
        for result in trainer.run(loader.batch(step) for step in range(case.steps)):
            state = {**loss_state(result.sample_ids, result.losses), **dense_state(program.dense),
                     **table_state(program.tables)}  # fmt: skip
            states.append(state)
            if case.job(job).policy != TablePolicy():
                used = used[-(result.step % accumulate) :] if result.step % accumulate else []
                used.append(whole.global_batch(result.step).lookups())
                state.update(used_state(program.tables, used))
    return states


def _trained(
    communicators: Communicators,
    job: Job,
    case: Case,
    expected: Expected,
    injected: Injection,
    stretch: Stretch,
) -> tuple[Comparison, Counter[str]]:
    """Train by a `Trainer`, and compare; counts are those of lookups and of the tool."""
    steps = range(stretch.first, stretch.last)
    with prepared(communicators, job, case, injected=injected) as (trainer, loader), ExitStack() as stack:
        program, tables = trainer.program, trainer.program.tables
        stream = loader if isinstance(loader, (Stream, DynamicStream)) else None
        if stretch.load:
            trainer.load(stretch.load, loader=stream)
        comparison = Comparison(tables, communicators.shard, communicators.shards)
        batches = (loader.batch(step) for step in steps) if stream is None else islice(stream, len(steps))
        run = Run(
            trainer, case.job(job), loader, comparison, expected, steps, batches, stretch.folder,
            stretch.memory, injected.tool, stack,
        )  # fmt: skip
        skipped = compare_run(trainer, case.changes.tool(run), comparison, expected, steps[-1])
        if stretch.save:
            trainer.save(stretch.save, loader=stream)
    require_compared(case, comparison, run.steps, program.config.accumulate, run.due)
    counts = run.counts
    counts.update(vars(trainer.counts), skipped=skipped)
    if isinstance(stream, DynamicStream):
        stream = stream.stream
    if stream is not None:
        counts["shard_bytes"] = stream.counts.bytes
    return comparison, counts


def require_compared(
    case: Case, comparison: Comparison, steps: range, accumulate: int = 1, more: Collection[str] = ()
) -> None:
    """Raise RuntimeError where losses, dense parameters or a table of some step, or after the last one a part
    named in `more`, were not compared.

    Unless a difference was found, after which nothing is compared.
    """
    updates = [step for step in steps if (step + 1) % accumulate == 0 or step == steps[-1]]
    parts = ["dense", *(f"table {name}" for name in comparison.tables.table_names)]
    due = {(step, "loss") for step in steps} | {*product(updates, parts), *product(steps[-1:], more)}
    missing = sorted(due - comparison.steps_seen)
    if comparison.first is None and missing:
        raise RuntimeError(f"{case}: never compared {missing}; a proof that was skipped has failed")


def _own_loop(
    communicators: Communicators,
    job: Job,
    case: Case,
    expected: Expected,
    injected: Injection,
    stretch: Stretch,
) -> tuple[Comparison, Counter[str]]:
    """As `_trained`, of a case without a trainer."""
    made = case.job(job)
    parts = made.build(case.optimizer)
    loader, tables = made.loader(communicators.rank, communicators.world_size), parts[1]
    loop = OwnLoop(parts, communicators, case.micro_batches, case.window(job.seed).seed)
    if injected.loop is not None:
        injected.loop(loop)
    comparison = Comparison(tables, communicators.shard, communicators.shards)
    for step in range(stretch.first, stretch.last):
        batch = loader.batch(step)
        assert isinstance(batch, JaggedBatch)
        comparison.compare(step, expected(step), loop.step(batch), final=True)
    require_compared(case, comparison, range(stretch.first, stretch.last))
    return comparison, Counter()


def compare_run(
    trainer: Trainer,
    stretches: Iterable[Iterable[Batch]],
    comparison: Comparison,
    expected: Expected,
    last: int,
) -> int:
    """Train on each of `stretches`, and compare losses, dense parameters and rows with ``expected(step)``.

    Returns how many updates were left out.

    State is compared on the lanes that have just changed it, so the pipeline goes on running meanwhile; it is
    empty between stretches. Ops of the comparison run on the device's own implementation, whatever that of
    the lanes. `last` is the last step of all.
    """
    program = trainer.program

    def after(stage: str, state: Callable[[], State]) -> None:
        @ops.use_impl("auto")
        def compared(window: Window) -> None:
            comparison.compare(window.step, expected(window.step), state(), final=window.step == last)

        program.after(stage, compared)

    before_last: list[int] = []  # the step of the last window whose rows were written back

    @ops.use_impl("auto")
    def settled(
        window: Window,
        before: Read[Previous[OwnedRows]] | None,
        active: Read[Previous[Buffer]] | None,
        kept: Read[KeptRows] | None,
    ) -> None:
        """Where rows stay in buffers, the state after the batch before: the tables and what it kept."""
        if before is not None and active is not None and kept is not None:
            (step,) = before_last
            state = table_state(program.tables)
            for group, table, rows, common in zip(
                program.tables.groups, before.tables, active, kept, strict=True
            ):
                here = common.trimmed().before
                overlay(state, group, table.keys[here].cpu(), rows[here].cpu())
            comparison.compare(step, expected(step), state, final=False)
        before_last[:] = [window.step]

    def finished(places: WindowPlaces) -> None:
        finish(places)
        step = places.window.step
        comparison.compare(step, expected(step), table_state(program.tables), final=True)

    after("dense_update", lambda: dense_state(program.dense))
    if program.config.exchange.skip_fetch:
        program.after("write_back", settled)
        finish = program.finish
        program.finish = finished  # type: ignore[method-assign]
    else:
        after("write_back", lambda: table_state(program.tables))
    skipped = 0
    for batches in stretches:
        for result in trainer.run(batches):
            losses = loss_state(result.sample_ids, result.losses)
            comparison.compare(result.step, expected(result.step), losses, final=False)
            skipped += result.skipped
    return skipped


@contextmanager
def prepared(
    communicators: Communicators,
    job: Job,
    case: Case,
    recorder: SupportsRecording | None = None,
    injected: Injection | None = None,
) -> Iterator[tuple[Trainer, Loader]]:
    """A fresh trainer for `case` and this rank's loader; the trainer is closed on the way out."""
    injected = injected or Injection()
    if injected.program is not None:  # it may change them, and later cases have the same groups
        own: dict[str, Any] = {
            name: copy(each) for name, each in vars(communicators).items() if isinstance(each, Communicator)
        }
        communicators = replace(communicators, **own)
    job = case.job(job)
    model, tables, optimizer = job.build(case.optimizer, partial(wrap, job, communicators))
    config = case.window(job.seed)
    if case.mode == "sequential":
        config = with_values(config, {"skip_fetch": False, "depth": 0})  # it keeps and reads ahead nothing
    if injected.alone:
        config = with_values(config, {"exchanges": "each"})
    schedule = None
    if injected.schedule is not None:
        schedule = injected.schedule(
            schedule_of(case.mode, config, communicators.replicas, communicators.nodes)
        )
    delay = injected.delay or _delays(case, communicators.rank)
    with Trainer(
        model, tables, optimizer, communicators, case.mode, config, recorder, delay, schedule,
        checked=injected.schedule is None, **job.recipe(model, optimizer), **vars(job.target),
    ) as trainer:  # fmt: skip
        if (
            injected != Injection()
        ):  # the guard would refuse a model that is broken here; the bits shall show it
            trainer.guard.active = False
        if injected.program is not None:
            injected.program(trainer.program)
        loader = job.loader(communicators.rank, communicators.world_size)
        if injected.loader is not None:
            injected.loader(loader)
        yield trainer, loader


def _delays(case: Case, rank: int) -> Callable[[Task], float] | None:
    """Waits drawn from (seed, rank, task): the same for a case each time, different for every task."""
    if case.delay_seed is None:
        return None
    seed = case.delay_seed

    def delay(task: Task) -> float:
        return Random(f"{seed}/{rank}/{task}").random() * case.max_delay

    return delay
