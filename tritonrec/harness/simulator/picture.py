"""The PNG of `tritonrec simulate`: scaling curves, the sweep over micro-batch sizes, the parts of a step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ...files import atomic_write
from ...files.places import Place, place_of
from ...optional import pyplot
from .curves import OURS_2D, SWEEP_WORKERS, Point
from .paper import CELLS, ROWS, WINDOW, WORKERS

# Okabe and Ito's colours, told apart by the colour-blind.
COLOURS = {
    "TorchRec": "#777777",
    "2D-SP": "#56b4e9",
    "UniEmb": "#cc79a7",
    "NestPipe": "#0072b2",
    "NestPipe+2D-SP": "#009e73",
    "ours": "#e69f00",
    OURS_2D: "#d55e00",
}
PARTS = {
    "computation": "#999999",
    "exposed lookup": "#e69f00",
    "exposed communication": "#0072b2",
    "bubbles": "#dddddd",
}
FIG_7 = "TorchRec", "2D-SP", "UniEmb", "NestPipe"
SWEEP_COLOURS = {"plain": "#777777", "clustered": "#0072b2", "first use": "#d55e00"}


def draw(points: Sequence[Point], sweep: Sequence[Point], path: str | os.PathLike[str], about: str) -> Place:
    """Throughput over cluster size beside communication over micro-batch size, the paper's figures as dots.

    Below them the parts of a step.

    Args:
        points: of `curves.scaling`. sweep: of `curves.sweep`.
        path: where the PNG goes.
        about: one line below the title, what was simulated.
    """
    plt = pyplot()
    target = place_of(path)
    figure, axes = plt.subplot_mosaic(
        [["scaling", "sweep"], ["parts", "parts"]],
        figsize=(13, 9), width_ratios=[1.5, 1], height_ratios=[1.5, 1], layout="constrained",
    )  # fmt: skip
    try:
        _draw_scaling(axes["scaling"], points)
        _draw_sweep(axes["sweep"], sweep)
        _draw_parts(axes["parts"], points)
        figure.suptitle(f"Simulated cluster, fitted on TorchRec's rows alone; {about}", fontsize=11)
        with atomic_write(target) as part:
            figure.savefig(part, dpi=130, format="png")
    finally:
        plt.close(figure)
    return target


def _draw_scaling(axes: Any, points: Sequence[Point]) -> None:
    for method, colour in COLOURS.items():
        curve = [point for point in points if point.method == method]
        axes.plot(
            [point.workers for point in curve],
            [point.queries_per_second / 1e5 for point in curve],
            color=colour,
            lw=2 if "ours" in method else 1.4,
            label=method,
        )
        printed = [c for c in CELLS if (c.row, c.column) == (method, "QPS 1e5")]
        axes.plot([c.workers for c in printed], [c.value for c in printed], "o", color=colour, ms=4.5)
    first = next(point for point in points if point.method == OURS_2D)
    sizes = sorted({point.workers for point in points})
    ideal = [first.queries_per_second / 1e5 * size / first.workers for size in sizes]
    axes.plot(sizes, ideal, ":", color="#000000", lw=1, label="linear")
    axes.axvspan(sizes[0], WORKERS[-1], color="#000000", alpha=0.04, lw=0)
    axes.text(sizes[0] * 1.04, ideal[-1], "paper's sizes", va="top", fontsize=8, color="#555555")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
    ticks = [2.0**k for k in range(-2, 7)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("workers")
    axes.set_ylabel("samples per second / 100,000")
    axes.set_title("Throughput; dots: NestPipe's Tables III and IV", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.25)


def _draw_parts(axes: Any, points: Sequence[Point]) -> None:
    """A bar for each method at each of the paper's sizes, as its Fig. 7, which prints no figures."""
    places: list[int] = []
    labels: list[str] = []
    for group, workers in enumerate(WORKERS):
        for at, method in enumerate(FIG_7):
            outcome = next(p.outcome for p in points if (p.method, p.workers) == (method, workers))
            bottom, place = 0.0, group * (len(FIG_7) + 1) + at
            seen = outcome.compute, outcome.exposed_lookup, outcome.exposed, outcome.bubble
            for (part, colour), seconds in zip(PARTS.items(), seen, strict=True):
                axes.bar(
                    place, seconds * 1e3, 0.85, bottom * 1e3, color=colour, label=part if not places else None
                )
                bottom += seconds
            places.append(place)
            labels.append(f"{method}\n{workers:,}" if at == 1 else method)
    axes.set_xticks(places, labels, rotation=30, fontsize=7)
    axes.set_ylabel("ms of a step")
    axes.set_title("Fig. 7: parts of a step, by number of workers; the paper prints no figures", fontsize=10)
    axes.margins(y=0.12)
    axes.legend(fontsize=8, loc="upper left", ncols=len(PARTS))
    axes.grid(alpha=0.25, axis="y")


def _draw_sweep(axes: Any, sweep: Sequence[Point]) -> None:
    for method, colour in SWEEP_COLOURS.items():
        curve = sorted((p for p in sweep if p.method == method), key=lambda point: point.micro_batches)
        counts = [point.micro_batches for point in curve]
        for name, dashes, values in (
            ("physical", "-", [point.outcome.communication for point in curve]),
            ("exposed", "--", [point.outcome.exposed for point in curve]),
        ):
            seconds = [value * 1e3 for value in values]
            axes.plot(counts, seconds, dashes, color=colour, marker=".", label=f"{method}, {name}")
    for method, column in (("plain", "communication ms"), ("clustered", "exposed ms")):
        name = f"micro-batch 16, {method}"
        value = next(cell.value for cell in CELLS if (cell.row, cell.column) == (name, column))
        axes.plot(ROWS[name].plan.micro_batches, value, "o", color=SWEEP_COLOURS[method], ms=5)
    counts = sorted({point.micro_batches for point in sweep})
    axes.axvline(WINDOW, color="#000000", alpha=0.15, lw=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [f"{count}\n{512 // count}" for count in counts])
    axes.set_xlabel("N micro-batches (above), samples in one (below)")
    axes.set_ylabel("communication per step, ms")
    axes.set_title(f"Fig. 9: {SWEEP_WORKERS} workers; dots: what its text states", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.25)
