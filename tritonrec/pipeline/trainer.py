"""One door to every mode: ``step(batch)``, ``run(batches)`` and TorchRec's ``progress(iterator)``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from .. import checkpoint, ops
from ..data import Batch, Vocabulary
from ..data.batch import iterator_of, require_iterator
from ..data.loader import NextItems
from ..data.splits import Part
from ..distributed import Communicators
from ..embedding import HashTableCollection
from ..embedding.warm_start import Choice, WarmStart
from ..files.places import Place, require_current_folder
from ..kernels.dispatch import default_impl, usable_device
from ..settings import no_copy, typed
from ..trace import NullRecorder, SupportsRecording
from .agreement import settings_of, validate_same_training
from .dense import DenseModel
from .dense_checks import validate_hooks, validate_invariant
from .diagnosis import NotBatchInvariantError
from .early import early_buckets
from .evaluation import RowsOfRanks, rank_held_out
from .executor import Delay, Executor, StageFailedError
from .flight import lane_work, on_the_callers_thread, validate_groups, validate_model_place, validate_places
from .graphs import MicroBatchGraphs
from .guard import Guard
from .interrupts import uninterrupted
from .model_call import sees_window
from .modes import Mode, schedule_of, validate_reference, validate_schedule
from .pending import PendingWindows
from .places import OwnedRows, Routes, WindowPlaces
from .position import SupportsState
from .precision import LossScaler, autocast
from .program import Program
from .reference import ReferenceTrainer, run_reference, run_sequentially
from .replicas import ReplicaAverage
from .results import StepResult, results_of, to_be_taken
from .run_agreement import RunAgreement
from .saver import Source, TrainingSaver, restore
from .schedule import Schedule
from .step_saves import StepSaves, hand_over, saves_of
from .streams import Streams, lanes_of_one_thread, launches_in_turn, streams_for
from .sums import Sums
from .warm_start import warm_start
from .window import LookupCounts, WindowConfig


@typed
class Trainer:
    """Trains a model with row-sharded tables in one of `MODES`; what it computes does not depend on which.

    Args:
        model: the dense model, equal on every rank (see `tritonrec.pipeline.Model`).
        tables: this rank's shard of the tables.
        optimizer: of the model's parameters: any `torch.optim.Optimizer`, or several (`DenseModel`).
        communicators: this rank's groups; `Communicators.local()` for one process.
        mode: see `MODES`. ``"reference"`` needs one rank and one micro-batch.
        config: micro-batches, consistency, clustering, accumulation, dedup, precision, grid, seed.
        recorder: receives a span for every stage.
        delay: seconds to wait before each task, to attack the schedule.
        device: where samples, buffers and the dense model are, and the tables that are not in host memory.
        schedule: another table than `schedule_of` the mode; checked like any.
        streams: where the lanes' work runs; those of the device by default.
        impl: of every op that a step runs, the model's included (`ops.use_impl`); ``"auto"`` is what it means
            on the thread that makes the trainer. Where tables are in host memory and the model on a GPU, no
            other can run both.
        checked: False skips the check, for injected faults only.
        scheduler: of the optimizer's learning rates; it makes a step after each update.
        average: of the model's weights; it takes them up after each update.
        graphs: of the model's calls. None: kernels are launched one after the other. ``"auto"``: where they
            have the bits, on one rank with a model of `tritonrec.nn` on CUDA (`MicroBatchGraphs.by_default`).
        trust_model: no call of the model is compared (`pipeline.guard`): at consistency ``"batch"`` a model
            whose samples see each other trains too, with bits that depend on the cut. It is printed.

    Attributes:
        next_step: number of steps that are done.
        vocabularies: of the words that ids stand for, by name; set them where the log has words: they are
            saved with the tables.

    Use as a context manager: leaving it finishes the batches that were read, after an error it abandons them.

    While batches are in flight (`in_flight`), model, tables and optimizer are the trainer's: reading or
    writing them, calling or copying the model, and switching it with ``train()`` or ``eval()`` raise
    RuntimeError. At any other time they are the caller's, and the next batch starts from how he leaves them.
    Batches are read on the ``prefetch`` lane, or on the caller's thread in modes without lanes, under the
    autocast and the default device of the caller's thread. The model is called under these too; a precision
    of the config other than float32 is autocast's.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tables: HashTableCollection,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        communicators: Communicators,
        mode: Mode = "nestpipe",
        config: WindowConfig | None = None,
        recorder: SupportsRecording | None = None,
        delay: Delay | None = None,
        schedule: Schedule | None = None,
        checked: bool = True,
        device: str | torch.device = "cpu",
        streams: Streams | None = None,
        impl: ops.Impl = "auto",
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        average: AveragedModel | None = None,
        graphs: MicroBatchGraphs | Literal["auto"] | None = "auto",
        trust_model: bool = False,
    ):
        require_current_folder()
        self.mode, self.config, self.tables = mode, config or WindowConfig(), tables
        device = torch.device(device)
        validate_groups(communicators.communication, device)
        scaler = LossScaler(self.config.loss_scaling) if self.config.precision == "fp16" else None
        self.dense = DenseModel(model, optimizer, scheduler, average, scaler)
        if self.dense.shards is not None:
            self.dense.shards.validate(communicators.rank, communicators.world_size, mode)
        validate_model_place(model, device)
        if self.config.consistency == "batch":
            validate_hooks(model)
            for each in self.dense.optimizers:
                validate_invariant(each)
        self._device = usable_device(device)
        validate_places(tables, self._device)
        self._impl = default_impl() if impl == "auto" else impl
        here = torch.empty(0, dtype=torch.float32, device=self._device)
        ops.implementation(self.impl, here)  # raises where it cannot run
        self.recorder = recorder or NullRecorder()
        self._executor: Executor | None = None
        self._average: ReplicaAverage | None = None
        self._saver: TrainingSaver | None = None  # of a run
        self._communicators = communicators
        self.vocabularies: dict[str, Vocabulary] = {}
        self._finished = self.next_step = 0  # the last step whose results are there, and the one after it
        self._stopping = False
        self._broken = ""  # why the state is that of no step
        self._results: deque[StepResult] = deque()  # of the batches of an update that is done
        self.counts = LookupCounts()
        self._program: Program | None = None
        self._exchanges = ""  # in words
        self.reference: ReferenceTrainer | None = None
        self._schedule = None if mode == "reference" else schedule
        around = communicators.replicas, communicators.nodes, sees_window(model)
        if mode != "reference" and schedule is None:
            early = early_buckets(self.dense, communicators, self.config, device)
            self._schedule = schedule_of(mode, self.config, *around, early)
        overlaps = self._schedule is not None and self._schedule.overlaps_window
        copied = communicators.copies_messages(self._device)
        self.config = self.config.cut(overlaps, communicators.shards, copied)
        shared = self._schedule is not None and self._schedule.overlaps_batches
        if graphs == "auto":  # on several GPUs nobody has run them
            alone = communicators.world_size == 1
            graphs = MicroBatchGraphs.by_default(model, self.config, self._device) if alone else None
        elif graphs is not None:
            graphs.validate(model, self.config, self._device)
        self.guard = guard = Guard(model, tables, self.config, trust_model)
        self._pending = PendingWindows(
            tables, self.dense, self.config, self._device, shared, graphs, guard, self.recorder,
            communicators,
        )  # fmt: skip
        self._sums = Sums(self.config, self._device, copied)
        self.recorder.metadata.update(
            mode=mode,
            consistency=self.config.consistency,
            micro_batches=self.config.micro_batches,
            taper=self.config.exchange.taper,
            trust_model=trust_model,
            edges=[] if self._schedule is None else self._schedule.edges(),
        )
        if self._schedule is None:
            validate_reference(self.config, communicators)
            self.reference = ReferenceTrainer(tables, self.dense, self.config, self.impl, self._device, guard)
            return
        validate_schedule(self._schedule, self.config, *around)
        given = tables, self.dense, mode, self.config, self._schedule, self._device, self.impl
        validate_same_training(communicators, *given)
        if communicators.world_size > 1:
            self._pending.agreement = RunAgreement(
                communicators, tables, self.dense, partial(settings_of, *given),
                communicators.replicas > 1 and not self.config.average_every,
            )  # fmt: skip
        self._program = Program(
            self._schedule, tables, self.dense, communicators, self.config, self._pending.flight,
            self._device, self._pending.agreement, self.recorder,
        )  # fmt: skip
        tasks = self._program.tasks
        self.recorder.metadata["done_by"] = {stage: list(each) for stage, each in tasks.doers.items()}
        self._exchanges = self.recorder.metadata["exchanges"] = self._program.exchanges
        if self.config.average_every:
            self._average = ReplicaAverage(
                tables, communicators.replica, self.config.late_states, self.config.average_holders
            )
        if self._schedule.concurrent:
            streams = streams or streams_for(self._device)
            one_thread = lanes_of_one_thread(streams, communicators.world_size, self._schedule.reduces_early)
            self.recorder.metadata["one_thread"] = list(one_thread)
            self._executor = self._pending.executor = Executor(
                tasks, self._program.actions, self._program.span, delay, checked,
                streams, partial(lane_work, self.impl),
                launches_in_turn(self._device, communicators.world_size), one_thread,
            )  # fmt: skip
            self._pending.flight.early.completed = self._executor.end_part

    @property
    def impl(self) -> ops.Impl:
        """The implementation of ops that the run uses; lanes have begun with it, so it cannot be set."""
        return self._impl

    @property
    def communicators(self) -> Communicators:
        """This rank's groups."""
        return self._communicators

    @property
    def program(self) -> Program:
        """This rank's stages; mode ``"reference"`` has none."""
        if self._program is None:
            raise AttributeError("mode 'reference' is one plain loop without stages")
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
        source, before = iter(batches), self._pending.batches
        self._pending.single = True
        try:
            results = [self.progress(source)]
            while self._pending or self._results:
                results.append(self.progress(source))
        finally:
            self._pending.single = False
        self._pending.batches = before  # a single step is no run, whose end the ranks would have to agree on
        return results[-1]

    @typed
    @to_be_taken
    def run(
        self, batches: Iterable[Batch], pause_every: int = 0,
        saver: TrainingSaver | None = None, save_every: int = 0,
    ) -> Iterator[StepResult]:  # fmt: skip
        """Train on this rank's `batches`, keeping the pipeline filled; yields results in order.

        Any iterable of batches will do, a ``torch.utils.data.DataLoader`` too, whose errors come out as they
        are. Batches are read ahead, and whatever was read is trained: to stop after a certain step, end
        `batches` there. With ``accumulate`` = A each A are one update; what is left at the end is one too.

        Args:
            pause_every: P > 0: while the caller has the result of a step s with (s + 1) % P == 0, nothing is
                in flight, and no later batch was read: save, evaluate, or change what may change between two
                runs. The same on all ranks, and a multiple of A.
            saver: of this trainer. After each `save_every` steps that this run reads, also a multiple of A,
                it saves the step's state, taken while later windows are in flight; a warning says where they
                cannot be. It is written once the caller comes for the next result, with the ``meta`` of then.
        """
        source = iterator_of(batches)
        given = self.config, self.tables, self.dense, self._program
        saves = saves_of(saver, save_every, *given, None if self._average is None else self.sync)
        self._saver = saver or self._saver
        self.guard.begin_run()
        while True:
            try:
                yield self._turn(source, pause_every, saves)
            except StopIteration:
                return

    def progress(self, iterator: Iterator[Batch], pause_every: int = 0) -> StepResult:
        """Fill the pipeline from `iterator` and finish its oldest batch; StopIteration at its end."""
        return self._turn(require_iterator(iterator), pause_every, None)

    def _turn(self, iterator: Iterator[Batch], pause_every: int, saves: StepSaves | None) -> StepResult:
        with self._pending.turn(pause_every, saves):
            return self._progress(iterator)

    def _progress(self, iterator: Iterator[Batch]) -> StepResult:
        if not self._results:
            if self._saver is not None:
                self._saver.begin()
            self._check_whole()
            try:
                self._pending.check_caller()
            except RuntimeError as error:
                self._communicators.watch.fail(error)  # by name for the other ranks, which wait for this one
                raise
            try:
                if self._executor is None:
                    self._plain(iterator)
                else:
                    self._piped(self._executor, iterator)
            except StageFailedError as error:
                if self._executor is None:
                    raise
                self.close()  # nothing will come of the others
                if isinstance(error.__cause__, NotBatchInvariantError):  # the same error in all modes
                    self._communicators.watch.fail(error.__cause__)
                    raise error.__cause__ from None
                raise
            finally:
                self._pending.note_caller()
            self._pending.take_drained(self.next_step)
        return self._results.popleft()

    def autocast(self) -> AbstractContextManager[object]:
        """`torch.autocast` as around the model in training, for an evaluation; nothing in ``"float32"``."""
        return autocast(self.config.precision, self._device)

    def in_flight(self) -> list[int]:
        """Steps whose batches were read and are not finished, oldest first."""
        return self._pending.steps()

    @property
    def stopping(self) -> bool:
        """Whether a rank was asked to stop (`Communicators.stop`); true after the same result on all ranks.

        To stop there, end the batches that `run` reads; those read ahead are trained. A wish is seen with the
        keys of the next batch read, so at most twice the batches in flight are trained after it::

            until = itertools.takewhile(lambda step: not trainer.stopping, steps)
            for result in trainer.run(loader.batch(step) for step in until):
        """
        return self._stopping

    def _piped(self, executor: Executor, iterator: Iterator[Batch]) -> None:
        executor.ensure_running()
        while self._pending.may_grow(executor.schedule.batches_in_flight):
            self._pending.wait(iterator)
            taken = self._pending.prepare_save()
            with uninterrupted():  # a batch that was read is in flight
                window = self._pending.read(iterator)
                if window is not None:
                    executor.submit(window.number, self._pending.begin(window, taken))
            if window is None:
                break
        if not self._pending:
            self._end_run()
            raise StopIteration
        places = self._pending.oldest
        executor.wait(places.window.number)
        try:
            places.errors.check()
        except (ArithmeticError, RuntimeError) as error:
            kind, step = type(error).__name__, places.window.step
            raise StageFailedError(f"step {step} failed: {kind}: {error}") from error
        if len(self._pending) == 1:
            with on_the_callers_thread(self.impl):
                self.program.finish(places)
        with uninterrupted():  # before, everything is to be done still
            self._pending.end()
            self._finish(places)

    def sync(self, whole: bool = True) -> None:
        """Average the replicas of the tables now; with ``average_every`` it happens by itself. Collective.

        Call it before a save. Without `whole`, late states follow later. Raises RuntimeError while batches
        are under way, ValueError where replicas are exact.
        """
        if self._average is None:
            raise ValueError("nothing to average: replicas are exact unless average_every is set")
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} windows are under way: take their results first")
        span = self.recorder.span("replica", "average", batch=self._finished)
        with span as args, on_the_callers_thread(self.impl):
            sent = args["bytes"] = self._average.average(whole)
        self.counts.row_bytes += sent

    def saver(
        self,
        directory: str | Place,
        meta: Mapping[str, Any] | None = None,
        full_every: int = 1,
        loader: SupportsState | None = None,
        write: Callable[..., Any] = checkpoint.save,
    ) -> TrainingSaver:
        """A context manager whose ``save(step)`` writes everything beside the training (`TrainingSaver`)."""
        self._check_whole()
        return TrainingSaver(
            self._communicators, directory, self.tables, self.dense, meta or {}, full_every, loader,
            self.config, lambda: self.vocabularies, write, self._check_averaged,
        )  # fmt: skip

    def save(
        self,
        directory: str | Place,
        meta: Mapping[str, Any] | None = None,
        loader: SupportsState | None = None,
    ) -> None:
        """Save everything as the state after `next_step` steps, and wait until it is on the disk. Collective.

        That is the model with its buffers, the states of optimizer, scheduler and average, and this rank's
        rows with their states and metadata, and `vocabularies`. The directory may hold earlier checkpoints of
        the same training.

        Args:
            meta: values of the caller's that JSON keeps unchanged.
            loader: of the batches, this rank's; its ``state_dict()`` is saved too.

        Raises RuntimeError while batches are in flight, `CheckpointError` where the files cannot be written.
        """
        with self.saver(directory, meta, loader=loader) as saver:
            saver.save(self.next_step)

    @typed
    def load(
        self,
        directory: Source | TrainingSaver,
        accept: Callable[[dict[str, Any]], None] = lambda meta: None,
        loader: SupportsState | None = None,
        changed: Collection[str] = (),
    ) -> int:
        """Load what `save` wrote, at any world size; returns the number of the next step. Collective.

        All ranks check everything before one changes anything: after an error model, optimizer, tables and
        loader are as they were. Rows that the tables had before are gone after a load. `vocabularies` must
        extend those that were saved, as a log read with `saved_vocabularies` does; those that are not there
        are loaded.

        Args:
            directory: of checkpoints; or this trainer's `saver`, which then goes on with changes of what it
                has loaded, unless settings are `changed`.
            accept: is called with the metadata that was saved, and may raise; nothing is loaded then.
            loader: gets the position that was saved with ``loader=``.
            changed: settings that may differ from those of the training that saved (`recipe.SETTINGS`):
                ``"seed"``, ``"lr"``, ``"rule"``, ``"policy"``, ``"dropout_seed"``, ``"consistency"``, ...
                This trainer's values hold from here on.

        Raises RuntimeError while batches are in flight, ValueError or `CheckpointError` for a checkpoint that
        is damaged, of another model, optimizer or table, or of other settings that are not `changed`.
        """
        saver = None
        if isinstance(directory, TrainingSaver):
            saver, directory = directory, directory.directory
            saver.check_saves(self.tables)
            saver.wait()
        stream = restore(
            self._communicators, directory, self.tables, self.dense, self.config, accept, loader, changed,
            self.vocabularies,
        )  # fmt: skip
        self.next_step = stream.step
        if self._saver is not None:  # or it would add changes to what was there before
            self._saver.lose()
        if saver and not changed:
            saver.follow(stream)
        self._broken = ""
        if self._average is not None:
            self._average.forget()
        self._pending.loaded()
        return self.next_step

    @typed
    def warm_start(
        self,
        source: str | Place | Mapping[str, Any],
        *,
        tables: Collection[str] | None = None,
        features: Collection[str] | None = None,
        dense: Collection[str] | None = None,
        rename: Mapping[str, str] | None = None,
        step: int | None = None,
    ) -> WarmStart:
        """Begin with weights of another training; returns the report of what was taken. Collective.

        Everything else keeps its values: rows of ids that are not there, parameters of other names or shapes,
        and the states of all optimizers. Without `tables`, `features` and `dense` all is taken that has the
        same name and size here; what is named has to be there.

        Args:
            source: a directory of checkpoints (`step`: of which), or a module's ``state_dict``, such as one
                that TorchRec saved (`tables_of`).
            tables: names here; ``()`` for none. features: their tables.
            dense: names of parameters and buffers here, or of modules, or patterns (``"layers.*.norm.*"``);
                ``()`` for none.
            rename: by name there, the name here, of tables and parameters; one that ends with a dot renames
                all that begin with it, as ``{"encoder.": "body.encoder."}``.

        Raises RuntimeError while batches are in flight, ValueError or `CheckpointError` where something named
        is not there or has another size; nothing is loaded then.
        """
        choice = Choice(tables, features, dense, rename or {})
        return warm_start(self._communicators, self.tables, self.dense, source, choice, step)

    def rows_of_ranks(self) -> RowsOfRanks:
        """Every rank's rows where they are, for an evaluation: all ranks look them up together.

        Ids that no rank has seen have their initial values. Raises RuntimeError while batches are in flight,
        and where replicas have trained apart since they were averaged (`sync`).
        """
        self._check_averaged()
        for group in self.tables.groups:
            group.table.in_flight.check("evaluation")
        return RowsOfRanks(self.tables, self._communicators.shard_control)

    @typed
    def evaluate(
        self,
        loader: NextItems,
        ks: Sequence[int] = (10,),
        part: Part = "test",
        exclude_seen: bool = True,
    ) -> dict[str, float]:
        """HR@K and NDCG@K of the held-out items of a part, on every rank (`data.evaluate`). Collective.

        The averaged model is ranked where there is one, in the precision of training. Raises RuntimeError
        while batches are in flight.
        """
        rows, precision = self.rows_of_ranks(), self.config.precision
        return rank_held_out(self.dense.evaluated, rows, loader, ks, precision, part, exclude_seen)

    def close(self) -> None:
        """Stop the lanes and give the model back. Batches in flight leave the state of no step."""
        if self._executor is not None:
            self._executor.close()
        if self._pending:
            self._broken = f"the trainer was closed while {self._pending.described()} in flight"
        self._pending.abandon_under_way()

    def _check_averaged(self) -> None:
        if self._average is not None:
            self._average.check()

    def _check_whole(self) -> None:
        """Raise RuntimeError where an update may be half done."""
        if self._broken:
            raise RuntimeError(
                f"{self._broken}, and model and tables may have a part of the update: load a checkpoint, or "
                "make them anew with a new trainer"
            )

    # Two trainers of one state would each count steps of their own.
    __reduce_ex__ = no_copy("make a new one of copied model and tables, or save and load")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and self._pending:
                # Ranks that drop different batches would wait for exchanges that never come.
                deque(self.run([]), maxlen=0)
        finally:
            self.close()

    def _plain(self, iterator: Iterator[Batch]) -> None:
        window = self._pending.read(iterator)
        if window is None:
            self._end_run()
            raise StopIteration
        places, written = self._pending.begin(window), self._pending.flight.written
        try:
            with on_the_callers_thread(self.impl):
                if self.reference is None:
                    run_sequentially(self.program, places, self.program.span)
                else:
                    run_reference(self.reference, places, self._sums, self._communicators.stop, self.recorder)
            places.errors.check()
        except BaseException as error:
            self._pending.abandon()
            if isinstance(error, NotBatchInvariantError):
                self._communicators.watch.fail(error)  # by name for the other ranks
            if not isinstance(error, Exception) or self._pending.flight.written > written:
                self._broken = f"step {window.step} was interrupted"
            raise
        self._pending.end()
        self._finish(places)

    def _end_run(self) -> None:
        """Agree with the other ranks that the batches have ended here, once after the last of them."""
        batches, self._pending.batches = self._pending.batches, 0
        if batches and self._program is not None:
            ending = self._communicators.watch.doing(f"the end of its run, after {batches} batches")
            with ending, on_the_callers_thread(self.impl):
                self._program.end_run(self._finished, batches, self._pending.take_used())

    def _finish(self, places: WindowPlaces) -> None:
        window, routes = places.window, places[Routes]
        self._finished, self.next_step = window.step, window.step + 1
        self._stopping |= routes.stop
        self.counts.add(places.total_counts())
        if self._average is not None:
            self._average.note(places[OwnedRows])
            if self.config.averages_after(window.update):
                self.sync(whole=False)
        results = results_of(places, self._sums, self.dense, self._exchanges)
        self._pending.note_used(results[-1].learning_rates, window)
        self._results += results
        hand_over(places)
        places.retire()
