"""How far a command is: a bar on a terminal, a line now and then elsewhere; and that kernels are compiled."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn

from ..kernels.caches import compiling

LINE_SECONDS = 10.0
"""Seconds between two lines where the output is no terminal."""
FIRST_STEPS, LEAST_STEPS = 3, 3
"""Steps that fill the pipeline and compile kernels, which no figure counts; and the fewest that make one."""


class CommandProgress(Progress):
    """A bar that is gone at the end; where the output is no terminal, a line every `LINE_SECONDS`."""

    def __init__(self, console: Console, *columns: ProgressColumn):
        super().__init__(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *columns,
            console=console, transient=True, disable=console.quiet,
        )  # fmt: skip
        self._next_line = 0.0

    def update(self, task_id: TaskID, **fields: Any) -> None:
        """As of `Progress`."""
        super().update(task_id, **fields)
        self._line(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """As of `Progress`."""
        super().advance(task_id, advance)
        self._line(task_id)

    def _line(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if self.disable or self.console.is_terminal or now < self._next_line:
            return
        self._next_line = now + LINE_SECONDS
        task = self._tasks[task_id]
        of = "" if task.total is None else f" of {task.total:.0f}"
        loss = f", {task.fields['loss']}" if task.fields.get("loss") else ""
        line = f"{task.description}: {task.completed:.0f}{of}{loss}"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def steady_seconds(seconds: Sequence[float], accumulate: int = 1) -> float | None:
    """Median of the steps after the first; None where they are too few to say.

    Args:
        seconds: of each step, in order. accumulate: steps that end together.
    """
    steady = seconds[max(FIRST_STEPS, 2 * accumulate) :]
    return median(steady) if len(steady) >= LEAST_STEPS else None


@cache
def announce_compilation() -> None:
    """Say once, on standard error, when kernels are compiled."""
    compiling.append(
        lambda: print("compiling kernels: on the first run only, up to a minute", file=sys.stderr, flush=True)
    )
