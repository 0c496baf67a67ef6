"""Phases of a save that succeed on all ranks or on none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .files import CheckpointError

Gather = Callable[[str], list[str]]
"""All-gather of texts: takes this rank's text, returns the texts of all ranks in rank order."""


def single_rank(text: str) -> list[str]:
    """The `Gather` of a single rank."""
    return [text]


class Agreement:
    """Phases that succeed on all ranks or on none: ranks exchange reports, and if one failed all raise.

    Attributes:
        reports: of all ranks about the last phase, in rank order.
    """

    def __init__(self, gather: Gather, rank: int, failed: str):
        self.gather, self.rank, self.failed = gather, rank, failed
        self.reports: list[dict[str, Any]] = []

    @contextmanager
    def phase(self, undo: Callable[[], None] | None = None) -> Iterator[dict[str, Any]]:
        """Yield this rank's report, to be filled in the block; on an error rank 0 calls `undo`."""
        report: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            yield report
        except Exception as error:
            failure = error
            # A failed rank takes part in the exchange as well, or the others would wait for it.
            report = {"error": f"rank {self.rank}: {error}"}
        try:
            self.reports = [json.loads(text) for text in self.gather(json.dumps(report))]
        except Exception as error:
            raise CheckpointError(
                f"{self.failed}: the ranks could not exchange their reports: {error!r}. "
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
