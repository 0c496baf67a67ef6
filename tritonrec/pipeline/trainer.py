"""One door to every mode: ``step(batch)``, ``run(batches)`` and TorchRec's ``progress(iterator)``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from ..data import JaggedBatch
from ..distributed import Communicators
from ..embedding import DenseOptimizer, DynamicTable, RowOptimizer
from ..trace import NullRecorder, SupportsRecording
from .executor import Delay, Executor, StageFailedError
from .schedule import FWP, SCHEDULES, Schedule, Task
from .synchronous import Synchronous, run_in_turn
from .window import Window, WindowConfig, WindowProgram

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
    """Losses of one step on this rank: sample ids (B,), per-sample loss sums (B,), tokens of all ranks."""

    step: int
    sample_ids: torch.Tensor
    losses: torch.Tensor
    tokens: int


class Trainer:
    """Trains a model with row-sharded tables in one of `MODES`; what it computes does not depend on which.

    Args:
        model: the dense model, equal on every rank (see `tritonrec.pipeline.window.Model`).
        table: this rank's shard. optimizer: the rule of its rows.
        dense: optimizer of the model's parameters.
        communicators: this rank's groups; `Communicators.local()` for one process.
        mode: see `MODES`. ``"sync"`` needs one rank and one micro-batch.
        config: micro-batches, consistency, clustering, grid, seed.
        recorder: receives a span for every stage.
        delay: seconds to wait before each task, to attack the schedule.
        schedule: another table than the mode's; checked like any.
        checked: False skips the check, for planted bugs only.

    Use as a context manager: leaving it finishes the batches that were read, after an error it abandons them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        table: DynamicTable,
        optimizer: RowOptimizer,
        dense: DenseOptimizer,
        communicators: Communicators,
        mode: Mode = "nestpipe",
        config: WindowConfig | None = None,
        recorder: SupportsRecording | None = None,
        delay: Delay | None = None,
        schedule: Schedule | None = None,
        checked: bool = True,
    ):
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        dense.check_current()
        self.mode, self.config = mode, config or WindowConfig()
        self.recorder = recorder or NullRecorder()
        self._executor: Executor | None = None
        self._number = 0
        self._pending: deque[Window] = deque()
        self._program: WindowProgram | None = None
        self.reference: Synchronous | None = None
        used = schedule or SCHEDULES.get(mode)
        self.recorder.metadata.update(
            mode=mode,
            consistency=self.config.consistency,
            micro_batches=self.config.micro_batches,
            edges=[] if mode == "sync" else (used or FWP).edges(),
        )
        if mode == "sync":
            if communicators.world_size != 1 or self.config.micro_batches != 1:
                raise ValueError(
                    f"mode 'sync' is one process with the whole batch; got {communicators.world_size} ranks "
                    f"and {self.config.micro_batches} micro-batches; 'sequential' has those without overlap"
                )
            if self.config.consistency != "batch":
                raise ValueError("mode 'sync' is the reference of 'batch' consistency")
            self.reference = Synchronous(
                model, table, optimizer, dense, self.config.seed, self.config.grid_bits
            )
            return
        self._program = WindowProgram(model, table, optimizer, dense, communicators, self.config)
        if used is not None:
            self._executor = Executor(
                used, self._program.actions, self.config.micro_batches, self._span, delay, checked
            )

    @property
    def program(self) -> WindowProgram:
        """This rank's stages; mode ``"sync"`` has none."""
        if self._program is None:
            raise AttributeError("mode 'sync' is one plain loop without stages")
        return self._program

    def step(self, batch: JaggedBatch) -> StepResult:
        """Train on this rank's samples of one batch and finish it; empty on a rank without samples.

        Raises RuntimeError while batches of `run` or `progress` are under way: their results come first.
        """
        if self._pending:
            raise RuntimeError(
                f"{len(self._pending)} batches are under way, and their results come before that of step "
                f"{batch.step}: take them first with list(trainer.run([]))"
            )
        return next(iter(self.run([batch])))

    def run(self, batches: Iterable[JaggedBatch]) -> Iterator[StepResult]:
        """Train on this rank's `batches`, keeping the pipeline filled; yields results in order.

        Batches are read ahead, and whatever was read is trained: to stop after a certain step, end `batches`
        there. Before a checkpoint or an evaluation let `run` come to its end, which empties the pipeline.
        """
        source = iter(batches)
        while True:
            try:
                yield self.progress(source)
            except StopIteration:
                return

    def progress(self, iterator: Iterator[JaggedBatch]) -> StepResult:
        """Fill the pipeline from `iterator` and finish its oldest batch; StopIteration when none is left."""
        if self._executor is None:
            return self._plain(next(iterator))
        try:
            return self._piped(self._executor, iterator)
        except StageFailedError:
            self._pending.clear()  # nothing will come of them
            raise

    def _piped(self, executor: Executor, iterator: Iterator[JaggedBatch]) -> StepResult:
        executor.ensure_running()
        while len(self._pending) < executor.schedule.batches_in_flight:
            batch = next(iterator, None)
            if batch is None:
                break
            window = self._window(batch)
            executor.submit(window.number, window)
            self._pending.append(window)
        if not self._pending:
            raise StopIteration
        window = self._pending.popleft()
        executor.wait(window.number)
        return self._result(window)

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

    def _window(self, batch: JaggedBatch) -> Window:
        window = Window(self._number, batch)
        self._number += 1
        return window

    def _plain(self, batch: JaggedBatch) -> StepResult:
        if self.reference is not None:
            with self.recorder.span("compute", "compute", batch=batch.step):
                losses = self.reference.step(batch)
            return StepResult(batch.step, batch.sample_ids, losses, batch.num_tokens)
        window = self._window(batch)
        run_in_turn(self.program, window, self._span)
        return self._result(window)

    def _result(self, window: Window) -> StepResult:
        ids, losses = self.program.losses_of(window)
        return StepResult(window.step, ids, losses, window.tokens)

    @contextmanager
    def _span(self, lane: str, task: Task, window: Window):
        """Around a stage: its slice in the trace, with the bytes it sent or the keys it found."""
        with self.recorder.span(lane, task.stage, batch=window.step, micro_batch=task.micro_batch) as args:
            yield
            if task.stage in ("exchange", "gradient_exchange"):
                args["bytes"] = window.sent_bytes
            elif task.stage == "retrieve":
                args["keys"] = len(window.keys)
