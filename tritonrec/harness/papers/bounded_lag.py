"""Bounded-lag synchronous all-to-alls (arXiv 2512.19342).

Latencies are meaningful on an idle machine only, and with a core for each rank: hence two ranks.
"""

from __future__ import annotations

from typing import Any

from .page import only

TWO = "Two ranks on two cores of one host"


def _lag(figures: Any) -> str:
    rows = [row for row in figures["rows"] if row["scenario"] == "delays" and row["backend"] == "bls"]
    return ", ".join(f"k = {row['k']}: {row['largest_lag']}" for row in rows)


def _latencies(figures: Any, scenario: str) -> str:
    """Milliseconds a batch of both backends, mean and half the width of the 95 % interval."""
    shown = []
    for backend in ("bls", "gloo"):
        rows = [only(figures["rows"], scenario=scenario, backend=backend, k=k) for k in (0, 1, 4)]
        shown.append(f"{backend} " + ", ".join("{:.2f} ± {:.2f}".format(*row["ms"]) for row in rows))
    return "; ".join(shown) + " ms at k = 0, 1, 4"


def _ratios(figures: Any, least: int, most: int) -> str:
    """bls over each other backend, mean of rounds, the smallest and the largest of the rows in a range."""
    rows = [row for row in figures["rows"] if least <= row["at"] <= most]
    shown = []
    for peer in ("gloo", "MPI"):
        found = [row["bls over"][peer] for row in rows if peer in row["bls over"]]
        if found:
            shown.append(f"{min(found):.2f} to {max(found):.2f} times {peer}'s time")
    return ", ".join(shown)


def _window(figures: Any) -> str:
    most = max(figures["bytes"], key=int)
    whole, least = figures["bytes"][most], figures["bytes"]["0"]
    return f"{(whole - least) / int(most) / 1e3:,.0f} KB for each k, {least / 1e3:,.0f} KB at k = 0"


FIGURES = {
    "Memory of a bound (V.F)": _window,
    "Bound k (III.D, Fig. 4): largest lag seen": _lag,
    "Fig. 6a: one all-to-all, k = 0, beside MPI, up to 4 KB": lambda f: _ratios(f, 1, 4096),
    "Fig. 6a: above 4 KB": lambda f: _ratios(f, 4097, 2**40),
    "Fig. 6b: 1 to 100,000 repetitions of 32 KB; from 10 on": lambda f: _ratios(f, 10, 10**6),
    "Fig. 6a between hosts of the lab, up to 4 KB": lambda f: _ratios(f, 1, 4096),
    "Fig. 6a between hosts of the lab, above 4 KB": lambda f: _ratios(f, 4097, 2**40),
    "Fig. 7, random delays of 0 to 10 ms": lambda f: _latencies(f, "delays"),
    "Fig. 7 between eight hosts of the lab, random delays": lambda f: _latencies(f, "delays"),
    "Fig. 8 between eight hosts of the lab, balanced": lambda f: _latencies(f, "balanced"),
    "Fig. 7 between eight hosts that compute 40 ms a batch": lambda f: _latencies(f, "delays"),
    "Fig. 8 between eight hosts that compute 40 ms a batch": lambda f: _latencies(f, "balanced"),
    "Fig. 7, heterogeneous sizes": lambda f: _latencies(f, "sizes"),
    "A straggler cannot be masked (VI.B)": lambda f: _latencies(f, "straggler"),
    "Fig. 8: Mini-Kaggle and Ali-CCP": lambda f: _latencies(f, "balanced"),
}
