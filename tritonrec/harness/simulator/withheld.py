"""NestPipe's rows predicted without its N, which the paper does not print.

N = 8 is read off the paper's exposed ratios of 12.3 to 13.0 %, so with it these rows are not blind. Here N is
every power of two up to `LARGEST`, and three readers choose one: from the exposed ratios, as `WINDOW`; from
the model alone, the fastest on the industrial cluster; from the GPUs' row alone, the one nearest to its step.
The cells are NestPipe's on the industrial cluster in Tables II to IV, which none but the first has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .fit import Model, model_value
from .measure import Outcome
from .paper import CELLS, ROWS, WINDOW, WORKERS, PaperCell, Row

LARGEST = 32
WHOLE = ("step ms", "QPS 1e5", "speedup", "scaling %")


@dataclass(frozen=True)
class Withheld:
    """Relative errors at one N: of steps and rates, and of exposed and physical times.

    Args:
        chosen_by: the readers that choose this N.
        step: the model's seconds of NestPipe's step at the largest size.
    """

    micro_batches: int
    chosen_by: tuple[str, ...]
    step: float
    whole_median: float
    whole_worst: float
    parts_median: float
    parts_worst: float


def withheld(model: Model, outcome: Callable[[str, int, Row], Outcome]) -> list[Withheld]:
    """One line for each N.

    Args:
        outcome: of a row on a cluster of so many workers, simulated.
    """
    counts = [2**power for power in range(LARGEST.bit_length())]
    npu = {count: outcome("npu", WORKERS[-1], _cut(ROWS["NestPipe"], count)).step for count in counts}
    gpu = {count: outcome("gpu", 128, _cut(ROWS["NestPipe"], count)).step for count in counts}
    paper = next(
        cell.value / 1e3
        for cell in CELLS
        if (cell.row, cell.cluster, cell.column) == ("NestPipe", "gpu", "step ms")
    )
    readers = {
        "exposed ratios": WINDOW,
        "fastest in the model": min(counts, key=lambda count: npu[count]),
        "the GPUs' step": min(counts, key=lambda count: abs(gpu[count] - paper)),
    }
    cells = [cell for cell in CELLS if cell.row.startswith("NestPipe") and cell.cluster == "npu"]
    return [
        Withheld(
            count,
            tuple(name for name, chosen in readers.items() if chosen == count),
            npu[count],
            *_errors(model, [cell for cell in cells if cell.column in WHOLE], count, outcome),
            *_errors(model, [c for c in cells if c.column not in (*WHOLE, "lookup ms")], count, outcome),
        )
        for count in counts
    ]


def _cut(row: Row, count: int) -> Row:
    """The row with windows of `count` micro-batches, where it has windows."""
    if row.plan.pipeline not in ("fwp", "nestpipe"):
        return row
    return replace(row, plan=replace(row.plan, micro_batches=count))


def _errors(
    model: Model, cells: list[PaperCell], count: int, outcome: Callable[[str, int, Row], Outcome]
) -> tuple[float, float]:
    """Median and worst size of the relative errors."""

    def run(cluster: str, workers: int, row: Row) -> Outcome:
        return outcome(cluster, workers, _cut(row, count))

    samples = model.workload.samples
    sizes = sorted(abs(model_value(cell, samples, run) / cell.value - 1) for cell in cells)
    return (sizes[(len(sizes) - 1) // 2] + sizes[len(sizes) // 2]) / 2, sizes[-1]
