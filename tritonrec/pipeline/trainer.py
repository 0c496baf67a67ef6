"""One door to every mode: ``step(batch)``, ``run(batches)`` and TorchRec's ``progress(iterator)``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import torch

from ..data import Batch
from ..distributed import Communicators
from ..embedding import DenseOptimizer, HashTableCollection
from ..trace import NullRecorder, SupportsRecording
from .agreement import demand_same_training
from .executor import Delay, Executor, StageFailedError
from .program import WindowProgram
from .replicas import ReplicaAverage
from .schedule import IN_TURN, SCHEDULES, Schedule, Task, keep_rows, with_replicas
from .streams import Streams, streams_for
from .synchronous import Synchronous, run_in_turn
from .window import LookupCounts, Window, WindowConfig

Mode = Literal["sync", "sequential", "dbp", "fwp", "nestpipe"]
PIPELINED: tuple[Mode, ...] = ("dbp", "fwp", "nestpipe")
MODES: dict[Mode, str] = {
    "sync": "reference: one process, whole batch, plain loop",
    "sequential": "micro-batches and ranks as in the pipelined modes, one stage after another",
    "dbp": "dual-buffer pipelining: lookups of later batches overlap with the current one",
    "fwp": "frozen-window pipelining: exchanges of a batch overlap with its computation",
    "nestpipe": "both, nested",
}


@dataclass(frozen=True)
class StepResult:
    """Losses of one step on this rank: sample ids (B,), per-sample loss sums (B,).

    `terms` counts the loss's terms (tokens, impressions) of the whole update, over all ranks and over the
    batches it accumulates.
    """

    step: int
    sample_ids: torch.Tensor
    losses: torch.Tensor
    terms: int


def schedule_of(mode: Mode, config: WindowConfig, replicas: int = 1) -> Schedule:
    """The table that a mode runs, in turn where it is ``sequential``; ``sync`` has none.

    Raises ValueError where the mode has no buffer in which ``config.skip_fetch`` could keep rows, and where
    it cannot have several batches in flight.
    """
    schedule = IN_TURN if mode == "sequential" else SCHEDULES[mode]
    if config.skip_fetch:
        if mode not in ("dbp", "nestpipe"):
            raise ValueError(
                f"mode {mode!r} keeps no rows between batches: skip_fetch is for dbp and nestpipe"
            )
        schedule = keep_rows(schedule)
    if config.depth > 1 and mode not in ("dbp", "nestpipe"):
        raise ValueError(
            f"mode {mode!r} has one batch in flight, not {config.depth}: depth is for dbp and nestpipe"
        )
    if config.depth:
        schedule = replace(schedule, batches_in_flight=config.depth)
    return with_replicas(schedule) if replicas > 1 and not config.average_every else schedule


def _demand_on(model: torch.nn.Module, device: torch.device) -> None:
    """Raise ValueError naming a parameter that is not on the device."""
    for name, parameter in model.named_parameters():
        if parameter.device.type != device.type:
            raise ValueError(
                f"parameter {name} is on {parameter.device}, and the trainer works on {device}: move the "
                "model there before its optimizer is made, or pass its device"
            )


class Trainer:
    """Trains a model with row-sharded tables in one of `MODES`; what it computes does not depend on which.

    Args:
        model: the dense model, equal on every rank (see `tritonrec.pipeline.Model`).
        tables: this rank's shard of the tables.
        dense: optimizer of the model's parameters.
        communicators: this rank's groups; `Communicators.local()` for one process.
        mode: see `MODES`. ``"sync"`` needs one rank and one micro-batch.
        config: micro-batches, consistency, clustering, accumulation, dedup, grid, seed.
        recorder: receives a span for every stage.
        delay: seconds to wait before each task, to attack the schedule.
        device: where samples, buffers and the dense model are; the tables stay in host memory.
        schedule: another table than `schedule_of` the mode; checked like any.
        streams: where the lanes' work runs; those of the device by default.
        checked: False skips the check, for planted bugs only.

    Use as a context manager: leaving it finishes the batches that were read, after an error it abandons them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tables: HashTableCollection,
        dense: DenseOptimizer,
        communicators: Communicators,
        mode: Mode = "nestpipe",
        config: WindowConfig | None = None,
        recorder: SupportsRecording | None = None,
        delay: Delay | None = None,
        schedule: Schedule | None = None,
        checked: bool = True,
        device: str | torch.device = "cpu",
        streams: Streams | None = None,
    ):
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        dense.check_current()
        self.mode, self.config = mode, config or WindowConfig()
        self.recorder = recorder or NullRecorder()
        self._executor: Executor | None = None
        self._average: ReplicaAverage | None = None
        self._communicators = communicators
        self._finished = 0  # the last step whose results are there
        self._batches = 0  # of this run
        self._stopping = False
        self._number = 0
        self._pending: deque[Window] = deque()
        self._results: deque[StepResult] = deque()  # of the batches of an update that is done
        self.counts = LookupCounts()
        self._program: WindowProgram | None = None
        self.reference: Synchronous | None = None
        self._schedule = None if mode == "sync" else schedule
        if mode != "sync" and schedule is None:
            self._schedule = schedule_of(mode, self.config, communicators.replicas)
        self.recorder.metadata.update(
            mode=mode,
            consistency=self.config.consistency,
            micro_batches=self.config.micro_batches,
            edges=[] if self._schedule is None else self._schedule.edges(),
        )
        if self._schedule is None:
            self._demand_plain(communicators)
            self.reference = Synchronous(
                model, tables, dense, self.config.seed, self.config.grid_bits, self.config.accumulate
            )
            return
        stages = {stage.name for stage in self._schedule.stages}
        two = "synchronise" in stages
        exact_copies = communicators.replicas > 1 and not self.config.average_every
        if (
            self._schedule.keeps_rows != self.config.skip_fetch
            or ("replica_reduce" in stages) != exact_copies
        ):
            raise ValueError(
                f"schedule {self._schedule.name!r} keeps rows: {self._schedule.keeps_rows}, adds up "
                f"replicas: {'replica_reduce' in stages}; with skip_fetch={self.config.skip_fetch} and "
                f"{communicators.replicas} replicas it must be made by schedule_of or its parts"
            )
        device = torch.device(device)
        _demand_on(model, device)
        if not communicators.communication.serves(device):
            raise ValueError(
                f"the ranks' groups cannot exchange tensors on {device}: make Communicators with a backend "
                f"that can, such as 'cpu:gloo,cuda:nccl'"
            )
        demand_same_training(communicators, model, tables, dense, mode, self.config, self._schedule, device)
        self._program = WindowProgram(model, tables, dense, communicators, self.config, device, two)
        if self.config.average_every:
            self._average = ReplicaAverage(tables, communicators.replica)
        if mode != "sequential":
            count = self.config.window_micro_batches
            self._executor = Executor(
                self._schedule, self._program.actions, count, self._span, delay, checked,
                streams or streams_for(device),
            )  # fmt: skip

    def _demand_plain(self, communicators: Communicators) -> None:
        """Raise ValueError for what one process with a plain loop does not do."""
        config = self.config
        if communicators.world_size != 1 or config.micro_batches != 1:
            raise ValueError(
                f"mode 'sync' is one process with the whole batch; got {communicators.world_size} ranks "
                f"and {config.micro_batches} micro-batches; 'sequential' has those without overlap"
            )
        if config.consistency != "batch":
            raise ValueError("mode 'sync' is the reference of 'batch' consistency")
        if config.skip_fetch:
            raise ValueError("mode 'sync' keeps no rows between batches: skip_fetch is for dbp and nestpipe")
        if config.depth or config.average_every:
            raise ValueError("mode 'sync' has one batch in flight and one copy: no depth, no average_every")

    @property
    def program(self) -> WindowProgram:
        """This rank's stages; mode ``"sync"`` has none."""
        if self._program is None:
            raise AttributeError("mode 'sync' is one plain loop without stages")
        return self._program

    def step(self, *batches: Batch) -> StepResult:
        """Train on this rank's samples of one batch and finish it; empty on a rank without samples.

        Where gradients are accumulated it takes the batches of one update, and returns the last one's result.
        Raises RuntimeError while batches of `run` or `progress` are under way: their results come first.
        """
        if self._pending or self._results:
            raise RuntimeError(
                f"{len(self._pending)} windows are under way, and their results come before that of step "
                f"{batches[0].step}: take them first with list(trainer.run([]))"
            )
        if not 1 <= len(batches) <= self.config.accumulate:
            raise ValueError(f"one update takes 1 to {self.config.accumulate} batches, got {len(batches)}")
        source, before = iter(batches), self._batches
        results = [self.progress(source)]
        while self._pending or self._results:
            results.append(self.progress(source))
        self._batches = before  # a single step is no run, whose end the ranks would have to agree on
        return results[-1]

    def run(self, batches: Iterable[Batch]) -> Iterator[StepResult]:
        """Train on this rank's `batches`, keeping the pipeline filled; yields results in order.

        Batches are read ahead, and whatever was read is trained: to stop after a certain step, end `batches`
        there. Before a checkpoint or an evaluation let `run` come to its end, which empties the pipeline.
        With ``accumulate`` = A each A batches are one update; what is left at the end is one too.
        """
        source = iter(batches)
        while True:
            try:
                yield self.progress(source)
            except StopIteration:
                return

    def progress(self, iterator: Iterator[Batch]) -> StepResult:
        """Fill the pipeline from `iterator` and finish its oldest batch; StopIteration when none is left."""
        if not self._results:
            if self._executor is None:
                self._plain(iterator)
            else:
                try:
                    self._piped(self._executor, iterator)
                except StageFailedError:
                    self._pending.clear()  # nothing will come of them
                    raise
        return self._results.popleft()

    @property
    def stopping(self) -> bool:
        """Whether a rank was asked to stop (`Communicators.stop`); true after the same result on all ranks.

        To stop there, end the batches that `run` reads; those read ahead are trained::

            until = itertools.takewhile(lambda step: not trainer.stopping, steps)
            for result in trainer.run(loader.batch(step) for step in until):
        """
        return self._stopping

    def _piped(self, executor: Executor, iterator: Iterator[Batch]) -> None:
        executor.ensure_running()
        while len(self._pending) < executor.schedule.batches_in_flight and not self._average_is_next():
            window = self._next_window(iterator)
            if window is None:
                break
            executor.submit(window.number, window)
            self._pending.append(window)
        if not self._pending:
            self._end_run()
            raise StopIteration
        window = self._pending[0]
        executor.wait(window.number)
        if len(self._pending) == 1:
            self.program.finish(window)
        self._pending.popleft()  # only now: an interrupt before leaves everything to be done
        self._finish(window)

    def sync(self) -> None:
        """Average the replicas of the tables now; with ``average_every`` it happens by itself as often.

        Collective. Raises RuntimeError while batches are under way, ValueError where replicas are exact.
        """
        if self._average is None:
            raise ValueError(
                "nothing to average: replicas of the tables are exact unless average_every is set"
            )
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} windows are under way: take their results first")
        with self.recorder.span("replica", "average", batch=self._finished) as args:
            sent = args["bytes"] = self._average.average()
        self.counts.row_bytes += sent

    def _average_is_next(self) -> bool:
        """Whether the last window submitted is the last one before the replicas are averaged."""
        return bool(self._pending) and self._averages_after(self._pending[-1])

    def _averages_after(self, window: Window) -> bool:
        every = self.config.average_every
        return every > 0 and (window.update + 1) % every == 0

    def close(self) -> None:
        """Stop the lanes; batches in flight are abandoned, and the state is that of no step."""
        self._pending.clear()
        if self._executor is not None:
            self._executor.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and self._pending:
                # Ranks that drop different batches would wait for exchanges that never come.
                deque(self.run([]), maxlen=0)
        finally:
            self.close()

    def _next_window(self, iterator: Iterator[Batch]) -> Window | None:
        """The batches of the next update; None when there are none left."""
        count = self.config.accumulate
        batches = list(islice(iterator, count))
        if not batches:
            return None
        first = batches[0].step
        if first % count or [batch.step for batch in batches] != [*range(first, first + len(batches))]:
            raise ValueError(
                f"an update takes {count} consecutive batches from a multiple of {count}, got steps "
                f"{[batch.step for batch in batches]}"
            )
        window = Window(self._number, batches, first // count)
        self._number += 1
        self._batches += len(batches)
        return window

    def _plain(self, iterator: Iterator[Batch]) -> None:
        window = self._next_window(iterator)
        if window is None:
            self._end_run()
            raise StopIteration
        if self.reference is None:
            assert self._schedule is not None
            run_in_turn(self._schedule, self.program, window, self._span)
            self._finish(window)
            return
        self._stopping |= self._communicators.stop.is_set()
        with self.recorder.span("compute", "compute", batch=window.step):
            losses = self.reference.step(window.batches)
        terms = sum(batch.loss_terms for batch in window.batches)
        for batch, each in zip(window.batches, losses, strict=True):
            self._results.append(StepResult(batch.step, batch.sample_ids, each, terms))

    def _end_run(self) -> None:
        """Agree with the other ranks that the batches have ended here, once after the last of them."""
        batches, self._batches = self._batches, 0
        if batches and self._program is not None:
            with self._communicators.watch.doing(f"the end of its run, after {batches} batches"):
                self._program.end_run(self._finished, batches)

    def _finish(self, window: Window) -> None:
        self._finished = window.step
        self._stopping |= window.stop
        window.counts.row_bytes = sum(each.bytes for each in window.sent.values())
        self.counts.add(window.counts)
        if self._average is not None:
            self._average.note(window)
            if self._averages_after(window):
                self.sync()
        for batch, ids, losses in self.program.losses_of(window):
            self._results.append(StepResult(batch.step, ids, losses, window.terms))

    @contextmanager
    def _span(self, lane: str, task: Task, window: Window):
        """Around a stage: its slice in the trace, with the bytes it sent or the keys it found."""
        span = self.recorder.span(lane, task.stage, batch=window.step, micro_batch=task.micro_batch)
        with self._communicators.watch.doing(task), span as args:
            yield
            if task.stage in ("exchange", "gradient_exchange", "replica_reduce"):
                args["bytes"] = window.sending(task.stage, task.micro_batch or 0).bytes
            elif task.stage == "retrieve":
                args["keys"] = window.keys
