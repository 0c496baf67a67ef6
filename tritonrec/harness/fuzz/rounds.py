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
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky

from ...pipeline import Mode
from .configuration import Configuration
from .fuzzer import Fuzzer
from .report import Failure, Try
from .strategies import configurations

ROUND = 25
"""Configurations drawn by one search of Hypothesis, which tends to stay near its last ones."""
START = "spawn"
"""The processes have threads, which no fork keeps."""


class Mismatch(Exception):
    """A configuration ended in other bits than its reference, or in an error."""


@dataclass(frozen=True)
class Round:
    """One search of Hypothesis.

    Args:
        seed: of the configurations that it draws. mode: of each; by default one is drawn.
        database: a folder of earlier failures. reuse: whether it begins with these.
        deadline: of `time.monotonic`, after which no configuration begins.
    """

    seed: int
    mode: Mode | None
    database: Path | None
    reuse: bool
    deadline: float

    def run(
        self,
        fuzzer: Fuzzer,
        enough: Callable[[], bool],
        asked: Callable[[], bool],
        begin: Callable[[Configuration], None] = lambda configuration: None,
    ) -> End:
        """Try `ROUND` configurations until one fails, which is made small; `begin` is called before each.

        Once there are `enough`, none begins but those that make the failing one small; once the end is
        `asked` for, none at all.
        """
        failing: list[tuple[Configuration, str]] = []
        shrinking = 0

        @settings(
            max_examples=ROUND, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False,
            database=DirectoryBasedExampleDatabase(self.database) if self.database else None,
            phases=(*(Phase.reuse,) * self.reuse, Phase.generate, Phase.shrink), report_multiple_bugs=False,
        )  # fmt: skip
        @hypothesis.seed(self.seed)  # which takes away the database of settings below it
        @given(configurations(self.mode))
        def tries(configuration: Configuration) -> None:
            nonlocal shrinking
            if asked() or (not failing and (enough() or time.monotonic() >= self.deadline)):
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
        processes: how many at most. fault: see `Fuzzer`.
        count: called here with every try that is no failure.
    """

    def __init__(self, processes: int, fault: str | None, count: Callable[[Try], None]):
        self._context: Any = multiprocessing.get_context(START)
        self._processes, self._fault, self._count = processes, fault, count
        self._enough, self._asked = self._context.Event(), self._context.Event()
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, _Worker] = {}

    @property
    def idle(self) -> int:
        """Processes without a round, some of which may not have begun."""
        return self._processes - len(self._busy)

    @property
    def busy(self) -> int:
        """Processes with one."""
        return len(self._busy)

    def begin(self, each: Round) -> None:
        """Give a round to an idle process."""
        worker = self._idle.pop() if self._idle else self._worker()
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
            except (EOFError, ConnectionResetError):
                del self._busy[connection]
                ends.append(End(0, worker.crash()))
                continue
            if isinstance(said, Configuration):
                worker.trying = said
            elif isinstance(said, Try):
                self._count(said)
            else:
                ends.append(said)
                self._idle.append(self._busy.pop(connection))
        return ends

    def finish(self, at_once: bool) -> None:
        """Let every round end after its configuration, or when its failing one is small."""
        self._enough.set()
        if at_once:
            self._asked.set()

    def _worker(self) -> _Worker:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=_work,
            args=(there, self._enough, self._asked, self._fault),
            name="tritonrec fuzz",
            daemon=True,
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

    def crash(self) -> Failure:
        self.process.join()
        evidence = f"its process ended with exit status {self.process.exitcode}"
        if self.trying is None:
            raise RuntimeError(f"a search had no first configuration: {evidence}")
        return Failure(self.trying.as_json(), evidence, self.trying.command, 0)


def _work(connection: Connection, enough: Any, asked: Any, fault: str | None) -> None:
    """Rounds, until the search is over. Signals are the parent's, which asks for the end of a round."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    with Fuzzer(connection.send, fault) as fuzzer, suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(connection.recv().run(fuzzer, enough.is_set, asked.is_set, connection.send))
