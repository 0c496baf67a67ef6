"""2D sparse parallelism (Meta's article on DMPCollection, and arXiv 2508.03854)."""

from __future__ import annotations

from functools import partial
from typing import Any

from .page import Made, only


def _averaged(figures: Any) -> str:
    rows = [row for row in figures["replicas"] if row["copies"] == 2]
    return "; ".join(
        f"{'averaged every ' + str(row['average_every']) if row['average_every'] else 'exact'}: bytes "
        f"{row['bytes']:.2f}, loss {row['loss']:+.1%}"
        for row in rows
    )


def _behind(figures: Any) -> str:
    row = only(figures["summary"], model="fuxi", method="averaged")
    shown = (f"{name} {row[f'{name} minus synchronous']:+.4f}" for name in ("loss", "HR@10", "NDCG@10"))
    return "minus synchronous: " + ", ".join(shown)


def _minus_synchronous(figures: Any, kind: str) -> str:
    rows = [row for row in figures["summary"] if row["method"].rstrip("-0123456789") == kind]
    shown = (
        f"N = {row['method'][len(kind) + 1 :] or 1}: loss {row['loss minus synchronous']:+.4f}, HR@10 "
        f"{row['HR@10 minus synchronous']:+.4f} (deviation {row['HR@10 deviation']:.4f})"
        for row in rows
    )
    return "minus synchronous: " + "; ".join(shown)


_every = partial(_minus_synchronous, kind="averaged")
_scaled = partial(_minus_synchronous, kind="scaled")
_late = partial(_minus_synchronous, kind="late")
_scaled_late = partial(_minus_synchronous, kind="scaled-late")


FIGURES: Made = {
    "Weights averaged over replicas, `sync()` every N steps": _averaged,
    "Convergence of averaged copies": _behind,
    "The same with Adagrad, averaged every N steps": _every,
    "Optimizer states one round late (Adagrad)": _late,
    "The same with the moment scaled": _scaled_late,
    "Adagrad and row-wise Adagrad scaled by the moment (arXiv 2508.03854)": _scaled,
}
