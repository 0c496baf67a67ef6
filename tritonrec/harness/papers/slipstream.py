"""Slipstream (Maboud, Mahajan, Adnan and Nair)."""

from __future__ import annotations

from statistics import median
from typing import Any

from .page import only


def _frontier(figures: Any, plan: str, drop: float, at_random: bool = False) -> str:
    """Mean and half the width of the 95 % interval over the seeds."""
    row = only(figures["rows"], plan=plan, drop=drop, at_random=at_random)
    form = "{:.2f} ± {:.2f} times the whole run, accuracy {:+.2f} ± {:.2f} and AUC {:+.2f} ± {:.2f} points"
    return form.format(*row["whole_speedup"], *row["accuracy"], *row["AUC"])


def _online(figures: Any) -> str:
    shown = (
        f"{row['whole_speedup']:.2f}x at {row['drop']:.0%}"
        for row in figures["rows"]
        if row["drop"] and not row["at_random"]
    )
    return ", ".join(shown) + " of the whole run"


def _rest(figures: Any) -> str:
    """Median over the rows, of each rule."""
    return "; ".join(
        f"{row['rule']}: median row at rest after {median(row['at_rest']):.0%} of {row['steps']:,} steps, "
        f"{median(row['moved_in_first_quarter']):.0%} of its way in the first quarter"
        for row in figures["rules"]
    )


def _beside_random(figures: Any) -> str:
    """Accuracy and AUC over those of all inputs, in points, by share dropped."""
    exact, *others = figures["rows"]
    shown = []
    for row in others:
        accuracy, area = (
            100 * (row["metrics"][name] - exact["metrics"][name]) for name in ("accuracy", "AUC")
        )
        how = f"{row['drop']:.0%}{' at random' if row['at_random'] else ''}"
        shown.append(f"{how}: {row['whole_speedup']:.2f}x, accuracy {accuracy:+.2f}, AUC {area:+.2f} points")
    return "; ".join(shown)


FIGURES = {
    "Fig. 3: hot rows come to rest": _rest,
    "Figs 7, 8 on a longer log, beside random dropping": _beside_random,
    "Figs 7, 8, Table III: at most 0.04 points lost, 2x over XDL": lambda f: _frontier(f, "half", 0.6),
    "The same after a warm-up of 2 %, as in the paper": lambda f: _frontier(f, "early", 0.6),
    "The same number dropped at random": lambda f: _frontier(f, "half", 0.6, at_random=True),
    "Fig. 10: online training": _online,
}
