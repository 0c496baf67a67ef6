"""A rank of a pool, in its own process: it serves tasks, and ends when its launcher does."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from .groups import Communicators
from .watch import Watch

ENTERING = "in `enter`, before it met the others"
MEETING = "waiting to meet the others"
WORKING = "at work"

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RankTask:
    """How a rank of a pool starts.

    Args:
        rank: among all of the pool. meshes: (world size, replicas) that it will work in.
        timeout, start_timeout, enter: see `RankPool`. store_port: of the launcher's `TCPStore`.
        launcher: process id. from_main_thread: whether the launcher's main thread has started this process.
    """

    rank: int
    meshes: tuple[tuple[int, int], ...]
    timeout: timedelta
    start_timeout: timedelta
    enter: Callable[[int], None] | None
    store_port: int
    launcher: int
    from_main_thread: bool


def serve(task: RankTask, connection: Connection, lifeline: Connection) -> None:
    """A rank's loop: take (function, mesh, arguments), answer ("ok", result) or ("error", text).

    On the way it sends ("at", place), so that a rank that hangs differs from those that wait for it.
    `lifeline` closes when the launcher ends; a message there is the number of a task that is to stop.
    """
    stop = _StopRequests()
    _end_with_launcher(task, lifeline, stop)
    stop.by_signals()
    torch.set_num_threads(1)
    try:
        world = max(task.meshes)[0]
        # Connected before `enter`, which may leave the launcher's network.
        store, reports = (client_of(task) if world > 1 else None for _ in range(2))
        if task.enter is not None:
            connection.send(("at", ENTERING))
            task.enter(task.rank)
        connection.send(("at", MEETING))
        if store is not None:
            _meet(store, task, world)
        watch = Watch(reports, task.rank, world, task.timeout)
        groups = {mesh: _groups(mesh, task.timeout, watch, stop.event) for mesh in task.meshes}
        connection.send(("ok", None))
        while True:
            request = connection.recv()
            if request is None:
                return
            stop.begin_task()
            watch.begin_task()
            connection.send(("at", WORKING))
            function, mesh, args = request
            try:
                connection.send(("ok", function(groups[mesh], *args)))
            except Exception as error:
                watch.fail(error)
                connection.send(("error", (f"{type(error).__name__}: {error}", traceback.format_exc())))
    except EOFError:
        pass
    except Exception as error:
        with suppress(OSError):
            connection.send(("error", (f"{type(error).__name__}: {error}", traceback.format_exc())))
    finally:
        if dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()


def server() -> dist.TCPStore:
    """A store on this machine's loopback interface, at a free port; it needs no folder."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def client_of(task: RankTask) -> dist.TCPStore:
    """A connection to the launcher's `server`."""
    return dist.TCPStore(LOOPBACK, task.store_port, None, False, task.start_timeout, wait_for_workers=False)


def _groups(
    mesh: tuple[int, int], timeout: timedelta, watch: Watch, stop: threading.Event
) -> Communicators | None:
    """This rank's groups; None where the mesh is without it."""
    if mesh == (1, 1):
        return replace(Communicators.local(), stop=stop)
    groups = Communicators.over(range(mesh[0]), timeout, mesh[1], watch=watch)
    return groups and replace(groups, stop=stop)


def _meet(store: dist.Store, task: RankTask, world: int) -> None:
    """Make the default process group once all ranks are there; they need not start within `timeout`."""
    store.set(f"rank {task.rank}", "here")
    store.wait([f"rank {each}" for each in range(world)], task.start_timeout)
    store.set_timeout(task.timeout)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=world, timeout=task.timeout)


def _end_with_launcher(task: RankTask, lifeline: Connection, stop: _StopRequests) -> None:
    """End this process when the launcher ends, by whatever signal.

    The pipe to the launcher closes then, on every Unix. On Linux the kernel kills the rank besides, also one
    that is stopped or that keeps the interpreter's lock. The kernel goes by the thread that started this
    process, so this is done for the launcher's main thread only: others end before their process.
    """

    def follow() -> None:
        while True:
            try:
                number = int(lifeline.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)
            stop.by_launcher(number)

    threading.Thread(target=follow, name="lifeline", daemon=True).start()
    if task.from_main_thread:
        end_with_parent()
        if os.getppid() != task.launcher:  # it ended before that, so no signal will come
            os._exit(1)


def end_with_parent() -> None:
    """On Linux, let the kernel kill this process when the thread that started it ends."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class _StopRequests:
    """Sets an event when the launcher or a signal asks this task to stop; the next task starts afresh."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._task = 0  # as `RankPool` counts those of this rank
        self._asked = 0  # the last task that was to stop
        self._signals = 0  # that came during this task

    def begin_task(self) -> None:
        """The next task begins; the launcher may have asked already."""
        self._task += 1
        self._signals = 0
        self.event.clear()
        if self._asked == self._task:
            self.event.set()

    def by_launcher(self, task: int) -> None:
        """Stop that task."""
        self._asked = task
        if self._task == task:
            self.event.set()

    def by_signals(self) -> None:
        """The first signal of a task asks it to stop after its step, the second ends this process.

        A terminal and `timeout` signal the launcher and its ranks at once: the launcher decides.
        """

        def ask(number: int, _frame: object) -> None:
            self._signals += 1
            if self._signals > 1:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            # The thread that is interrupted may hold the event's lock.
            threading.Thread(target=self.event.set, daemon=True).start()

        for number in STOP_SIGNALS:
            signal.signal(number, ask)
