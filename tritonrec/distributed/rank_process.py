"""The process of a pool's rank: it runs tasks, and ends with its launcher."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..host_memory import keep_freed_memory
from .communicator import PEER_FAILURE
from .groups import Communicators
from .signals import STOP_SIGNALS
from .stores import LOOPBACK, serve_store
from .watch import Watch, in_words, of_another_rank

ENTERING = "in `enter`, before the rendezvous"
RENDEZVOUS = "waiting for the other ranks to join"
WORKING = "at work"


@dataclass(frozen=True)
class RankTask:
    """Settings of a pool's rank.

    Args:
        rank: in the pool. meshes: (world size, replicas, nodes) of the groups to create.
        timeout, start_timeout, enter: see `RankPool`. store_port: of the launcher's `TCPStore`.
        backend: of the groups. token: in the names of the store's keys.
    """

    rank: int
    meshes: tuple[tuple[int, int, int], ...]
    timeout: timedelta
    start_timeout: timedelta
    enter: Callable[[int], None] | None
    store_port: int
    backend: str
    token: str


def serve(connection: Connection, lifeline: Connection, task: RankTask) -> None:
    """A rank's loop: receive (function, mesh, arguments), answer ("ok", result) or ("error", texts).

    An error that another rank caused is ("lost", texts).
    In between it sends ("phase", phase), to distinguish a rank that hangs from ranks that wait for it.
    `lifeline` closes when the launcher ends; a message on it is the number of a task to stop.
    """
    stop = StopRequests()
    follow(lifeline, stop)
    stop.install_signal_handlers()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        world = max(task.meshes)[0]
        # Connect before `enter`, which may leave the launcher's network.
        store, reports = (connect_store(task) if world > 1 else None for _ in range(2))
        if task.enter is not None:
            connection.send(("phase", ENTERING))
            task.enter(task.rank)
        connection.send(("phase", RENDEZVOUS))
        if store is not None:
            _rendezvous(store, task, world)
        watch = Watch(reports, task.rank, world, task.timeout, server=None)
        with _one_device() if len(task.meshes) > 1 else nullcontext():
            groups = {mesh: _groups(mesh, task, watch, stop.event) for mesh in task.meshes}
        connection.send(("ok", None))
        while True:
            request = connection.recv()
            if request is None:
                return
            stop.begin_task()
            watch.begin_task()
            connection.send(("phase", WORKING))
            function, mesh, args = request
            try:
                connection.send(("ok", function(groups[mesh], *args)))
            except Exception as error:
                watch.fail(error)
                connection.send(("lost" if is_lost(error) else "error", told(error)))
    except EOFError:
        pass
    except Exception as error:
        with suppress(OSError):
            connection.send(("error", told(error)))
    finally:
        if dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()


def told(error: BaseException) -> tuple[str, str]:
    """An error that is being handled: in one line, and its traceback."""
    return in_words(error), traceback.format_exc()


def is_lost(error: BaseException) -> bool:
    """Whether another rank caused the error, or the backend says so of a collective that nobody watched."""
    plain = type(error) is RuntimeError or isinstance(error, dist.DistError)
    return of_another_rank(error) is not None or (plain and PEER_FAILURE.search(str(error)) is not None)


def start_store() -> dist.TCPStore:
    """A store on this machine's loopback interface, at a free port."""
    return serve_store(LOOPBACK)


def connect_store(task: RankTask) -> dist.Store:
    """A connection to the launcher's store."""
    store = dist.TCPStore(LOOPBACK, task.store_port, None, False, task.start_timeout, wait_for_workers=False)
    return dist.PrefixStore(task.token, store)


@contextmanager
def _one_device() -> Iterator[None]:
    """Inside, groups of gloo share the thread that moves their messages.

    Each would have one of its own, which wakes up a hundred times a second while nothing comes: with the
    groups of fourteen meshes that is an eighth of a core for every rank. torch passes no options on to gloo.
    """
    plain: Any = c10d.ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    device = plain.create_device(interface=interface) if interface else plain.create_default_device()

    class OnOneDevice(plain):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
            options = plain._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 2
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnOneDevice  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = plain  # type: ignore[misc]


def _groups(
    mesh: tuple[int, int, int], task: RankTask, watch: Watch, stop: threading.Event
) -> Communicators | None:
    """This rank's groups; None where the mesh does not include it."""
    if mesh == (1, 1, 1):
        return replace(Communicators.local(), stop=stop)
    world_size, replicas, nodes = mesh
    groups = Communicators.over(range(world_size), task.timeout, replicas, task.backend, watch, nodes)
    return groups and replace(groups, stop=stop)


def _rendezvous(store: dist.Store, task: RankTask, world: int) -> None:
    """Create the default process group when all ranks have joined, within `start_timeout`."""
    store.set(f"rank {task.rank}", "here")
    store.wait([f"rank {each}" for each in range(world)], task.start_timeout)
    store.set_timeout(task.timeout)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=world, timeout=task.timeout)


def follow(lifeline: Connection, stop: StopRequests) -> None:
    """End this process when the launcher closes the pipe, and receive the numbers of tasks to stop."""

    def follow() -> None:
        while True:
            try:
                number = int(lifeline.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)
            stop.request(number)

    threading.Thread(target=follow, name="lifeline", daemon=True).start()


class StopRequests:
    """Sets an event when the launcher or a signal requests this task to stop; each task starts without."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._task = 0  # number of this rank's task, as in `RankPool`
        self._requested = 0  # the last task to stop
        self._signals = 0  # received during this task

    def begin_task(self) -> None:
        """Begin the next task; the launcher may have requested its stop already."""
        self._task += 1
        self._signals = 0
        self.event.clear()
        # The request may come before the task: it is kept by number, so that it stops no later one.
        if self._requested == self._task:
            self.event.set()

    def request(self, task: int) -> None:
        """Stop a task, by its number."""
        self._requested = task
        if self._task == task:
            self.event.set()

    def install_signal_handlers(self) -> None:
        """The first signal of a task stops it after its step, the second ends this process.

        A terminal and `timeout` signal the launcher and its ranks at once: the launcher decides.
        """

        def handle(number: int, _frame: object) -> None:
            self._signals += 1
            # The default action again, and the signal again: the process ends as if it had no handler.
            if self._signals > 1:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            # The interrupted thread may hold the event's lock.
            threading.Thread(target=self.event.set, daemon=True).start()

        for number in STOP_SIGNALS:
            signal.signal(number, handle)
