"""Local processes of one call of `run_elastic`, each of which may be lost."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ..distributed.communicator import TIMEOUT
from ..distributed.fork_server import ForkedProcess, start_process
from ..distributed.groups import Communicators
from ..distributed.launch import GRACE, by_text, how_it_ended, join_or_kill, one_thread_each, require_room
from ..distributed.rank_process import StopRequests, follow, start_store, told
from ..distributed.stores import LOOPBACK
from ..distributed.watch import RankDiedError
from ..host_memory import keep_freed_memory
from ..settings import typed
from .elastic import run_elastic

TASK = 1
"""The number of a process's only task, by which it is stopped."""


@dataclass(frozen=True)
class ElasticTask:
    """The task of a process: ``function(communicators, *args)``, by `run_elastic`.

    Args:
        rank, world_size: at first. store_port: of the launcher's store, at which the first groups meet.
        timeout, replicas, min_ranks: see `run_elastic`.
    """

    rank: int
    world_size: int
    store_port: int
    timeout: timedelta
    replicas: int
    min_ranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...]


@typed
class ElasticPool:
    """Local processes, one per rank, that go on without those that are lost (`run_elastic`).

    Use as a context manager. Each process runs torch on one thread, and ends with this one. SIGINT, SIGTERM
    and SIGHUP stop all ranks after their step, as `request_stop` does; SIGKILL loses a rank.

    Args:
        world_size: at first. timeout, replicas, min_ranks: see `run_elastic`.
    """

    def __init__(self, world_size: int, timeout: timedelta = TIMEOUT, replicas: int = 1, min_ranks: int = 1):
        self.world_size, self.timeout, self.replicas, self.min_ranks = (
            world_size,
            timeout,
            replicas,
            min_ranks,
        )
        self.processes: list[ForkedProcess | BaseProcess] = []
        self._lifelines: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(communicators, *args)`` on the ranks, and again on those that are left.

        Returns the results of the ranks that are left at the end, in order. `function` and `args` are
        pickled; each process has a copy of its own from one call to the next. Raises `RankDiedError` where no
        rank has a result. One call for a pool.
        """
        require_room(self.world_size)
        store = start_store()
        connections: dict[Connection, int] = {}
        with one_thread_each():
            for rank in range(self.world_size):
                here, there = multiprocessing.Pipe()
                lifeline, own = multiprocessing.Pipe(duplex=False)
                task = ElasticTask(
                    rank, self.world_size, store.port, self.timeout, self.replicas, self.min_ranks,
                    function, args,
                )  # fmt: skip
                self.processes.append(start_process(f"rank {rank}", _serve, (there, lifeline), task))
                self._lifelines.append(own)
                connections[here] = rank
        return self._collect(connections)

    def _collect(self, waiting: dict[Connection, int]) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        details: dict[int, str] = {}
        sizes: dict[int, int] = {}  # by rank the world size of its last call
        # World sizes fall from groups to groups: the ranks of the
        # smallest are the newest, and only their answers are waited for.
        while waiting and _goes_on(sizes, [*waiting.values()]):
            limit = GRACE if errors and not sizes else None
            for connection in wait([*waiting], limit) or [*waiting]:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                kind, value = self._receive(connection, rank)
                if kind == "call":
                    sizes[rank] = value
                    continue
                del waiting[connection]
                connection.close()
                if kind == "ok":
                    results[rank] = value
                else:
                    errors[rank], details[rank] = value
        for connection in waiting:  # of ranks that stand still, and that the others have left
            connection.close()
        if not results:
            tracebacks = [f"rank {rank}:\n{each}" for rank, each in sorted(details.items())]
            raise RankDiedError("\n".join(by_text(errors)), "\n".join(tracebacks))
        return [results[rank] for rank in sorted(results)]

    def _receive(self, connection: Connection, rank: int) -> tuple[str, Any]:
        if not connection.poll():
            return "error", ("did not join the others", "")
        try:
            return connection.recv()
        except (EOFError, OSError):
            return "error", (f"died ({how_it_ended(self.processes[rank])})", "")

    def request_stop(self) -> None:
        """Set `Communicators.stop` on every rank, as `RankPool.request_stop` does."""
        for own in self._lifelines:
            with suppress(OSError):  # the rank has ended
                own.send_bytes(str(TASK).encode())

    def close(self) -> None:
        """End the processes; those that do not end within two seconds are killed."""
        join_or_kill(self.processes)
        for connection in self._lifelines:
            connection.close()

    def __enter__(self) -> ElasticPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _goes_on(sizes: Mapping[int, int], waiting: Sequence[int]) -> bool:
    """Whether a rank of the newest groups is among those that have not ended.

    Args:
        sizes: by rank the world size of its last call, which falls from groups to groups.
    """
    least = min(sizes.values(), default=0)
    newest = [rank for rank, size in sizes.items() if size == least]
    return not sizes or len(newest) < least or any(rank in newest for rank in waiting)


def _serve(connection: Connection, lifeline: Connection, task: ElasticTask) -> None:
    """A rank's process. It sends ("call", world size) at each call; at its end ("ok", result), or ("error",
    texts).
    """
    stop = StopRequests()
    stop.begin_task()
    follow(lifeline, stop)
    stop.install_signal_handlers()
    torch.set_num_threads(1)
    keep_freed_memory()
    # As torchrun sets them where its agent serves the store, so that rank 0 may be lost like any other.
    os.environ |= {
        "RANK": str(task.rank), "WORLD_SIZE": str(task.world_size),
        "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(task.store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip

    def call(communicators: Communicators) -> Any:
        connection.send(("call", communicators.world_size))
        return task.function(replace(communicators, stop=stop.event), *task.args)

    try:
        answer = ("ok", run_elastic(call, task.timeout, task.replicas, task.min_ranks))
    except Exception as error:
        answer = ("error", told(error))
    with suppress(OSError):  # the launcher has not waited for a rank that was left
        connection.send(answer)
