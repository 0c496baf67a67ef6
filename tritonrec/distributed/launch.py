"""Start ranks: from torchrun's environment, or as a pool of local processes that runs functions."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from .communicator import TIMEOUT, Communicators

GRACE = 3.0
"""Seconds that the other ranks get to tell their story after one has failed."""


class RankDiedError(RuntimeError):
    """A rank ended, failed, or stayed silent beyond its timeout.

    The message has one line per rank that has something to say; `details` holds their tracebacks.
    """

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


@contextmanager
def from_environment(timeout: timedelta = TIMEOUT, replicas: int = 1):
    """Yield this process's `Communicators` as torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) say.

    `replicas` ranks hold the same part of the tables; they divide the world size.

    Without those variables, or with a world of one, the communicators are local. The process groups are
    destroyed on the way out, also after an error.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size % replicas:
        raise ValueError(f"{replicas} replicas do not divide {world_size} ranks")
    if world_size == 1:
        yield Communicators.local()
        return
    dist.init_process_group("gloo", timeout=timeout)
    try:
        yield Communicators.over(range(world_size), timeout, replicas)
    finally:
        dist.destroy_process_group()


def _serve(
    rank: int,
    meshes: tuple[tuple[int, int], ...],
    store: str,
    timeout: timedelta,
    connection: Connection,
    enter: Callable[[int], None] | None,
) -> None:
    """A rank's loop: take (function, mesh, arguments), answer ("ok", result) or ("error", text)."""
    torch.set_num_threads(1)
    try:
        if enter is not None:
            enter(rank)
        world = max(meshes)[0]
        if world > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout
            )
        groups = {
            mesh: Communicators.local()
            if mesh == (1, 1)
            else Communicators.over(range(mesh[0]), timeout, mesh[1])
            for mesh in meshes
        }
        connection.send(("ok", None))
        while True:
            request = connection.recv()
            if request is None:
                return
            function, mesh, args = request
            try:
                connection.send(("ok", function(groups[mesh], *args)))
            except Exception as error:
                connection.send(("error", (f"{type(error).__name__}: {error}", traceback.format_exc())))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception as error:
        with suppress(OSError):
            connection.send(("error", (f"{type(error).__name__}: {error}", traceback.format_exc())))
    finally:
        if dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()


class RankPool:
    """Local processes, one per rank, that stay up and run functions on the first `world_size` of them.

    Args:
        world_sizes: what `run` will be asked for: world sizes, or (world size, replicas). As many processes
            are started as the largest has ranks.
        timeout: a rank that waits longer for another in a collective raises.
        enter: called in each process with its rank, before it meets the others; picklable.

    Use as a context manager. Each process runs torch on one thread. After a `RankDiedError` the pool has to
    be closed: ranks may still wait for one that will not come.
    """

    def __init__(
        self,
        world_sizes: Iterable[int | tuple[int, int]],
        timeout: timedelta = TIMEOUT,
        enter: Callable[[int], None] | None = None,
    ):
        meshes = {(size, 1) if isinstance(size, int) else size for size in world_sizes}
        if not meshes or min(min(mesh) for mesh in meshes) < 1:
            raise ValueError(f"world sizes must be 1 or more, got {tuple(world_sizes)}")
        self.meshes = tuple(sorted(meshes))
        self.timeout = timeout
        self._directory = tempfile.TemporaryDirectory(prefix="tritonrec-")
        store = os.path.join(self._directory.name, "store")
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self.processes = []
        with _one_thread_each():
            for rank in range(self.meshes[-1][0]):
                here, there = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(rank, self.meshes, store, timeout, there, enter),
                    name=f"rank {rank}",
                    daemon=True,
                )
                process.start()
                there.close()
                self._connections.append(here)
                self.processes.append(process)
        self._ready = False

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, replicas: int = 1) -> list[Any]:
        """Call ``function(communicators, *args)`` on ranks 0..world_size-1 and return their results in order.

        `replicas` ranks hold the same part of the tables. `function` must be importable (it is pickled by
        name). Raises `RankDiedError` naming the rank when one raises, dies, or stalls beyond twice the pool's
        timeout after the first rank has answered.
        """
        mesh = (world_size, replicas)
        if mesh not in self.meshes:
            raise ValueError(f"this pool was started for (world size, replicas) {self.meshes}, not {mesh}")
        if not self._ready:
            self._collect(range(len(self.processes)), starting=True)
            self._ready = True
        request = pickle.dumps((function, mesh, args))
        for rank in range(world_size):
            try:
                self._connections[rank].send_bytes(request)
            except OSError as error:
                raise RankDiedError(self._obituary(rank)) from error
        return self._collect(range(world_size))

    def _collect(self, ranks: range, starting: bool = False) -> list[Any]:
        waiting = {self._connections[rank]: rank for rank in ranks}
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        details: dict[int, str] = {}
        deadline = None
        while waiting:
            # The first rank may work as long as it likes; the others must then follow within the timeout.
            # Once one has failed, the others can only wait for it in vain.
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([*waiting, *(self.processes[rank].sentinel for rank in waiting.values())], patience)
            if not ready:
                if not errors:
                    allowed = 2 * self.timeout
                    silent = sorted(waiting.values())
                    raise RankDiedError(f"ranks {silent} did not answer within {allowed} after the others")
                break
            for connection in [c for c in waiting if c in ready or c.poll()]:
                rank = waiting.pop(connection)
                try:
                    status, value = connection.recv()
                except (EOFError, OSError):
                    errors[rank] = self._obituary(rank)
                    continue
                if status == "ok":
                    results[rank] = value
                else:
                    line, details[rank] = value
                    errors[rank] = f"rank {rank}: {line}"
            for connection, rank in list(waiting.items()):
                if not self.processes[rank].is_alive() and not connection.poll():
                    del waiting[connection]
                    errors[rank] = self._obituary(rank)
            if errors:
                deadline = min(deadline or float("inf"), time.monotonic() + GRACE)
            elif deadline is None and not starting:
                deadline = time.monotonic() + 2 * self.timeout.total_seconds()
        if errors:
            # A rank that died explains the others' broken connections, so it is named first.
            first = sorted(errors, key=lambda rank: (self.processes[rank].is_alive(), rank))
            raise RankDiedError(
                "\n".join(errors[rank] for rank in first),
                "\n".join(f"rank {rank}:\n{details[rank]}" for rank in first if rank in details),
            )
        return [results[rank] for rank in ranks]

    def _obituary(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(timeout=5)
        return f"rank {rank} died (exit code {process.exitcode})"

    def close(self) -> None:
        """End the processes; those that do not end within two seconds are killed."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + 2
        for process in self.processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._directory.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def _one_thread_each():
    """Ranks share this machine's cores: one OpenMP thread each, and gloo on the loopback interface."""
    wanted = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _loopback()}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: value for name, value in wanted.items() if value})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _loopback() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), "")
