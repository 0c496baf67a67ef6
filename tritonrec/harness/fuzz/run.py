"""The search: configurations drawn by Hypothesis, tried against the reference until the time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky
from rich.console import Console

from ...pipeline import Mode
from ..progress import CommandProgress
from ..shown import say
from ..train.stopping import graceful_stop
from .configuration import Configuration
from .fuzzer import REPEATS, Fuzzer
from .report import Failure, FuzzReport, Try
from .strategies import configurations

ROUND = 25
"""Configurations drawn by one search of Hypothesis, which tends to stay near its last ones."""
MOST_FAILURES = 3
"""Found and made small, until the search ends."""
MOST_ROUNDS = 1_000_000


class Mismatch(Exception):
    """A configuration ended in other bits than its reference, or in an error."""


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
    console, began, report = console or Console(), time.monotonic(), FuzzReport(seed)
    asked = threading.Event()

    def over() -> bool:
        tried_all = most is not None and report.tried >= most
        enough = asked.is_set() or tried_all or len(report.failures) >= MOST_FAILURES
        return enough or time.monotonic() - began >= seconds

    def count(tried: Try) -> None:
        report.count(tried)
        progress.update(task, completed=report.tried, description=report.line)

    with ExitStack() as stack:
        stack.enter_context(graceful_stop(asked.set, "configuration"))
        progress = stack.enter_context(CommandProgress(console))
        task = progress.add_task("configurations", total=most)
        fuzzer = stack.enter_context(Fuzzer(count, fault))
        number = 0
        while not over():
            drawn = seed * MOST_ROUNDS + number
            failure = _round(fuzzer, report, drawn, mode, database, number == 0, over, asked.is_set)
            if failure is not None and report.add_failure(failure):
                _print_failure(failure, console)
            number += 1
    report.seconds = round(time.monotonic() - began, 1)
    _print(report, console)
    return report


def _round(
    fuzzer: Fuzzer,
    report: FuzzReport,
    seed: int,
    mode: Mode | None,
    database: Path | None,
    reuse: bool,
    over: Callable[[], bool],
    asked: Callable[[], bool],
) -> Failure | None:
    """One search of Hypothesis: the first configuration of `ROUND` that fails, made small.

    Once the search is `over`, none begins but those that make the failing one small; once its end is `asked`
    for, none at all. With `reuse` it begins with the failures of the `database`.
    """
    failing: list[tuple[Configuration, str]] = []

    @settings(
        max_examples=ROUND, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False,
        database=DirectoryBasedExampleDatabase(database) if database else None,
        phases=(*(Phase.reuse,) * reuse, Phase.generate, Phase.shrink), report_multiple_bugs=False,
    )  # fmt: skip
    @hypothesis.seed(seed)  # which takes away the database of settings below it
    @given(configurations(mode))
    def tries(configuration: Configuration) -> None:
        if asked() or (not failing and over()):
            return
        report.shrinking += bool(failing)
        if evidence := fuzzer.evidence(configuration):
            failing[:] = [(configuration, evidence)]
            raise Mismatch(evidence)

    with suppress(Mismatch, Flaky):  # of a flaky one the repeats tell
        tries()
    return fuzzer.failure(*failing[0]) if failing else None


def try_one(configuration: Configuration, fault: str | None, console: Console) -> FuzzReport:
    """Try one configuration; ValueError with the message of a check that refuses it."""
    report = FuzzReport(0)
    with Fuzzer(report.count, fault) as fuzzer:
        if refusal := fuzzer.refusal(configuration):
            raise ValueError(refusal)
        if evidence := fuzzer.evidence(configuration):
            report.add_failure(fuzzer.failure(configuration, evidence))
            _print_failure(report.failures[0], console)
    console.print(report.line)
    return report


def _print_failure(failure: Failure, console: Console) -> None:
    console.print(
        f"[red]failed:[/] {len(failure.configuration)} settings, {failure.repeated} of {REPEATS} repeats"
    )
    for line in (failure.evidence, failure.command):
        say(console, f"  {line}")


def _print(report: FuzzReport, console: Console) -> None:
    pace = 60 * report.tried / max(report.seconds, 1e-9)
    say(
        console,
        f"{report.tried} configurations in {report.seconds:.0f} s, {pace:.0f} a minute: {report.line}; "
        f"{report.tensors} tensors and {report.bytes} bytes compared",
    )
