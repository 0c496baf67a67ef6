"""The search: configurations drawn by Hypothesis, tried against the reference until the time is over."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from ...pipeline import Mode
from ..progress import CommandProgress
from ..train.stopping import graceful_stop
from .configuration import Configuration
from .fuzzer import REPEATS, Fuzzer
from .report import Failure, FuzzReport, Try
from .rounds import End, Round, Rounds

MOST_FAILURES = 3
"""Found and made small, until the search ends."""
MOST_ROUNDS = 1_000_000
WAIT_SECONDS = 0.5
"""At most between two looks at the clock."""


def search(
    seconds: float,
    seed: int = 0,
    most: int | None = None,
    database: Path | None = None,
    fault: str | None = None,
    mode: Mode | None = None,
    console: Console | None = None,
    processes: int = 1,
) -> FuzzReport:
    """Try configurations for so many `seconds`, at `most` so many; progress and failures go to `console`.

    The first SIGINT or SIGTERM ends it after a configuration, with the report of those tried.

    Args:
        seed: equal ones draw equal configurations, after those of `database`, a folder of earlier failures.
        fault: injected into every try. mode: of every configuration; by default one is drawn.
        processes: that try configurations at the same time; with one it is this process. With several a
            process that dies is a failure, too.
    """
    console, began, report = console or Console(), time.monotonic(), FuzzReport(seed)
    asked, number = threading.Event(), 0

    def enough() -> bool:
        tried_all = most is not None and report.tried >= most
        return asked.is_set() or tried_all or len(report.failures) >= MOST_FAILURES

    def over() -> bool:
        return enough() or time.monotonic() - began >= seconds

    def next_round() -> Round:
        nonlocal number
        number += 1
        drawn = seed * MOST_ROUNDS + number - 1
        return Round(drawn, mode, database, reuse=number == 1, deadline=began + seconds)

    def count(tried: Try) -> None:
        if not enough():
            report.count(tried)
        progress.update(task, completed=report.tried, description=report.line)

    def end(each: End) -> None:
        report.shrinking += each.shrinking
        if each.failure is not None and report.add_failure(each.failure):
            _print_failure(each.failure, console)

    with ExitStack() as stack:
        stack.enter_context(graceful_stop(asked.set, "configuration"))
        progress = stack.enter_context(CommandProgress(console))
        task = progress.add_task("configurations", total=most)
        if processes == 1:
            fuzzer = stack.enter_context(Fuzzer(count, fault))
            while not over():
                end(next_round().run(fuzzer, enough, asked.is_set))
        else:
            rounds = stack.enter_context(Rounds(processes, fault, count))
            while not over() or rounds.busy:
                if enough():
                    rounds.finish(at_once=asked.is_set())
                while not over() and rounds.idle and (most is None or report.tried + rounds.busy < most):
                    rounds.begin(next_round())
                for each in rounds.wait(WAIT_SECONDS):
                    end(each)
    report.seconds = round(time.monotonic() - began, 1)
    _print(report, console)
    return report


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
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _print(report: FuzzReport, console: Console) -> None:
    pace = 60 * report.tried / max(report.seconds, 1e-9)
    console.print(
        f"{report.tried} configurations in {report.seconds:.0f} s, {pace:.0f} a minute: {report.line}; "
        f"{report.tensors} tensors and {report.bytes} bytes compared",
        soft_wrap=True,
    )
