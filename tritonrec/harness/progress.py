"""How far a command is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from math import inf, isfinite
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn

from ..kernels.compilation import compiling
from .shown import say

LINE_SECONDS = 10.0
"""Seconds between two lines where the output is no terminal."""
FIRST_UPDATES, LEAST_UPDATES = 1, 3
"""Updates that fill the pipeline, which no figure counts; and the fewest that make one."""


class CommandProgress(Progress):
    """A bar that is gone at the end; where the output is no terminal, a line every `line_seconds`."""

    def __init__(self, console: Console, *columns: ProgressColumn, line_seconds: float = LINE_SECONDS):
        super().__init__(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *columns,
            console=console, transient=True, disable=console.quiet,
        )  # fmt: skip
        self._next_line, self._line_seconds = (0.0 if isfinite(line_seconds) else inf), line_seconds

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
        self._next_line = now + self._line_seconds
        task = self._tasks[task_id]
        of = "" if task.total is None else f" of {task.total:.0f}"
        loss = f", {task.fields['loss']}" if task.fields.get("loss") else ""
        line = f"{task.description}: {task.completed:.0f}{of}{loss}"
        say(self.console, line)


class Pace:
    """Seconds per step, without the updates that fill the pipeline or compile kernels; a context manager.

    Args:
        accumulate: steps of one update, which end together.
    """

    def __init__(self, accumulate: int = 1):
        self._accumulate = accumulate
        self._compiled = False
        self._current: list[float] = []
        self._updates = 0
        self._steady: list[float] = []

    def __enter__(self) -> Pace:
        compiling.append(self._on_compilation)
        return self

    def __exit__(self, *error: object) -> None:
        if self._on_compilation in compiling:
            compiling.remove(self._on_compilation)

    def on_step_end(self, step: int, seconds: float, last: bool) -> float | None:
        """Count a step; returns the seconds of each step of its update where that ends and is steady.

        Args:
            step: its number. last: no step of its update follows.
        """
        self._current.append(seconds)
        if not last and (step + 1) % self._accumulate:
            return None
        mean = sum(self._current) / len(self._current)
        self._current = []
        self._updates += 1
        compiled, self._compiled = self._compiled, False
        if compiled:
            compiling.append(self._on_compilation)
        if compiled or self._updates <= FIRST_UPDATES:
            return None
        self._steady.append(mean)
        return mean

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the steady updates; None where they are too few to say."""
        return median(self._steady) if len(self._steady) >= LEAST_UPDATES else None

    def _on_compilation(self) -> None:
        self._compiled = True
