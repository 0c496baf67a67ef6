"""The search: configurations drawn by Hypothesis, tried against the reference until the time is over."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky
from rich.console import Console

from ...data import DynamicStream, NextItemStream
from ...distributed import Communicators, RanksDisagreeError
from ...pipeline import Mode, schedule_of
from ..environment import environment
from ..job import Job
from ..progress import CommandProgress
from ..train.stopping import graceful_stop
from ..verify.contract import Verifier
from ..verify.run_case import prepared
from ..verify.thread_ranks import ThreadPool, run_ranks
from .configuration import Configuration
from .strategies import configurations

ROUND = 25
"""Configurations drawn by one search of Hypothesis, which tends to stay near its last ones."""
MOST_FAILURES = 3
"""Found and made small, until the search ends."""
REPEATS = 3
"""Further runs of a failing configuration, which tell a race from a wrong result."""
MOST_ROUNDS = 1_000_000
SWITCH_SECONDS = 2e-4
COVERED = (
    "mode", "consistency", "world_size", "replicas", "micro_batches", "optimizer", "storage", "restart",
    "model", "precision", "exchange_precision", "exchange_sums", "dedup", "accumulate", "first_use",
    "exchanges", "skip_fetch", "clustering", "depth", "dynamic", "streamed", "balance", "merge", "replay",
)  # fmt: skip
"""Settings whose values are counted."""


class Mismatch(Exception):
    """A configuration ended in other bits than its reference, or in an error."""


@dataclass(frozen=True)
class Failure:
    """A failing configuration.

    Args:
        configuration: the smallest found, its settings that differ from the simplest one.
        evidence: the first difference, or the error. command: tries it again.
        repeated: of `REPEATS` further runs, those that failed.
    """

    configuration: dict[str, Any]
    evidence: str
    command: str
    repeated: int


@dataclass
class FuzzReport:
    """What a search has tried.

    Args:
        identical: configurations, all different, that were equal to their references in every bit.
        refused: those that a public check refused before the first step, by its message without numbers.
        shrinking: further tries, while a failing configuration was made smaller.
        tensors, bytes: compared.
        covered: for each of `COVERED` how many of the identical configurations had each value.
        shown: for counts of rows and keys (evicted, kept, ...) how many of them had one above zero.
    """

    seed: int
    seconds: float = 0.0
    identical: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    shrinking: int = 0
    tensors: int = 0
    bytes: int = 0
    covered: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in COVERED})
    shown: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Configurations drawn, those that were refused among them."""
        return self.identical + self.refused.total() + len(self.failures)

    @property
    def line(self) -> str:
        """The counts, in words."""
        return f"{self.identical} identical, {self.refused.total()} refused, {len(self.failures)} failed"

    def as_json(self) -> dict[str, Any]:
        """With the most frequent messages and counts first."""
        return {
            "environment": environment(),
            "tried": self.tried,
            **asdict(self),
            "refused": dict(self.refused.most_common()),
            "shown": dict(self.shown.most_common()),
            "covered": {name: dict(sorted(values.items())) for name, values in self.covered.items()},
        }


class Fuzzer:
    """Tries configurations on ranks that are threads of this process; a context manager.

    Args:
        seed: of the report. fault: a name of `injection_of`, to be injected into every try; none by default.
    """

    def __init__(self, seed: int = 0, fault: str | None = None):
        self.report, self._fault = FuzzReport(seed), fault
        self._verifier = Verifier(Job(), ThreadPool())
        self._tried: set[Configuration] = set()

    def refusal(self, configuration: Configuration) -> str:
        """The message of the public check that refuses it before the first step; empty where none does."""

        def make(communicators: Communicators) -> None:
            with prepared(communicators, configuration.job, configuration.case) as (_, loader):
                if isinstance(loader, (NextItemStream, DynamicStream)):
                    next(iter(loader))  # it may be too short for its ranks

        if refusal := _refusal_of_settings(configuration):
            return refusal
        try:
            run_ranks(configuration.world_size, make, configuration.replicas)
        except Exception as error:
            refused = isinstance(error, ValueError) and not isinstance(error, RanksDisagreeError)
            return str(error) if refused else ""
        return ""

    def evidence(self, configuration: Configuration) -> str:
        """What is wrong with a configuration; empty where it is refused or equal to its reference."""
        counted = configuration not in self._tried
        self._tried.add(configuration)
        report = self.report
        if refusal := _refusal_of_settings(configuration):
            report.refused[_without_numbers(refusal)] += counted
            return ""
        try:
            result = self._verifier.run(configuration.case, self._fault)
            wrong = result.error or str(result.first_difference or "")
        except Exception as error:  # of the reference
            result, wrong = None, f"{type(error).__name__}: {error}"
        finally:
            self._verifier.forget()
        if result is None or not result.identical:
            refusal = "" if result and result.first_difference else self.refusal(configuration)
            if refusal:
                report.refused[_without_numbers(refusal)] += counted
                return ""
            return wrong
        if counted:
            report.identical += 1
            report.tensors += result.tensors_compared
            report.bytes += result.bytes_compared
            report.shown.update(name for name, count in result.counts.items() if count)
            for name, values in report.covered.items():
                values[str(getattr(configuration, name))] += 1
        return ""

    def failure(self, configuration: Configuration, evidence: str) -> Failure:
        """A failing configuration, tried again."""
        repeated = sum(bool(self.evidence(configuration)) for _ in range(REPEATS))
        return Failure(configuration.as_json(), evidence, configuration.command, repeated)

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._verifier.close()


def _refusal_of_settings(configuration: Configuration) -> str:
    """The message of a check that needs no trainer, empty where all pass. Makes the data, for all ranks."""
    try:
        case = configuration.case
        schedule_of(case.mode, case.window(configuration.seed), case.replicas)
        configuration.job.loader()
    except ValueError as error:
        return str(error)
    return ""


def _without_numbers(message: str) -> str:
    return re.sub(r"-?\d+", "N", message)


def search(
    seconds: float,
    seed: int = 0,
    most: int | None = None,
    database: Path | None = None,
    fault: str | None = None,
    mode: Mode | None = None,
    console: Console | None = None,
) -> FuzzReport:
    """Try configurations for so many `seconds`, at `most` so many; progress and failures go to `console`.

    The first SIGINT or SIGTERM ends it after a configuration, with the report of those tried.

    Args:
        seed: equal ones draw equal configurations, after those of `database`, a folder of earlier failures.
        fault: injected into every try. mode: of every configuration; by default one is drawn.
    """
    console, began, asked = console or Console(), time.monotonic(), threading.Event()
    _share_the_interpreter()
    with (
        graceful_stop(asked.set, "configuration"), Fuzzer(seed, fault) as fuzzer,
        CommandProgress(console) as progress,
    ):  # fmt: skip
        report = fuzzer.report
        task = progress.add_task("configurations", total=most)
        for number in range(MOST_ROUNDS):
            left = ROUND if most is None else min(ROUND, most - report.tried)
            over = asked.is_set() or time.monotonic() - began >= seconds
            if over or left <= 0 or len(report.failures) >= MOST_FAILURES:
                break
            tries = _Tries(fuzzer, began + seconds, asked, progress, task)
            tries.search(seed * MOST_ROUNDS + number, left, mode, database, reuse=not number)
            known = [each.configuration for each in report.failures]
            if tries.failing is not None and tries.failing.as_json() not in known:
                failure = fuzzer.failure(tries.failing, tries.evidence)
                report.failures.append(failure)
                _print_failure(failure, console)
    report.seconds = round(time.monotonic() - began, 1)
    _print(report, console)
    return report


def try_one(configuration: Configuration, fault: str | None, console: Console) -> FuzzReport:
    """Try one configuration; ValueError with the message of a check that refuses it."""
    _share_the_interpreter()
    with Fuzzer(fault=fault) as fuzzer:
        if refusal := fuzzer.refusal(configuration):
            raise ValueError(refusal)
        report, evidence = fuzzer.report, fuzzer.evidence(configuration)
        if evidence:
            report.failures.append(fuzzer.failure(configuration, evidence))
            _print_failure(report.failures[0], console)
    console.print(report.line)
    return report


class _Tries:
    """One search of Hypothesis; `failing` is the smallest configuration that failed, None where none did."""

    def __init__(
        self, fuzzer: Fuzzer, deadline: float, asked: threading.Event, progress: CommandProgress, task: Any
    ):
        self.fuzzer, self._deadline, self._asked = fuzzer, deadline, asked
        self._progress, self._task = progress, task
        self.failing: Configuration | None = None
        self.evidence = ""

    def search(self, seed: int, count: int, mode: Mode | None, database: Path | None, reuse: bool) -> None:
        @settings(
            max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False,
            database=DirectoryBasedExampleDatabase(database) if database else None,
            phases=(*(Phase.reuse,) * reuse, Phase.generate, Phase.shrink), report_multiple_bugs=False,
        )  # fmt: skip
        @hypothesis.seed(seed)  # which takes away the database of settings below it
        @given(configurations(mode))
        def tries(configuration: Configuration) -> None:
            self._try(configuration)

        with suppress(Mismatch, Flaky):  # of a flaky one the repeats tell
            tries()

    def _try(self, configuration: Configuration) -> None:
        if self._asked.is_set() or (self.failing is None and time.monotonic() >= self._deadline):
            return
        report = self.fuzzer.report
        if self.failing is not None:
            report.shrinking += 1
        evidence = self.fuzzer.evidence(configuration)
        self._progress.update(self._task, completed=report.tried, description=report.line)
        if evidence:
            self.failing, self.evidence = configuration, evidence
            raise Mismatch(evidence)


def _share_the_interpreter() -> None:
    """Ranks are threads of small steps: they hand over often, and none starts threads for an operator."""
    sys.setswitchinterval(SWITCH_SECONDS)
    torch.set_num_threads(1)


def _print_failure(failure: Failure, console: Console) -> None:
    console.print(
        f"[red]failed:[/] {len(failure.configuration)} settings, {failure.repeated} of {REPEATS} repeats"
    )
    for line in (failure.evidence, failure.command):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _print(report: FuzzReport, console: Console) -> None:
    pace = 60 * report.tried / max(report.seconds, 1e-9)
    console.print(
        f"{report.tried} configurations in {report.seconds:.0f} s, {pace:.0f} a minute: {report.line}; "
        f"{report.tensors} tensors and {report.bytes} bytes compared",
        soft_wrap=True,
    )
