"""A pytest session that has imported, collected and warmed its tests up, and forks a child for each mutant.

What numba compiles is loaded by running tests once: those that the mutants need most. The child gets the
mutant's functions (`swap.py`) and runs its tests until the first failure. A test that fails without a mutant
too is left out from then on; so are, until ``--again``, tests that start ranks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from swap import AtImport, Found, swap

AT_IMPORT = 77
"""Exit status of a child whose mutant wants a process of its own."""
BROKEN = 99
"""That of a child that could not begin, which is no verdict; its error is in ``errors.log``."""
EXIT = "exit status"
IDLE_SECONDS = 6.0
"""A child all of whose threads sleep for so long has hung: its tests wait for nothing but themselves."""
WARM_SECONDS = 60.0
"""Of the processor, for the tests that are run before the first mutant."""
LONGER, MORE_SECONDS = 4.0, 8.0
"""Of the processor: a test that takes so many times its seconds, and so many more, has hung."""
PATIENCE = 90.0
"""Seconds of a clock, beyond `LONGER` times the seconds of all tests."""
MEMORY = 12 << 30
"""Bytes of address space of a mutant."""
MOST_OF_RANKS = 3
RANKS = {"pool"}
"""Fixtures that start processes, which take seconds and are in no map of lines."""

Task = tuple[str, Path, str, str, dict[str, float]]
"""A mutant's name, its file in the copy, the text before and after, and the seconds of its tests."""


class WarmSession:
    """The loop of the session: tasks in, outcomes out.

    Args:
        tasks: what to judge. warm: names of tests to run before. end: of `time.monotonic`, after which no
            task begins. every: tests that start ranks run too, last.
        done: gets a task's name, the outcome (``killed``, ``survived``, ``timeout``, ``at import`` or ``no
            test``), the test that failed, the number of tests and the seconds of the processor.
    """

    def __init__(
        self,
        tasks: list[Task],
        warm: list[str],
        done: Callable[..., None],
        every: bool,
        scratch: Path,
        end: float,
    ):
        self.tasks, self.warm, self.done, self.every = tasks, warm, done, every
        self.scratch, self.end = scratch, end
        self.failure, self.bad, self.good = scratch / "failure", set[str](), set[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failure.exists():
            self.failure.write_text(report.nodeid)

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.warm_up()
        gc.collect()
        self.there = Found()
        gc.freeze()  # what a fork does not touch it need not copy
        for task in self.tasks:
            if time.monotonic() > self.end:
                break
            self.done(task[0], *self.judge(task))
        return True

    def warm_up(self) -> None:
        """Run tests of one thread: a child would wait for OpenMP's threads, which are none in a fork.

        Threads of the pipeline's lanes may stay: a child makes its own.
        """
        torch.set_num_threads(1)
        end = time.process_time() + WARM_SECONDS
        with mock.patch.object(torch, "set_num_threads", lambda count: None):
            for item in map(self.items.get, self.warm):
                if item is not None and not RANKS & set(item.fixturenames) and time.process_time() < end:
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
                    if self.failure.exists():
                        self.bad.add(item.nodeid)
                        self.failure.unlink()

    def judge(self, task: Task) -> tuple[str, str, int, float]:
        _, path, before, after, names = task
        total = 0.0
        while True:
            items = list(self.chosen(names))
            if not items:
                return "no test", "", 0, total
            path.write_text(after)
            try:
                outcome, by, cpu = self.run(items, names, lambda: swap(path, before, after, self.there))
            finally:
                path.write_text(before)
            total += cpu
            if outcome == "killed" and by in self.items and by not in self.good:
                plain, _, cpu = self.run([self.items[by]], names, lambda: None)
                total += cpu
                if plain != "survived":
                    self.bad.add(by)
                    continue
                self.good.add(by)
            if outcome == "timeout" or by.startswith(EXIT):
                plain, _, cpu = self.run(items, names, lambda: None)
                total += cpu
                if plain != "survived":
                    outcome = "at import"  # hung or ended by the fork itself
            return outcome, by, len(items), total

    def chosen(self, names: Iterable[str]) -> Iterator[Any]:
        items = [self.items[name] for name in names if name in self.items and name not in self.bad]
        yield from (item for item in items if not RANKS & set(item.fixturenames))
        if self.every:
            yield from islice((item for item in items if RANKS & set(item.fixturenames)), MOST_OF_RANKS)

    def run(
        self, items: list[Any], seconds: dict[str, float], install: Callable[[], None]
    ) -> tuple[str, str, float]:
        """(outcome, the test that failed, CPU seconds) of tests in a forked child."""
        self.failure.unlink(missing_ok=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        child = os.fork()
        if child == 0:
            self.run_child(items, seconds, install)
        hung = wait(child, PATIENCE + LONGER * sum(seconds[item.nodeid] for item in items))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # the group that the child has made, with all it started
        _, status = os.waitpid(child, 0)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        by = self.failure.read_text() if self.failure.exists() else ""
        code = os.waitstatus_to_exitcode(status)
        if code in (AT_IMPORT, BROKEN):
            return "at import", "", cpu
        if by:
            return "killed", by, cpu
        if hung or -code in (signal.SIGXCPU, signal.SIGKILL):
            return "timeout", "", cpu
        return ("survived", "", cpu) if code == 0 else ("killed", f"{EXIT} {code}", cpu)

    def run_child(self, items: list[Any], seconds: dict[str, float], install: Callable[[], None]) -> None:
        code = BROKEN
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            with open(os.devnull, "r+b") as nothing:
                for stream in (0, 1, 2):
                    os.dup2(nothing.fileno(), stream)
            items[0].config._tmp_path_factory._basetemp = Path(tempfile.mkdtemp(dir=self.scratch))
            try:
                install()
            except AtImport:
                os._exit(AT_IMPORT)
            code = 1
            for item, following in zip(items, [*items[1:], None], strict=True):
                limit = int(time.process_time() + LONGER * seconds[item.nodeid] + MORE_SECONDS)
                resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.failure.exists():
                    os._exit(1)
            code = 0
        except BaseException:
            with (self.scratch / "errors.log").open("a") as log:
                traceback.print_exc(file=log)
        finally:
            os._exit(code)


def wait(child: int, patience: float, idle: float = IDLE_SECONDS) -> bool:
    """Wait for its end; whether it had to be given up: asleep with all its session, or after `patience`."""
    began, asleep, last = time.monotonic(), None, 0
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.01 if time.monotonic() - began < 2 else 0.5)
        if time.monotonic() - began > 2:
            ticks, runs = _activity(child)
            now = time.monotonic()
            if runs or ticks > last + 10 or asleep is None:
                asleep, last = now, ticks
            if now - asleep > idle or now - began > patience:
                return True
    return False


def _activity(group: int) -> tuple[int, bool]:
    """Ticks of the processor of a session, and whether a thread of it runs or wants to."""
    ticks, runs = 0, False
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) != group:
                continue
            for task in (folder / "task").iterdir():
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                runs |= fields[0] in "RD"
                ticks += int(fields[11]) + int(fields[12])
        except (OSError, ValueError):
            continue
    return ticks, runs


def run_warm(
    copy: Path, tasks: list[Task], done: Callable[..., None], every: bool, scratch: Path, end: float
) -> None:
    """A session over the tests of `tasks` in the `copy`, in this process."""
    needed = Counter(name for task in tasks for name in task[4])
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a failing example need not be small
    hypothesis.settings.register_profile("mutants", phases=phases, database=None, deadline=None)
    hypothesis.settings.load_profile("mutants")
    files = sorted({name.partition("::")[0] for name in needed})
    os.chdir(copy)
    plugins = [WarmSession(tasks, [name for name, _ in needed.most_common()], done, every, scratch, end)]
    pytest.main(["-q", "--tb=no", "-p", "no:randomly", "--timeout=0", *files], plugins=plugins)
