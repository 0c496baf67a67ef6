"""Steps that all ranks take or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .files import CheckpointError

Gather = Callable[[str], list[str]]
"""Collective: takes this rank's text, returns those of all ranks in rank order, on every rank."""


def alone(text: str) -> list[str]:
    """The `Gather` of a single rank."""
    return [text]


class Agreement:
    """Steps that all ranks take or none: each reports how it fared, and where one failed all raise.

    Attributes:
        reports: of all ranks about the last step, in rank order.
    """

    def __init__(self, gather: Gather, rank: int, failed: str):
        self.gather, self.rank, self.failed = gather, rank, failed
        self.reports: list[dict[str, Any]] = []

    @contextmanager
    def of_all(self, undo: Callable[[], None] | None = None) -> Iterator[dict[str, Any]]:
        """Yield this rank's report, to be filled by the step in the block."""
        report: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            yield report
        except Exception as error:
            failure = error
            report = {"error": f"rank {self.rank}: {error}"}
        try:
            self.reports = [json.loads(text) for text in self.gather(json.dumps(report))]
        except Exception as error:
            raise CheckpointError(
                f"{self.failed}: the ranks could not be brought together: {error!r}. "
                "The checkpoints before it are untouched"
            ) from error
        failures = [report["error"] for report in self.reports if "error" in report]
        if failure is None and not failures:
            return
        if undo and self.rank == 0:
            with suppress(OSError):
                undo()
        if failure is not None and not isinstance(failure, (OSError, CheckpointError)):
            raise failure
        raise CheckpointError(
            f"{self.failed}: {failure or failures[0]}. The checkpoints before it are untouched"
        ) from failure
