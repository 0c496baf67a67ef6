"""One try: a configuration against its reference."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import torch

from ...data import DynamicStream, NextItemStream
from ...distributed import Communicators, RanksDisagreeError
from ...pipeline import schedule_of
from ..job import Job
from ..verify.contract import Verifier
from ..verify.run_case import prepared
from ..verify.thread_ranks import ThreadPool, run_ranks
from .configuration import Configuration
from .report import Failure, Try

REPEATS = 3
"""Further runs of a failing configuration, which tell a race from a wrong result."""
SWITCH_SECONDS = 2e-4


class Fuzzer:
    """Tries configurations on ranks that are threads of this process; a context manager.

    Args:
        count: called with every try that is no failure.
        fault: a name of `injection_of`, to be injected into every try; none by default.
    """

    def __init__(self, count: Callable[[Try], None], fault: str | None = None):
        self.count, self._fault = count, fault
        self._verifier = Verifier(Job(), ThreadPool())
        # Ranks are threads of small steps: they hand over often, and none starts threads for an operator.
        sys.setswitchinterval(SWITCH_SECONDS)
        torch.set_num_threads(1)

    def refusal(self, configuration: Configuration) -> str:
        """The message of the public check that refuses it, or its log; empty where none does."""

        def make(communicators: Communicators) -> None:
            with prepared(communicators, configuration.job, configuration.case) as (_, loader):
                if isinstance(loader, (NextItemStream, DynamicStream)):
                    for _ in range(configuration.case.steps):  # it may be too short for its ranks
                        next(loader)

        if refusal := _refusal_of_settings(configuration):
            return refusal
        try:
            run_ranks(configuration.world_size, make, configuration.replicas, configuration.nodes)
        except Exception as error:
            refused = isinstance(error, ValueError) and not isinstance(error, RanksDisagreeError)
            return str(error) if refused else ""
        return ""

    def evidence(self, configuration: Configuration) -> str:
        """What is wrong with a configuration; empty where it is refused or equal to its reference."""
        if refusal := _refusal_of_settings(configuration):
            self.count(Try(configuration, _without_numbers(refusal)))
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
            if not refusal:
                return wrong
            self.count(Try(configuration, _without_numbers(refusal)))
            return ""
        shown = tuple(name for name, count in result.counts.items() if count)
        self.count(Try(configuration, "", result.tensors_compared, result.bytes_compared, shown))
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
        schedule_of(case.mode, case.window(configuration.seed), case.replicas, case.nodes)
        configuration.job.loader()
    except ValueError as error:
        return str(error)
    return ""


def _without_numbers(message: str) -> str:
    return re.sub(r"-?\d+", "N", message)
