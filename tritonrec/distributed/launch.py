"""Start of ranks as a pool of local processes that runs functions."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from ..files.places import require_current_folder
from ..room import memory_left
from ..settings import in_bytes
from .communicator import TIMEOUT
from .fork_server import ForkedProcess, start_process
from .groups import validate_division
from .rank_process import RENDEZVOUS, WORKING, RankTask, serve, start_store
from .reports import Report, read_reports
from .stores import loopback_interface, token
from .watch import RankDiedError

GRACE = 3.0
"""Seconds to wait for the other ranks' errors after one has failed."""

START_TIMEOUT = timedelta(minutes=5)
"""Timeout of the imports and the rendezvous of a pool's processes."""

RANK_BYTES = 128 << 20
"""Memory of a forked rank beside what it shares, once it has trained a step of the smallest model."""

CROWDED = 8
"""Ranks a processor from which a start warns."""

IMPORTING = "importing its modules"
READING = "reading its task"
_environment = threading.RLock()
"""Held while this process has the environment of ranks."""


Mesh = tuple[int, int, int]
"""World size, replicas of the tables, nodes."""


def whole_mesh(given: int | tuple[int, ...]) -> Mesh:
    """A world size alone, or with replicas, or with replicas and nodes.

    Raises ValueError for other numbers, and for those that make no ranks.
    """
    numbers = (given,) if isinstance(given, int) else given
    if not 1 <= len(numbers) <= 3 or numbers[0] < 1:
        raise ValueError(f"world sizes must be 1 or more, with replicas and nodes, got {given}")
    size, replicas, nodes = (*numbers, 1, 1)[:3]
    validate_division(size, replicas, nodes)
    return size, replicas, nodes


def require_room(ranks: int) -> None:
    """Raise ValueError where so many new processes do not fit into memory; warn where processors are few."""
    try:
        room = memory_left()
    except OSError:  # not Linux
        return
    if ranks * RANK_BYTES > room.left:
        raise ValueError(
            f"{ranks} ranks take {in_bytes(ranks * RANK_BYTES)} to start, and {room.of} has "
            f"{in_bytes(room.left)} left: start {max(room.left // RANK_BYTES, 0)} at most"
        )
    processors = len(os.sched_getaffinity(0))
    if ranks > CROWDED * processors:
        warnings.warn(
            f"{ranks} ranks share {processors} processors, and may start slowly", RuntimeWarning, stacklevel=4
        )


class RankPool:
    """Local processes, one per rank, that stay up and run functions on the first `world_size` of them.

    Args:
        world_sizes: of later calls of `run`: world sizes, (world size, replicas) or (world size, replicas,
            nodes). The largest one decides the number of processes.
        timeout: of collectives: a rank that waits longer for another one raises.
        enter: called in each process with its rank, before the rendezvous; picklable.
        start_timeout: for all ranks to start, run `enter` and join, and later to read the task of `run`.
        backend: of the groups, as in `Communicators.over`.

    Use as a context manager. Each process runs torch on one thread. It ends with this process, however that
    ends, or when the pool is garbage collected. SIGINT, SIGTERM and SIGHUP stop a rank after its step, as
    `request_stop` does; a second signal ends it at once. After a `RankDiedError` close or restart the
    pool: ranks may still wait for a missing one.

    Limits of waits::

        until all ranks have joined      start_timeout, from the pool's creation
        until all have read their task   start_timeout, from the call of `run`
        in a collective                  timeout: the rank that waits raises, and the call ends
        for work outside collectives     none: an hour of training must not count as a stall
        after the first rank's answer    twice the timeout
        after the first rank's failure   `GRACE`

    So a rank that stalls in a collective is an error after `timeout` and at most 10 seconds, including the
    end of all processes in `close`.
    """

    def __init__(
        self,
        world_sizes: Iterable[int | tuple[int, ...]],
        timeout: timedelta = TIMEOUT,
        enter: Callable[[int], None] | None = None,
        start_timeout: timedelta = START_TIMEOUT,
        backend: str = "gloo",
    ):
        meshes = {whole_mesh(size) for size in world_sizes}
        if not meshes:
            raise ValueError("a pool needs a world size, got none")
        self.meshes = tuple(sorted(meshes))
        self.timeout, self.start_timeout, self._enter = timeout, start_timeout, enter
        self._backend = backend
        self._start()

    def _start(self) -> None:
        require_current_folder()
        ranks = self.meshes[-1][0]
        require_room(ranks)
        served = start_store() if ranks > 1 else None
        port, secret = 0 if served is None else served.port, token()
        self._store = None if served is None else dist.PrefixStore(secret, served)
        self._connections: list[Connection] = []
        self._lifelines: list[Connection] = []
        self.processes: list[ForkedProcess | BaseProcess] = []
        self._started = time.monotonic()
        with one_thread_each():
            for rank in range(ranks):
                here, there = multiprocessing.Pipe()
                # A rank that reads the end of its lifeline ends:
                # it closes with this process, however that ends.
                lifeline, own = multiprocessing.Pipe(duplex=False)
                task = RankTask(
                    rank, self.meshes, self.timeout, self.start_timeout, self._enter, port, self._backend,
                    secret,
                )  # fmt: skip
                self.processes.append(start_process(f"rank {rank}", serve, (there, lifeline), task))
                self._connections.append(here)
                self._lifelines.append(own)
        # At the interpreter's end this runs before multiprocessing joins its processes.
        util.Finalize(self, _close_lifelines, (self._lifelines,), exitpriority=10)
        self._ready = False
        self._tasks = [0] * ranks  # number of tasks sent to each rank
        self._sending: list[threading.Thread] = []  # by rank; a rank that does not read blocks its thread

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        replicas: int = 1,
        nodes: int = 1,
    ) -> list[Any]:
        """Call ``function(communicators, *args)`` on ranks 0..world_size-1 and return their results in order.

        `replicas` and `nodes` as in `Communicators.over`. `function` must be importable (it is pickled by
        name). Raises `RankDiedError` naming the ranks that raised, died, or did not answer within the class's
        limits, with their phase or stage.
        """
        mesh = (world_size, replicas, nodes)
        if mesh not in self.meshes:
            raise ValueError(
                f"this pool was started for (world size, replicas, nodes) {self.meshes}, not {mesh}"
            )
        for rank in range(world_size):
            self._tasks[rank] += 1
        if not self._ready:
            self._collect(range(len(self.processes)), IMPORTING, self._started)
            self._ready = True
        request, since = pickle.dumps((function, mesh, args)), time.monotonic()
        self._sending = [
            threading.Thread(target=_send, args=(connection, request), daemon=True)
            for connection in self._connections[:world_size]
        ]
        for thread in self._sending:
            thread.start()
        return self._collect(range(world_size), READING, since)

    def request_stop(self) -> None:
        """Set `Communicators.stop` on every rank; a task that checks it stops after its step.

        Returns at once. Signal handlers and other threads may call it while `run` waits.
        """
        for own, task in zip(self._lifelines, self._tasks, strict=True):
            with suppress(OSError):  # the rank has ended
                own.send_bytes(str(task).encode())

    def _collect(self, ranks: range, phase: str, since: float) -> list[Any]:
        """Answers of `ranks`, which were all in `phase` at the time `since`."""
        waiting = {self._connections[rank]: rank for rank in ranks}
        phases = dict.fromkeys(ranks, phase)
        results: dict[int, Any] = {}
        died: dict[int, str] = {}
        errors: dict[int, str] = {}
        lost: dict[int, str] = {}  # errors that follow from another rank's
        details: dict[int, str] = {}
        answer_deadline = float("inf")  # of the other ranks, after the first has answered or failed
        while waiting:
            # Three limits (see the class): of the start, of the
            # others' answers after the first, and none for work.
            deadline = answer_deadline
            if any(phases[rank] != WORKING for rank in waiting.values()):
                deadline = min(deadline, since + self.start_timeout.total_seconds())
            timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
            ready = wait([*waiting, *(self.processes[rank].sentinel for rank in waiting.values())], timeout)
            if not ready:
                break
            for connection in [c for c in waiting if c in ready or c.poll()]:
                rank = waiting[connection]
                try:
                    status, value = connection.recv()
                except (EOFError, OSError):
                    status, value = "died", self._exit_message(rank, phases[rank])
                if status == "phase":
                    phases[rank] = value
                    continue
                del waiting[connection]
                if status == "ok":
                    results[rank] = value
                elif status == "died":
                    died[rank] = value
                else:
                    line, details[rank] = value
                    (lost if status == "lost" else errors)[rank] = line
            # A process may have ended without an answer; what it sent before is read first (`poll`).
            for connection, rank in list(waiting.items()):
                if not self.processes[rank].is_alive() and not connection.poll():
                    del waiting[connection]
                    died[rank] = self._exit_message(rank, phases[rank])
            if died or errors or lost:
                answer_deadline = min(answer_deadline, time.monotonic() + GRACE)
            elif results and phase == READING:
                answer_deadline = min(answer_deadline, time.monotonic() + 2 * self.timeout.total_seconds())
        if died or errors or lost or waiting:
            silent = self._describe_silent({rank: phases[rank] for rank in waiting.values()}, since)
            # Ranks that failed by themselves; or what one of the others has found, and who did not answer.
            lines = [died[rank] for rank in sorted(died)] + by_text(errors)
            lines = lines or [*by_text(dict(sorted(lost.items())[:1])), *silent]
            first = [*sorted(errors), *sorted(lost)]
            raise RankDiedError(
                "\n".join(lines),
                "\n".join([*(f"rank {rank}:\n{details[rank]}" for rank in first), *silent]),
            )
        return [results[rank] for rank in ranks]

    def _describe_silent(self, phases: dict[int, str], since: float) -> list[str]:
        """A line for each rank that did not answer, except ranks that only waited for one of these."""
        lagging = [rank for rank, phase in phases.items() if phase not in (RENDEZVOUS, WORKING)]
        waited, reports = time.monotonic() - since, self._reports(list(phases))
        return [
            f"rank {rank} did not answer within {waited:.1f} s: it was {phases[rank]}"
            + (f", last seen {reports[rank].place}, {reports[rank].age}" if rank in reports else "")
            for rank in sorted(lagging or phases)
        ]

    def _exit_message(self, rank: int, phase: str) -> str:
        how = how_it_ended(self.processes[rank])
        where = "" if phase == WORKING else f": it was {phase}"
        report = self._reports([rank]).get(rank) if phase == WORKING else None
        if report is not None and (report.doing or report.last):
            where = f": it was last seen {report.place}, {report.age}"
        return f"rank {rank} died ({how}){where}"

    def _reports(self, ranks: Sequence[int]) -> dict[int, Report]:
        """The last reports of ranks, none where the store does not answer."""
        if self._store is not None:
            with suppress(RuntimeError):
                return read_reports(self._store, ranks)
        return {}

    def restart(self) -> None:
        """End the processes and start new ones, after a `RankDiedError` for example."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the processes; those that do not end within two seconds are killed."""
        for rank, connection in enumerate(self._connections):
            if rank < len(self._sending) and self._sending[rank].is_alive():
                self.processes[rank].kill()
                continue
            with suppress(OSError):
                connection.send(None)
        join_or_kill(self.processes)
        for connection in [*self._connections, *self._lifelines]:
            connection.close()
        self._store = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def how_it_ended(process: ForkedProcess | BaseProcess) -> str:
    """The signal or the exit code of a process that has ended, in words."""
    process.join(timeout=5)
    code = process.exitcode
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def join_or_kill(processes: Sequence[ForkedProcess | BaseProcess]) -> None:
    """Wait for processes that are about to end; those that do not within two seconds are killed."""
    deadline = time.monotonic() + 2
    for process in processes:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(GRACE)  # a server that was stopped reports no end


def by_text(errors: dict[int, str]) -> list[str]:
    """A line for each error, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        ranks.setdefault(text, []).append(rank)
    return [f"rank{'s'[: len(each) > 1]} {', '.join(map(str, each))}: {text}" for text, each in ranks.items()]


def _close_lifelines(lifelines: list[Connection]) -> None:
    """End the ranks of a pool that was not closed."""
    for own in lifelines:
        own.close()


def _send(connection: Connection, request: bytes) -> None:
    with suppress(OSError):  # the rank died; the wait for its answer reports this
        connection.send_bytes(request)


@contextmanager
def one_thread_each():
    """Environment of ranks on one machine: one OpenMP thread each, and gloo on the loopback interface.

    Warnings of torch's C++ parts are left out, which print a stack when another rank has ended. Threads that
    start pools take turns.
    """
    with _environment:
        variables = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        variables["GLOO_SOCKET_IFNAME"] = loopback_interface()
        variables["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update({name: value for name, value in variables.items() if value})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
