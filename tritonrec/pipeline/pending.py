"""Windows in flight: those that were read and are not finished."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from time import perf_counter_ns

import torch

from .. import ops
from ..data import Batch
from ..data.slices import Slices, collected
from ..distributed import Communicators
from ..embedding import HashTableCollection
from ..kernels.dispatch import default_impl
from ..trace import SupportsRecording
from .attributes import noted
from .caller_state import Noted, dense_rates, first_change, globals_of_torch, refusal, row_rates
from .dense import DenseModel
from .executor import Executor
from .flight import Flight
from .graphs import MicroBatchGraphs
from .guard import Guard
from .interrupts import uninterrupted
from .model_call import CallerSettings, check_gradients_are_on
from .places import WindowPlaces
from .run_agreement import RunAgreement
from .saver import Taken
from .step_saves import StepSaves, abandon
from .window import Window, WindowConfig
from .words import words_of

LANE = "prefetch"


class PendingWindows:
    """The windows of a run that are in flight, oldest first, and which may come next.

    From the first to the last of them the model, the tables and the optimizer belong to the lanes (`Flight`).
    The batches of the next one are read from the caller's iterator, under the settings of its thread: a slice
    ``load`` of the trace each, with what its source does (`data.slices.work`) inside. An iterator's error
    is the caller's own, with a note that names the batch; windows in flight go on.

    Args:
        tables, dense: what is trained. config: of the run. device: where the model is.
        shared: the caller's code runs while windows are in flight.
        graphs: of the model's calls, or None. guard: compares these.
        recorder: of the trace. communicators: of the lanes.
    """

    def __init__(
        self,
        tables: HashTableCollection,
        dense: DenseModel,
        config: WindowConfig,
        device: torch.device,
        shared: bool,
        graphs: MicroBatchGraphs | None,
        guard: Guard,
        recorder: SupportsRecording,
        communicators: Communicators,
    ):
        bits = config.fraction_bits if config.consistency == "batch" else None
        self.flight = Flight(tables, dense, bits, shared, self._described, graphs, guard, communicators)
        self.abandoned: list[WindowPlaces] = []  # a device may still work on what they hold
        self.batches = 0  # begun in this run
        self._config, self._device, self._tables, self._shared = config, device, tables, shared
        self._globals: Noted = {}
        self._model: Noted = {}  # what its calls read, when the caller's turn began
        self._written: set[str] = set()  # of that, what calls change
        self._called = 0  # calls of the model that ended before that turn
        self._rates: dict[int, Noted] = {}  # by update in flight
        self.agreement: RunAgreement | None = None  # of several ranks
        self._used: Noted = {}  # dense learning rates of updates that are done, which ranks have to compare
        self.single = False  # a run of one step is under way
        self._turn = threading.Lock()
        self._pause_every = 0  # of this turn
        self.saves: StepSaves | None = None  # likewise
        self._windows: deque[WindowPlaces] = deque()
        self._number = 0
        self._read = -1  # the last update whose batches were read
        self._recorder, self._watch = recorder, communicators.watch
        self.executor: Executor | None = None  # its lane reads; None: the caller's thread, as all else
        self._last: int | None = None  # step of the last batch that was read
        self._ended: Iterator[Batch] | None = None  # it may begin anew, but not in this run
        self._call: Future[list[Batch]] | None = None  # under way, or not taken since an interrupt

    def __len__(self) -> int:
        return len(self._windows)

    @contextmanager
    def turn(self, pause_every: int, saves: StepSaves | None) -> Iterator[None]:
        """Inside, a thread finishes a window; RuntimeError where another one does."""
        self._config.check_pauses(pause_every)
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                "another thread is in a step of this trainer, and the results of one would go to the other: "
                "train on one thread, or make the others wait"
            )
        self._pause_every, self.saves = pause_every, saves
        try:
            yield
        finally:
            self._turn.release()

    @property
    def oldest(self) -> WindowPlaces:
        return self._windows[0]

    @property
    def newest(self) -> WindowPlaces | None:
        return self._windows[-1] if self._windows else None

    def may_grow(self, most: int) -> bool:
        """Whether a window may follow: fewer than `most` are there, and the last is none before a pause."""
        if not self._windows:
            return True
        window = self._windows[-1].window
        pauses = self._pause_every > 0 and (window.step + 1) % self._pause_every == 0
        if self.saves is not None:
            pauses |= self.saves.pauses(window.step + 1)
            # One state at a time is taken: the next would wait here for the write of one that is not there.
            follows = self.saves.due(window.step + 1 + self._config.accumulate)
            pauses |= follows and any(each.get(Taken) for each in self._windows)
        return len(self) < most and not pauses and not self._config.averages_after(window.update)

    def check_caller(self) -> None:
        """Raise RuntimeError where the caller has changed in flight what lanes may have used, or will."""
        try:
            self._check_caller()
        except Exception:  # a call under way may keep something on the model, a hook, say, until it ends
            with self.flight.calls:
                self._check_caller()

    def _check_caller(self) -> None:
        self.flight.check_caller()
        if not (self._shared and self._windows):
            return
        now = CallerSettings.of_this_thread(self._device, self._config.precision)
        # Windows in flight were computed before such a change or after it, and nobody can tell which.
        change = first_change(self._globals, globals_of_torch())
        if now != self._windows[-1].window.settings:
            change = "autocast or the default device was changed"
        for places in self._windows if change is None else ():
            update = places.window.update
            change = change or first_change(self._rates[update], row_rates(self._tables, update + 1))
        # Calls of the model change attributes of their own (counters, caches).
        # Which these are shows a comparison from before a call to after it, so
        # attributes are compared only where the caller's turn began after a call.
        if self._called or not self.flight.called:  # else the first call may have changed it
            of_model = {name: value for name, value in self._noted().items() if name not in self._written}
            change = change or first_change(self._model, of_model)
        if change is not None:
            raise refusal(change, self._described())

    def note_caller(self) -> None:
        """The caller's turn begins; what changed since the flight began, calls of the model have changed."""
        if self._shared and self._windows:
            self._called = self.flight.returned  # one that has begun may change its first attribute later
            now, before = self._noted(), self._model
            # Between two turns of the caller only calls of the model
            # ran: what differs is theirs, and is watched no more.
            self._written |= {name for name in {**now, **before} if now.get(name) != before.get(name)}
            self._model = {name: value for name, value in now.items() if name not in self._written}

    def _noted(self) -> Noted:
        try:
            return noted(self.flight.model)
        except (KeyError, RuntimeError):  # a call under way has changed what this went through
            with self.flight.calls:
                return noted(self.flight.model)

    def prepare_save(self) -> Taken | None:
        """What a save takes of the batches that `wait` has, where one is due after their update."""
        assert self._call is not None
        batches = self._call.result()
        saves = self.saves
        if saves is None or saves.drained or not batches or not saves.due(batches[-1].step + 1):
            return None
        return saves.saver.prepare(batches[-1].step + 1)

    def take_drained(self, steps: int) -> None:
        """Take the state after so many steps, where that is due, and nothing may be in flight nor is."""
        if self.saves is not None and not self._windows:
            self.saves.take_drained(steps)

    def steps(self) -> list[int]:
        """Of the batches in flight, oldest first."""
        return [batch.step for places in self._windows for batch in places.window.batches]

    def read(self, iterator: Iterator[Batch]) -> Window | None:
        """The batches of the next update, fewer where `iterator` ends; None when there are none left.

        After an interrupt the batches that were being read come first.

        Raises ValueError where steps are not consecutive, or do not rise.
        """
        count = self._config.accumulate
        self.wait(iterator)
        if self._call is None:
            batches = self._batches(iterator)
        else:
            batches, self._call = self._call.result(), None
        if not batches:
            if not self._windows:
                self._ended = None
            return None
        first = batches[0].step
        if first % count or [batch.step for batch in batches] != [*range(first, first + len(batches))]:
            raise ValueError(
                f"an update takes {count} consecutive batches from a multiple of {count}, got steps "
                f"{[batch.step for batch in batches]}"
            )
        check_gradients_are_on()
        settings = CallerSettings.of_this_thread(self._device, self._config.precision)
        window = Window(self._number, batches, first // count, settings)
        last = max(self._read, self.flight.last_update)
        if window.update <= last:
            raise ValueError(
                f"step {first} is update {window.update}, and update {last} of these tables and this "
                "optimizer is done or in flight: steps must rise, since Adam's bias correction, eviction and "
                "dropout go by their numbers; to begin anew make new tables and a new optimizer, or load them"
            )
        return window

    def wait(self, iterator: Iterator[Batch]) -> None:
        """Return when the lane has the batches that `read` returns; raises what the iterator raises."""
        if self.executor is None:
            return
        if self._call is None:
            context, impl = copy_context(), default_impl()
            settings = CallerSettings.of_this_thread(self._device)

            def work() -> list[Batch]:
                self.flight.reader = threading.get_ident()
                # Another lane may compile the model meanwhile, and a loader something of its own.
                with settings.applied(), ops.use_impl(impl):
                    return self._batches(iterator)

            # An interrupt between the start and the assignment would lose the call, and the batches that it
            # reads.
            with uninterrupted():
                self._call = self.executor.call(LANE, lambda: context.run(work))
        try:
            self.executor.result(self._call)
        except BaseException:
            # Without an error of its own, this is an interrupt of this thread, and the call goes on.
            if self._call.done() and self._call.exception():
                self._call = None
            raise

    def _batches(self, iterator: Iterator[Batch]) -> list[Batch]:
        batches: list[Batch] = []
        times: Slices = []
        with self._watch.doing("reading of batches"), collected() as slices:
            while len(batches) < self._config.accumulate and iterator is not self._ended:
                start = perf_counter_ns()
                try:
                    batch = next(iterator)
                except StopIteration:
                    self._ended = iterator
                    break
                except Exception as error:
                    after = "the first batch" if self._last is None else f"the batch after step {self._last}"
                    error.add_note(f"while {after} was read")
                    raise
                times.append(("load", start, perf_counter_ns()))
                if not isinstance(batch, Batch):
                    raise TypeError(
                        f"a trainer takes batches of tritonrec.data.Batch, got {type(batch).__name__}: a "
                        "DataLoader makes them in its collate_fn"
                    )
                batches.append(batch)
                self._last = batch.step
        for name, start, end in [*times, *slices] if batches else []:
            self._recorder.add(LANE, name, start, end, batch=batches[-1].step)
        return batches

    def begin(self, window: Window, taken: Taken | None = None) -> WindowPlaces:
        """The window is in flight, and what is `taken` of it."""
        begins = not self.flight.under_way
        self.flight.begin()
        if self._shared:
            if begins:
                self._model, self._written, self._called = self._noted(), set(), 0
            self._globals = globals_of_torch()
            self._rates[window.update] = row_rates(self._tables, window.update + 1)
        if self.agreement is not None:
            try:
                state = self.agreement.begin(self.single) if begins else 0
                # The same on all ranks: windows begin and end in one order, whatever the lanes have done.
                rates = self.take_used() | row_rates(self._tables, window.update + 1)
                if self._pause_every:
                    rates["pause_every"] = self._pause_every
                if self.saves is not None:
                    rates["save_every"] = self.saves.every
                words = words_of(window.settings, state, window.batches, rates)
                if begins:
                    rows, shard = self.agreement.written_rows()
                    words = replace(words, rows=rows, shard=shard)
                window = replace(window, words=words)
            except BaseException:
                if begins:
                    self._end_flight()
                raise
        places = WindowPlaces(window, self.newest, self._config.skips)
        if taken is not None:
            places[Taken] = taken
        self._windows.append(places)
        self._read = window.update
        self._number += 1
        self.batches += len(window.batches)
        return places

    def loaded(self) -> None:
        """A state was loaded: steps may begin at any."""
        self._used = {}
        if self.agreement is not None:
            self.agreement.loaded()
        self._read = -1

    def note_used(self, rates: Sequence[float], window: Window) -> None:
        """The update of a `window` that is done has used these learning rates of the optimizers' groups."""
        if self.agreement is not None:
            self._used |= dense_rates(rates, window.update + 1)

    def take_used(self) -> Noted:
        """What `note_used` has noted since the last call."""
        used, self._used = self._used, {}
        return used

    def end(self) -> None:
        """The oldest window is done."""
        places = self._windows.popleft()
        self.flight.updated(places.window.update)
        self._rates.pop(places.window.update, None)
        if not self._windows:
            try:
                self.flight.check_end()
            finally:
                self._end_flight()

    def _end_flight(self) -> None:
        self.flight.end()
        if self.agreement is not None:
            self.agreement.end()

    def abandon(self) -> None:
        """None of them will be done."""
        for places in self._windows:
            abandon(places)
        self._windows.clear()
        self._rates.clear()
        self._end_flight()

    def abandon_under_way(self) -> None:
        """`abandon`, where a device may still work for them."""
        self.abandoned += self._windows
        self.abandon()

    def described(self) -> str:
        """Which steps are in flight, as a sentence begins: "steps 4 to 6 were"."""
        return self._described().replace(" is", " was").replace(" are", " were")

    def _described(self) -> str:
        steps = self.steps()
        return f"step {steps[0]} is" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} are"
