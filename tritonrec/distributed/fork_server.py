"""A process that has imported the library and forks the ranks of pools.

The imports of a rank take seconds of processor time. Forked ranks share them, and their memory.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from .signals import STOP_SIGNALS, end_with_parent, held_back, let_in

LENGTH = 8
"""Bytes that tell the length of a call."""
MOST_HANDLES = 16
ANSWER_SECONDS = 60.0
"""Limit of what the server has to do at once: to read a call, to say a process id, to report an end."""


def start_process(
    name: str, function: Callable[..., None], connections: Sequence[Connection], *values: Any
) -> ForkedProcess | BaseProcess:
    """Start ``function(*connections, *values)`` in a process of its own, which ends with this one.

    It is forked from a `ForkServer` where this machine allows it, and spawned elsewhere. `function` must be
    importable and `values` picklable. The connections are closed here.
    """
    server = fork_server()
    if server is not None:
        return server.start(name, function, connections, *values)
    process = multiprocessing.get_context("spawn").Process(
        target=_spawned, args=(_parent(), function, connections, *values), name=name, daemon=True
    )
    with held_back():
        process.start()
    for each in connections:
        each.close()
    return process


class ForkServer:
    """A server of this process. It has the environment that this process has now.

    Its processes end with it, and it ends with this process, however that ends.
    """

    def __init__(self) -> None:
        self.environment, self.owner, self._lock = _environment(), os.getpid(), threading.Lock()
        self.forks = False  # it still imports, and no process was forked
        self._requests, there = socket.socketpair()
        self.process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(_parent(), there, _packages()), name="fork server", daemon=True
        )
        with held_back():
            self.process.start()
        there.close()
        self._requests.settimeout(ANSWER_SECONDS)  # of this end alone
        # At the interpreter's end: after pools have ended, before multiprocessing joins its processes.
        util.Finalize(self, self._requests.close, exitpriority=5)

    @property
    def usable(self) -> bool:
        """Whether this process has made it, it runs, and the environment has not changed since."""
        return self.owner == os.getpid() and self.environment == _environment() and self.process.is_alive()

    def start(
        self, name: str, function: Callable[..., None], connections: Sequence[Connection], *values: Any
    ) -> ForkedProcess:
        """Fork a process that calls ``function(*connections, *values)``; return at once.

        `function` must be importable and `values` picklable. The connections are closed here.
        """
        mine, there = multiprocessing.Pipe(duplex=False)
        # The server's own are those of its start; a forked process takes over what holds here now.
        state = (name, dict(os.environ), os.getcwd(), sys.path)
        # Two pickles: `function` is imported only once path and folder are those of the caller.
        call = pickle.dumps((state, pickle.dumps((function, values))))
        handed = [there, *connections]
        with self._lock:
            handles = [each.fileno() for each in handed]
            try:
                socket.send_fds(self._requests, [len(call).to_bytes(LENGTH, "little")], handles)
                self._requests.sendall(call)
            except TimeoutError as error:
                raise RuntimeError(_silent(self.process.pid)) from error
        for each in handed:
            each.close()
        return ForkedProcess(self, mine)


class ForkedProcess:
    """A process of a `ForkServer`, with those methods of `multiprocessing.Process` that a pool calls.

    Args:
        server: which lives as long. sentinel: where it sends the process id, and the exit code at the end.
    """

    def __init__(self, server: ForkServer, sentinel: Connection):
        self._server, self.sentinel = server, sentinel
        self._pid: int | None = None
        self.exitcode: int | None = None

    @property
    def pid(self) -> int | None:
        """None where the server has ended before the fork. Raises RuntimeError where it stands still."""
        if self._pid is None and self.exitcode is None:
            if not wait([self.sentinel], ANSWER_SECONDS):
                raise RuntimeError(_silent(self._server.process.pid))
            self._receive()
        return self._pid

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        self.join(0)
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for `timeout` seconds at most."""
        while self.exitcode is None and wait([self.sentinel], timeout):
            self._receive()

    def kill(self) -> None:
        """End it at once; a server that still imports, for which a second Ctrl-C would wait, ends with it."""
        if self.is_alive() and not self._server.forks:
            self._server.process.kill()
        elif self.exitcode is None and self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _receive(self) -> None:
        try:
            number = int(self.sentinel.recv_bytes())
        except (EOFError, OSError):  # the server has ended, and the kernel ends its processes with it
            self._server.process.join(1)
            self.exitcode = self._server.process.exitcode or -signal.SIGKILL
            return
        if self._pid is None:
            self._pid, self._server.forks = number, True
        else:
            self.exitcode = number


def _silent(pid: int | None) -> str:
    return (
        f"process {pid}, which forks the ranks of this one, has done nothing for {ANSWER_SECONDS:g} s: was "
        "it stopped?"
    )


_server: ForkServer | None = None
_starting = threading.Lock()


def fork_server() -> ForkServer | None:
    """This process's server, started with the first call; None where processes have to be spawned.

    That is so beside an accelerator, whose driver does not survive a fork, and on systems other than Linux.
    """
    global _server
    if sys.platform != "linux" or torch.accelerator.is_available():
        return None
    with _starting:
        if _server is None or not _server.usable:
            _server = ForkServer()  # the former one lives until its processes are forgotten
        return _server


def _environment() -> dict[str, str]:
    """The environment without pytest's variables, which name the test that runs, and without a folder that
    torch notes there when it first compiles something.
    """
    passing = "PYTEST_", "TORCHINDUCTOR_CACHE_DIR"
    return {name: value for name, value in os.environ.items() if not name.startswith(passing)}


def _packages() -> list[str]:
    """This library's packages that this process has imported. Their kernels' modules are not among them."""
    root = __name__.partition(".")[0]
    found = dict(sys.modules)  # other threads import
    return [
        name
        for name, module in found.items()
        if f"{name}.".startswith(f"{root}.") and hasattr(module, "__path__")
    ]


def _serve(parent: int | None, requests: socket.socket, packages: list[str]) -> None:
    """The server's loop: fork for each request, and report the ends of processes."""
    let_in(signal.SIG_IGN)  # a terminal sends them to all of a group; each rank decides for itself
    if parent is not None:
        end_with_parent(parent)
    torch.set_num_threads(1)
    for name in packages:
        importlib.import_module(name)
    torch.compiler.disable(_serve)  # imports torch's compiler, as the first optimizer of a process does
    gc.collect()
    gc.freeze()
    awake, wake = os.pipe()
    # A signal writes a byte into this pipe, so `select` below
    # wakes up for the end of a process as for a request.
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reports: dict[int, Connection] = {}  # by process id
    while True:
        ready, _, _ = select.select([requests.fileno(), awake], [], [])
        if awake in ready:
            os.read(awake, 4096)
            _report_ends(reports)
        if requests.fileno() in ready:
            header, handles, _, _ = socket.recv_fds(requests, LENGTH, MOST_HANDLES)
            if not header:  # the launcher has ended
                os._exit(0)  # without the destructors of all modules
            call = requests.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL)
            own = os.getpid()
            pid = os.fork()
            # A forked process has copies of all the server's handles. Those of
            # other processes are closed, or their ends would never be seen.
            if pid == 0:
                end_with_parent(own)
                signal.set_wakeup_fd(-1)
                requests.close()
                for report in reports.values():
                    report.close()
                for handle in (awake, wake, handles[0]):
                    os.close(handle)
                _run(call, handles[1:])
            for handle in handles[1:]:
                os.close(handle)
            reports[pid] = Connection(handles[0], readable=False)
            with suppress(OSError):  # forgotten already
                reports[pid].send_bytes(str(pid).encode())


def _spawned(parent: int | None, function: Callable[..., None], connections: Any, *values: Any) -> None:
    let_in(signal.SIG_DFL)  # as in a forked one
    if parent is not None:
        end_with_parent(parent)
    function(*connections, *values)


def _parent() -> int | None:
    """This process, if its main thread asks: the kernel takes the end of another thread for the process's."""
    return os.getpid() if threading.current_thread() is threading.main_thread() else None


def _report_ends(reports: dict[int, Connection]) -> None:
    for pid in list(reports):
        # Several ends may come as one signal: each process is asked.
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with reports.pop(pid) as report, suppress(OSError):
                report.send_bytes(str(os.waitstatus_to_exitcode(status)).encode())


def _run(call: bytes, handles: list[int]) -> None:
    """A forked process: call the function and exit."""
    code = 1
    try:
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        (name, environment, folder, path), task = pickle.loads(call)
        multiprocessing.current_process().name = name
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = path
        # The generators' states were copied by the fork: without this all ranks would draw alike.
        random.seed()
        np.random.seed()
        function, values = pickle.loads(task)
        function(*map(Connection, handles), *values)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
