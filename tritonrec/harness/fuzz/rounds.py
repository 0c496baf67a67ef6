"""Rounds of a search, in this process or in several."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky

from ...pipeline import Mode
from .configuration import Configuration
from .fuzzer import Fuzzer
from .report import Failure, Try
from .strategies import configurations


class Mismatch(Exception):
    """A configuration ended in other bits than its reference, or in an error."""


class Asked(Protocol):
    """An event of threads, or of processes."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True)
class Round:
    """One search of Hypothesis.

    Args:
        seed, count: of the configurations that it draws. mode: of each; by default one is drawn.
        database: a folder of earlier failures. reuse: whether it begins with these.
        deadline: of `time.monotonic`, after which no configuration begins.
    """

    seed: int
    count: int
    mode: Mode | None
    database: Path | None
    reuse: bool
    deadline: float

    def run(
        self,
        fuzzer: Fuzzer,
        asked: Asked,
        begin: Callable[[Configuration], None] = lambda configuration: None,
    ) -> End:
        """Try configurations until one fails, which is made small; `begin` is called before each.

        It ends before the next configuration once `asked` is set.
        """
        failing: list[tuple[Configuration, str]] = []
        shrinking = 0

        @settings(
            max_examples=self.count, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False,
            database=DirectoryBasedExampleDatabase(self.database) if self.database else None,
            phases=(*(Phase.reuse,) * self.reuse, Phase.generate, Phase.shrink), report_multiple_bugs=False,
        )  # fmt: skip
        @hypothesis.seed(self.seed)  # which takes away the database of settings below it
        @given(configurations(self.mode))
        def tries(configuration: Configuration) -> None:
            nonlocal shrinking
            if asked.is_set() or (not failing and time.monotonic() >= self.deadline):
                return
            shrinking += bool(failing)
            begin(configuration)
            if evidence := fuzzer.evidence(configuration):
                failing[:] = [(configuration, evidence)]
                raise Mismatch(evidence)

        with suppress(Mismatch, Flaky):  # of a flaky one the repeats tell
            tries()
        return End(shrinking, fuzzer.failure(*failing[0]) if failing else None)


@dataclass(frozen=True)
class End:
    """That of a round: tries while a failing configuration was made smaller, and the failure."""

    shrinking: int = 0
    failure: Failure | None = None


class Rounds:
    """Rounds in processes of their own; a context manager, which ends the processes.

    A process that dies is a failure of the configuration that it was trying, and another takes its place.

    Args:
        processes: how many. fault: see `Fuzzer`. count: called here with every try that is no failure.
    """

    def __init__(self, processes: int, fault: str | None, count: Callable[[Try], None]):
        self._context = multiprocessing.get_context("spawn")
        self._asked, self._fault, self._count = self._context.Event(), fault, count
        self._idle = [self._worker() for _ in range(processes)]
        self._busy: dict[Connection, _Worker] = {}

    @property
    def idle(self) -> int:
        """Processes without a round."""
        return len(self._idle)

    @property
    def busy(self) -> int:
        """Processes with one."""
        return len(self._busy)

    @property
    def drawn(self) -> int:
        """Configurations of the rounds under way, the most that there can be."""
        return sum(max(worker.left, 0) for worker in self._busy.values())

    def begin(self, each: Round) -> None:
        """Give a round to an idle process."""
        worker = self._idle.pop()
        worker.left = each.count
        worker.connection.send(each)
        self._busy[worker.connection] = worker

    def wait(self, seconds: float) -> list[End]:
        """Count what is tried, for so many seconds at most or until a round ends."""
        ends = []
        for connection in wait([*self._busy], seconds):
            assert isinstance(connection, Connection)
            worker = self._busy[connection]
            try:
                said = connection.recv()
            except EOFError:
                ends.append(End(0, worker.crash()))
                self._idle.append(self._worker())
                del self._busy[connection]
                continue
            if isinstance(said, Configuration):
                worker.trying = said
            elif isinstance(said, Try):
                self._count(said)
                worker.left -= 1
            else:
                ends.append(said)
                self._idle.append(self._busy.pop(connection))
        return ends

    def ask(self) -> None:
        """Let every round end after its configuration."""
        self._asked.set()

    def _worker(self) -> _Worker:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(there, self._asked, self._fault), name="tritonrec fuzz", daemon=True
        )
        process.start()
        there.close()
        return _Worker(process, here)

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in (*self._idle, *self._busy.values()):
            worker.process.kill()
            worker.process.join()


@dataclass
class _Worker:
    process: Any
    connection: Connection
    trying: Configuration | None = None
    left: int = 0

    def crash(self) -> Failure:
        self.process.join()
        evidence = f"its process ended with exit status {self.process.exitcode}"
        if self.trying is None:
            raise RuntimeError(f"a search had no first configuration: {evidence}")
        return Failure(self.trying.as_json(), evidence, self.trying.command, 0)


def _work(connection: Connection, asked: Asked, fault: str | None) -> None:
    """Rounds, until the search is over; whoever stops it asks for the end of a round."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    with Fuzzer(connection.send, fault) as fuzzer, suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(connection.recv().run(fuzzer, asked, connection.send))
