"""The paper's cells beside the model's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from .fit import Model, model_value
from .measure import Outcome
from .paper import CELLS, PaperCell, Row

AIM = 0.05


@dataclass(frozen=True)
class ReplayedCell:
    """A figure of the paper, the model's, and their relative difference."""

    table: str
    row: str
    column: str
    workers: int
    cluster: str
    paper: float
    model: float
    error: float
    fitted: bool

    @property
    def within(self) -> bool:
        """Whether the aim was met."""
        return abs(self.error) <= AIM


class Replay:
    """The fitted model asked for cells; outcomes are simulated once and remembered."""

    def __init__(self, model: Model, cells: Iterable[PaperCell] = CELLS):
        self.model = model
        self._known: dict[tuple[str, int, Row], Outcome] = {}
        self.cells = [self._replay(cell) for cell in cells]

    def outcome(self, cluster: str, workers: int, row: Row) -> Outcome:
        """One step of a row."""
        key = (cluster, workers, row)
        if key not in self._known:
            self._known[key] = self.model.predict(*key)
        return self._known[key]

    def unseen(self) -> list[ReplayedCell]:
        """The cells that the constants were not fitted on."""
        return [cell for cell in self.cells if not cell.fitted]

    def _replay(self, cell: PaperCell) -> ReplayedCell:
        value = model_value(cell, self.model.workload.samples, self.outcome)
        return ReplayedCell(
            cell.table, cell.row, cell.column, cell.workers, cell.cluster, cell.value, value,
            value / cell.value - 1, cell.fitted,
        )  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """Errors over some cells: how many, the median and the worst of their sizes, the share within the aim."""

    cells: int
    median: float
    worst: float
    within: float


def summarise(cells: Sequence[ReplayedCell]) -> Summary:
    """Summary of relative errors; of no cells, zeros."""
    sizes = [abs(cell.error) for cell in cells]
    if not sizes:
        return Summary(0, 0.0, 0.0, 0.0)
    return Summary(len(sizes), median(sizes), max(sizes), sum(c.within for c in cells) / len(sizes))


def as_json(replay: Replay) -> dict[str, Any]:
    """Constants, summaries and cells, with the keys that `tritonrec simulate --json` documents."""
    unseen = replay.unseen()
    tables = dict.fromkeys(cell.table for cell in unseen)
    return {
        "constants": {name: asdict(cluster) for name, cluster in replay.model.clusters.items()},
        "workload": asdict(replay.model.workload),
        "aim": AIM,
        "summary": {
            "fitted": asdict(summarise([cell for cell in replay.cells if cell.fitted])),
            "unseen": asdict(summarise(unseen)),
            "unseen_by_table": {
                table: asdict(summarise([cell for cell in unseen if cell.table == table])) for table in tables
            },
        },
        "cells": [asdict(cell) for cell in replay.cells],
    }
