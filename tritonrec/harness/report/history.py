"""Ratios of benchmarks over commits, and the steps in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WINDOW = 3


@dataclass(frozen=True)
class Step:
    """From run `run` on, a ratio is another: `before` and `after` are the values nearest to each other."""

    run: int
    before: float
    after: float

    @property
    def slower(self) -> bool:
        """Ratios are speed-ups, so less is slower."""
        return self.after < self.before


@dataclass(frozen=True)
class Series:
    """Ratios (runs,) of one row on one machine by one clock, with their commits."""

    name: str
    machine: str
    commits: list[str]
    ratios: list[float]


def steps(ratios: Sequence[float], window: int = WINDOW) -> list[Step]:
    """Where `window` runs in a row all lie on one side of all runs since the last step, at least `window`.

    Slower: their best is below the worst before. Faster: their worst is above the best before. A run that
    stands alone is never a step.
    """
    found: list[Step] = []
    start = 0
    for run in range(window, len(ratios) - window + 1):
        before, after = ratios[start:run], ratios[run : run + window]
        if len(before) < window:
            continue
        if max(after) < min(before):
            found.append(Step(run, min(before), max(after)))
            start = run
        elif min(after) > max(before):
            found.append(Step(run, max(before), min(after)))
            start = run
    return found


def series_of(runs: Sequence[dict[str, Any]]) -> list[Series]:
    """The lines of ``history.jsonl`` by row; runs of other machines or clocks are other series."""
    found: dict[tuple[str, str], Series] = {}
    for run in runs:
        made = run["provenance"]
        machine = f"{made['machine']}, {made['cores']} cores, {made.get('timer', 'wall')} clock"
        for name, ratio in run["ratios"].items():
            series = found.setdefault((name, machine), Series(name, machine, [], []))
            series.commits.append(made["commit"][:7])
            series.ratios.append(ratio)
    return list(found.values())
