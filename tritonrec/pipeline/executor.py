"""One executor for every schedule: lanes on threads, tasks in order, edges awaited."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ..kernels.compilation import announcement
from .check import check
from .schedule import Task
from .streams import Streams
from .tasks import Tasks

Delay = Callable[[Task], float]
"""Seconds to wait before a task starts; used to attack the schedule."""

Result = TypeVar("Result")

CLOSE_SECONDS = 2.0
"""Seconds that lanes get to finish their stages after a failure."""
SILENT_SECONDS = 60.0
"""Seconds for which the caller waits before the stages under way are named."""


class StageFailedError(RuntimeError):
    """A stage raised; the original exception is the cause, and no later stage of this rank has started."""


@dataclass
class _Parts:
    """Tasks that another one does on its way (`stage.within`), one after the other."""

    left: deque[Task]
    thread: int
    context: Any
    span: ExitStack = field(default_factory=ExitStack)
    """Of the first one left."""


class Executor:
    """Runs the tasks of a schedule, each lane on a thread.

    Args:
        tasks: those of the table to run. `check` proves them first, and raises `ScheduleError` where it
            cannot.
        actions: for each stage name the function to call with (batch context, micro-batch index or None).
        span: ``span(lane, task, context)`` returns a context manager around a task's work (a recorder's).
        delay: seconds to sleep before each task, drawn by the caller from a seeded generator.
        streams: where the lanes' work runs; at once, on their threads, by default.
        checked: leave the check out; only for injected faults, which must be caught by their effect.
        lane: ``lane()`` returns a context manager around a task's work, on whatever thread that is.
        in_turn: tasks that launch collectives begin in the order of `Schedule.launch_turn`, one at a time. It
            is the same on all ranks that submit and wait alike: a window begins once the batch after it has
            been submitted and its stages ahead are done, or somebody waits for the window.
        shared: lanes that one thread runs, named after the last of them; any other lane has its own. A task
            waits for tasks that are submitted before it alone, so a thread that takes the tasks of its lanes
            as they are submitted never waits for itself.

    Contexts are whatever the stages share about one batch. `submit` blocks while
    ``schedule.batches_in_flight`` batches are unfinished.

    A thread sleeps on a condition of its own, and what wakes it is the end of the last task that it waits
    for, or new work for an empty queue: a thread that is woken for nothing takes the interpreter from one
    that computes.
    """

    def __init__(
        self,
        tasks: Tasks,
        actions: Mapping[str, Callable[[Any, int | None], None]],
        span: Callable[[str, Task, Any], Any],
        delay: Delay | None = None,
        checked: bool = True,
        streams: Streams | None = None,
        lane: Callable[[], AbstractContextManager[None]] = nullcontext,
        in_turn: bool = False,
        shared: Collection[str] = (),
    ):
        if checked:
            check(tasks.schedule, tasks.micro_batches, tasks.doers)
        self.schedule, self._tasks = tasks.schedule, tasks
        self._actions, self._span, self._delay, self._within = actions, span, delay, lane
        self._streams = streams or Streams()
        self._events: dict[Task, Any] = {}  # of work that may be under way on a device
        self._next_parts: list[Task] = []  # what the next task of the same lane does on its way
        self._parts: _Parts | None = None  # under way
        self._lock = threading.Lock()
        self._of_caller = threading.Condition(self._lock)
        self._lane_of = {stage.name: stage.lane for stage in tasks.schedule.stages}
        together = [lane for lane in self._lane_of.values() if lane in shared]
        self._thread_of = {lane: together[-1] if lane in shared else lane for lane in self._lane_of.values()}
        self._wake = {thread: threading.Condition(self._lock) for thread in self._thread_of.values()}
        self._awaited_by: dict[str, set[Task]] = {}  # by thread, what its next task waits for
        self._left: dict[int, int] = {}  # unfinished tasks of each batch in flight
        self._awaited: set[int] = set()  # batches that `wait` has not returned for
        self._unfinished: set[Task] = set()
        self._running: dict[str, Task] = {}  # by thread
        self._told: set[frozenset[str]] = set()  # stages that were named because they take long
        self._in_turn = in_turn
        self._turns: dict[Task, tuple[int, bool, int]] = {}  # of unfinished tasks that launch collectives
        self._submitted = self._waited = -1  # the last batches
        self._failure: tuple[Task, BaseException] | None = None
        self._process = os.getpid()  # which has the lanes
        self._interrupt = threading.Event()
        self._closing = self._stopped = False
        self._queues: dict[str, deque[tuple[Any, Any]]] = {each: deque() for each in self._wake}
        self._threads = [
            threading.Thread(target=self._run, args=(thread,), name=f"lane {thread}", daemon=True)
            for thread in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, batch: int, context: Any) -> None:
        """Queue all tasks of `batch` (numbered 0, 1, 2, ...); returns at once when there is room."""
        with self._lock:
            self._wait_until(lambda: self._stopped or len(self._left) < self.schedule.batches_in_flight)
            self._raise_if_stopped()
            # Into an empty pipeline: a lane's stream has not seen what the caller queued on its own stream.
            if not self._awaited:
                self._streams.begin()
            self._awaited.add(batch)
            tasks = self._tasks.of(batch)
            # All in one critical section: no lane sees a task whose
            # turn, or whose awaited tasks, are not entered yet.
            self._left[batch] = len(tasks)
            self._unfinished.update(tasks)
            self._submitted = batch
            if self._in_turn:
                for number, task in enumerate(tasks):
                    if self.schedule[task.stage].launches_collectives:
                        self._turns[task] = (*self.schedule.launch_turn(task), number)
            for task in tasks:
                self._put(self._lane_of[task.stage], (task, context))
            self._turn_may_come()

    def wait(self, batch: int) -> None:
        """Return when every task of `batch` has finished.

        Raises `StageFailedError` if any stage failed, RuntimeError if the executor was closed.
        """
        with self._lock:
            # Said before the wait: no later batch may be submitted
            # to give this window its turn (`_has_turn`).
            self._waited = max(self._waited, batch)
            self._turn_may_come()
            self._wait_until(lambda: self._stopped or batch not in self._left)
            self._raise_if_stopped()
            # Tasks have ended on the host; on a device their events
            # may be open. The lock is free meanwhile: lanes go on.
            events = [(task, event) for task, event in self._events.items() if task.batch == batch]
        for task, event in events:
            try:
                self._streams.finish(event)
            except Exception as error:
                self._fail(task, error)
        with self._lock:
            self._raise_if_stopped()
            self._awaited.discard(batch)
            # Later batches wait for events of this one and of those that the longest edge reaches back to.
            oldest = batch + 1 - self.schedule.reach
            self._events = {task: event for task, event in self._events.items() if task.batch >= oldest}

    def call(self, lane: str, function: Callable[[], Result]) -> Future[Result]:
        """Queue ``function()`` on a lane, behind the lane's tasks so far; its error is the caller's."""
        call: Future[Result] = Future()
        with self._lock:
            self._raise_if_stopped()
            self._put(lane, (call, function))
        return call

    def result(self, call: Future[Result]) -> Result:
        """Wait for a call, and return its result or raise its error.

        Raises `StageFailedError` where a stage fails first, RuntimeError if the executor is closed.
        """
        with self._lock:
            self._wait_until(lambda: call.done() or self._stopped)
            if not call.done():
                self._raise_if_stopped()
        return call.result()

    def _wait_until(self, comes: Callable[[], bool]) -> None:
        """Wait on the caller's thread, and name the stages under way after a minute, each set of them once:
        a call that a disk or a link never answers raises nothing. A kernel that is compiled is no silence.
        """
        while not self._of_caller.wait_for(comes, SILENT_SECONDS):
            stages = frozenset(task.stage for task in self._running.values())
            if stages in self._told or announcement.under_way:
                continue
            self._told.add(stages)
            running = ", ".join(map(str, self._running.values())) or "none"
            warnings.warn(
                f"tritonrec: training has waited for {SILENT_SECONDS:.0f} s; stages under way: {running}. A "
                "disk (retrieve reads tables on disk, prefetch the log), a link or a call of the model may "
                "not answer",
                RuntimeWarning,
                stacklevel=3,
            )

    def in_flight(self) -> list[int]:
        """Batches submitted and not finished, oldest first."""
        with self._lock:
            return sorted(self._left)

    def ensure_running(self) -> None:
        """Raise `StageFailedError` if a stage has failed, RuntimeError if the executor was closed.

        RuntimeError as well in a process that was forked later, which has no lanes.
        """
        if os.getpid() != self._process:  # the lock is as a lane had it
            raise RuntimeError(
                f"this process was forked from {self._process}, whose lanes a fork leaves there: "
                "train there, or make the trainer after the fork"
            )
        with self._lock:
            self._raise_if_stopped()

    def close(self) -> None:
        """Stop the lanes. Queued tasks that have not started are dropped; call `wait` first to finish.

        Lanes that do not end within `CLOSE_SECONDS`, all together, wait for another rank and are left alone.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closing = self._stopped = True
            self._wake_all()
        self._interrupt.set()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _raise_if_stopped(self) -> None:
        if self._failure:
            task, error = self._failure
            raise StageFailedError(
                f"stage {task} of schedule {self.schedule.name} failed: {type(error).__name__}: {error}"
            ) from error
        if self._closing:
            raise RuntimeError(f"the executor of schedule {self.schedule.name} was closed")

    def _run(self, thread: str) -> None:
        while (work := self._next(thread)) is not None:
            if isinstance(work[0], Future):
                call, function = work
                try:
                    call.set_result(function())
                except BaseException as error:
                    call.set_exception(error)
                with self._lock:
                    self._of_caller.notify_all()
                continue
            task, context, after = work
            lane = self._lane_of[task.stage]
            action = partial(self._act, task, context)
            parts = self._begin_parts(task, context)
            try:
                # A delay ends early when the executor stops.
                if self._delay:
                    self._interrupt.wait(self._delay(task))
                with self._span(lane, task, context), ExitStack() as inside:
                    if parts is not None:
                        inside.enter_context(parts.span)
                        self._span_next(parts)
                    event = self._streams.run(lane, after, action)
                    done = []  # with the whole end the parts that have not been said to be done
                    while parts is not None and parts.left:
                        done.append(parts.left.popleft())
                        self._span_next(parts)
            except BaseException as error:
                self._fail(task, error)
                return
            with self._lock:
                del self._running[thread]
                for each in (*done, task):
                    if event is not None:
                        self._events[each] = event
                    self._finish(each)

    def end_part(self) -> None:
        """The task that this thread is at has done the next part `within` it, which others wait for."""
        parts = self._parts
        # Streams may run a task later, on a thread of theirs: its parts then end with it.
        if parts is None or not parts.left or parts.thread != threading.get_ident():
            return
        task = parts.left.popleft()
        event = self._streams.mark(self._lane_of[task.stage])
        self._span_next(parts)
        with self._lock:
            if event is not None:
                self._events[task] = event
            self._finish(task)

    def _begin_parts(self, whole: Task, context: Any) -> _Parts | None:
        """The parts of a task that others wait for, if there are any."""
        tasks = self._next_parts
        if not tasks or self.schedule[tasks[0].stage].within != whole.stage:
            return None
        self._next_parts, self._parts = [], _Parts(deque(tasks), threading.get_ident(), context)
        return self._parts

    def _span_next(self, parts: _Parts) -> None:
        """A part begins in the trace where the one before it has ended."""
        parts.span.close()
        if parts.left:
            task = parts.left[0]
            parts.span.enter_context(self._span(self._lane_of[task.stage], task, parts.context))

    def _put(self, lane: str, work: tuple[Any, Any]) -> None:
        """Queue work on the lane's thread, which sleeps only if it has none."""
        thread = self._thread_of[lane]
        queue = self._queues[thread]
        queue.append(work)
        # A thread with work in its queue is computing, or waits
        # in `_next` for tasks: `_finish` wakes it for those.
        if len(queue) == 1:
            self._wake[thread].notify()

    def _finish(self, task: Task) -> None:
        """A task is done: wake the threads that wait for nothing else, and the caller if a batch is done."""
        # Each thread waits for the end of a set of tasks. Only the last of them wakes it.
        self._unfinished.discard(task)
        for thread, tasks in self._awaited_by.items():
            if task in tasks:
                tasks.remove(task)
                if not tasks:
                    self._wake[thread].notify()
        self._left[task.batch] -= 1
        if not self._left[task.batch]:
            del self._left[task.batch]
            self._of_caller.notify_all()
        self._turns.pop(task, None)
        self._turn_may_come()

    def _turn_may_come(self) -> None:
        """Wake the threads that wait for their turn, whichever they are."""
        if self._in_turn:
            self._wake_all()

    def _wake_all(self) -> None:
        for condition in (self._of_caller, *self._wake.values()):
            condition.notify_all()

    def _act(self, task: Task, context: Any) -> None:
        with self._within():
            self._actions[task.stage](context, task.micro_batch)

    def _fail(self, task: Task, error: BaseException) -> None:
        """Stop all lanes."""
        with self._lock:
            self._failure = self._failure or (task, error)
            self._stopped = True
            self._wake_all()
        self._interrupt.set()

    def _next(self, thread: str) -> tuple[Any, ...] | None:
        """The thread's next task once all it waits for has finished here, and the events of what may run
        on a device still; or its next call; None when the executor stops.
        """
        queue, wake = self._queues[thread], self._wake[thread]
        with self._lock:
            while True:
                wake.wait_for(lambda: self._stopped or queue)
                if self._stopped:
                    return None
                work = queue.popleft()
                if isinstance(work[0], Future):
                    return work
                task, context = work
                if not self.schedule[task.stage].within:
                    break
                self._next_parts.append(task)
            waits_for = self._tasks.waits_for(task)
            # The set is shared with `_finish`, which empties it. Tasks that ended earlier are not in it.
            missing = self._awaited_by[thread] = self._unfinished.intersection(waits_for)
            wake.wait_for(lambda: self._stopped or (not missing and self._has_turn(task)))
            lane = self._lane_of[task.stage]
            # Within a lane its stream keeps the order.
            elsewhere = [other for other in waits_for if self._lane_of[other.stage] != lane]
            after = [self._events[other] for other in elsewhere if other in self._events]
            self._running[thread] = task
            return None if self._stopped else (task, context, after)

    def _has_turn(self, task: Task) -> bool:
        turn = self._turns.get(task)
        if turn is None:
            return True
        # the stages ahead of the next batch come first; who waits for this one submits none meanwhile
        comes_next = not self.schedule.ahead or max(self._submitted - 1, self._waited) >= turn[0]
        return comes_next and turn == min(self._turns.values())
