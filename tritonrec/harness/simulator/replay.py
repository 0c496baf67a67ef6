"""The paper's cells beside the model's, and why a cell misses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from .fit import Model, model_value
from .measure import Outcome
from .paper import CELLS, ROWS, WORKERS, PaperCell, Row

AIM = 0.05


@dataclass(frozen=True)
class ReplayedCell:
    """A figure of the paper, the model's, and their relative difference; `why` where it exceeds `AIM`."""

    table: str
    row: str
    column: str
    workers: int
    cluster: str
    paper: float
    model: float
    error: float
    fitted: bool
    why: str | None

    @property
    def within(self) -> bool:
        """Whether the aim was met."""
        return abs(self.error) <= AIM


class Replay:
    """The fitted model asked for cells; outcomes are simulated once and remembered."""

    def __init__(self, model: Model, cells: Iterable[PaperCell] = CELLS):
        self.model, self._paper = model, tuple(cells)
        self._known: dict[tuple[str, int, Row], Outcome] = {}
        self.cells = [self._replay(cell) for cell in self._paper]

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
        value = self._value(cell)
        error = value / cell.value - 1
        why = self._why(cell, value) if abs(error) > AIM else None
        return ReplayedCell(
            cell.table, cell.row, cell.column, cell.workers, cell.cluster, cell.value, value, error,
            cell.fitted, why,
        )  # fmt: skip

    def _value(self, cell: PaperCell) -> float:
        return model_value(cell, self.model.workload.samples, self.outcome)

    def _error(self, table: str, row: str, column: str, workers: int) -> float | None:
        """The model's error at another cell of the industrial cluster; None where the paper prints none."""
        for cell in self._paper:
            if (cell.table, cell.row, cell.column, cell.workers) == (table, row, column, workers):
                return self._value(cell) / cell.value - 1
        return None

    def _paper_value(self, like: PaperCell, row: str, *columns: str) -> float | None:
        for cell in self._paper:
            same = (cell.row, cell.workers, cell.cluster) == (row, like.workers, like.cluster)
            if same and cell.column in columns and cell.table != "Table III":
                return cell.value
        return None

    def _why(self, cell: PaperCell, value: float) -> str:
        if cell.column == "lookup ms":
            return self._why_lookup(cell, value)
        if cell.column in ("communication ms", "exposed ms", "exposed %"):
            return self._why_communication(cell)
        return self._why_step(cell)

    def _why_lookup(self, cell: PaperCell, value: float) -> str:
        if ROWS[cell.row].plan.pipeline == "sequential":
            changes = [
                f"{c.value / base - 1:+.1%} ({c.workers} {c.cluster.upper()}s)"
                for c in self._paper
                if (c.row, c.column) == (cell.row, cell.column)
                and (base := self._paper_value(c, "TorchRec", "lookup ms")) is not None
            ]
            return (
                "sharding over fewer workers leaves the model's lookup alone; against TorchRec's the paper's "
                f"moves by {' and '.join(changes)}"
            )
        step = self._paper_value(cell, cell.row, "step ms")
        share = f", {cell.value / step:.1%} of its step" if step else ""
        copy = "the dual-buffer copy" if ROWS[cell.row].plan.pipeline == "nestpipe" else "nothing"
        return (
            f"mean costs expose {copy} ({value:.2f} ms) once every stage is shorter than a step; the paper "
            f"is left with {cell.value:.2f} ms{share}"
        )

    def _why_communication(self, cell: PaperCell) -> str:
        row, base = ROWS[cell.row], self.outcome(cell.cluster, cell.workers, ROWS["TorchRec"]).communication
        here, keys = self.outcome(cell.cluster, cell.workers, row), self.model.workload.keys
        plan, parts = row.plan, []
        total = self._paper_value(cell, cell.row, "communication ms")
        if total is None and plan.pipeline == "sequential":
            total = self._paper_value(cell, cell.row, "exposed ms")
        of = self._paper_value(cell, "TorchRec", "exposed ms")
        paper = f", the paper's {total / of:.2f}" if total and of else ""
        parts.append(f"the model's total is {here.communication / base:.2f} of TorchRec's{paper}")
        if plan.micro_batches > 1:
            payload = sum(keys.payload(plan.fractions, plan.clustered)) / keys.batch()
            parts.append(f"{payload:.2f} of it from the payload at N = {plan.micro_batches}")
        if plan.replicas > 1:
            exponent = self.model.clusters[cell.cluster].contention
            shrunk = plan.replicas**-exponent
            parts.append(f"{shrunk:.2f} from groups of a {plan.replicas}th (exponent {exponent:.2f})")
        if row.tokens:
            more = row.tokens * self.model.workload.samples / keys.draws
            grown = replace(keys, draws=keys.draws * more).batch() / keys.batch()
            parts.append(f"{grown:.2f} from {more:.0f} times the tokens")
        if cell.column != "communication ms":
            parts.append(f"exposed {here.exposed_ratio:.3f} of the total")
            if cell.column == "exposed ms" and total:
                parts[-1] += f", the paper {cell.value / total:.3f}"
            elif cell.column == "exposed %":
                total = total or self._paper_value(cell, "NestPipe", "communication ms")
                parts[-1] += f", the paper {cell.value / 100:.3f}"
                if total:
                    slower = self._at_total(cell, total / 1e3)
                    parts.append(f"with the paper's {total:.0f} ms in all the table exposes {slower:.3f}")
        return "; ".join(parts)

    def _at_total(self, cell: PaperCell, total: float) -> float:
        """Exposed ratio if the links were such that all communication of the row took `total` seconds."""
        here = self.outcome(cell.cluster, cell.workers, ROWS[cell.row])
        cluster = self.model.clusters[cell.cluster]
        links = replace(cluster, bandwidth=cluster.bandwidth * here.communication / total)
        model = replace(self.model, clusters={**self.model.clusters, cell.cluster: links})
        return model.predict(cell.cluster, cell.workers, ROWS[cell.row]).exposed_ratio

    def _why_step(self, cell: PaperCell) -> str:
        own = self._error("Table III", cell.row, "QPS 1e5", cell.workers)
        if own is None:
            return "the paper does not split this row"
        if cell.column == "speedup":
            other = self._error("Table III", "TorchRec", "QPS 1e5", cell.workers)
            return f"its own QPS is off by {own:+.1%}, TorchRec's, fitted, by {other:+.1%}"
        if cell.column == "scaling %":
            first = self._error("Table III", cell.row, "QPS 1e5", WORKERS[0])
            other = self._error("Table III", "TorchRec", "scaling %", cell.workers)
            return (
                f"QPS is off by {own:+.1%} here and {first:+.1%} at {WORKERS[0]} workers; TorchRec's "
                f"scaling, fitted, is off by {other:+.1%}"
            )
        if cell.column == "lookup share %":
            here = self.outcome(cell.cluster, cell.workers, ROWS[cell.row])
            implied = cell.value / 100 * cell.workers * self.model.workload.samples
            qps = next(
                c.value
                for c in self._paper
                if (c.row, c.column, c.workers) == (cell.row, "QPS 1e5", cell.workers)
            )
            return (
                f"lookup {here.exposed_lookup * 1e3:.0f} ms against {implied / qps / 1e5 * 1e3:.0f}: one "
                f"exponent serves lookup and links, QPS is off by {own:+.1%}"
            )
        return f"its own QPS is off by {own:+.1%}"


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
