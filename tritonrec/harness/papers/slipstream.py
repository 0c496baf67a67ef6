"""Slipstream (Maboud, Mahajan, Adnan and Nair)."""

from __future__ import annotations

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


FIGURES = {
    "Figs 7, 8, Table III: at most 0.04 points lost, 2x over XDL": lambda f: _frontier(f, "half", 0.6),
    "The same after a warm-up of 2 %, as in the paper": lambda f: _frontier(f, "early", 0.6),
    "The same number dropped at random": lambda f: _frontier(f, "half", 0.6, at_random=True),
    "Fig. 10: online training": _online,
}
