"""Slipstream (Maboud, Mahajan, Adnan and Nair)."""

from __future__ import annotations

from typing import Any

from .row import Row, only


def _run(figures: Any, at_random: bool) -> str:
    exact, *others = figures["rows"]
    found = only(others, at_random=at_random)
    lost = (exact["metrics"]["accuracy"] - found["metrics"]["accuracy"]) * 100
    return f"{found['whole_speedup']:.2f}x the whole run, {lost:.2f} points of accuracy lost"


ROWS = [
    Row(
        "Fig. 1, 2: shares of training time, skewed accesses",
        "not here",
        "Of GPUs and logs that are not here; the drawn logs have Criteo's and Avazu's shapes",
        link="dlrm.md",
    ),
    Row(
        "Fig. 4 and Table I: phases and notation",
        "works",
        "The page has the phases and each symbol's option",
        link="slipstream.md#use",
    ),
    Row("Table II: machines", "not here", "Two cores of a CPU"),
    Row("Hot rows by their share of accesses, λ (III.A)", "works", "", link="slipstream.md#use"),
    Row(
        "Warm-up and N snapshots (III.A, Fig. 3)",
        "works",
        "Snapshots n - 1 and n are kept",
        link="slipstream.md#differences-from-the-paper",
    ),
    Row(
        "Stale rows (eq. 1)",
        "differs",
        "A change of exactly T counts as varying, so T = 0 is exact",
        link="slipstream.md#differences-from-the-paper",
    ),
    Row(
        "Drop share, deviation, Student's interval (eq. 2 to 4)",
        "differs",
        "Of the hot inputs, with m - 1",
        link="slipstream.md#differences-from-the-paper",
    ),
    Row(
        "Sampling block (III.C, Figs 5, 6): over 1,000 times faster",
        "differs",
        "Equation 5 needs every hot input's change anyway; a sample shortens only the search for T",
        link="slipstream.md#differences-from-the-paper",
    ),
    Row(
        "Classifier, α (eq. 5 to 8)",
        "works",
        "One pass; the same inputs in every mode and world size",
        link="slipstream.md#exactness",
    ),
    Row(
        "Figs 7, 8, Table III: at most 0.04 points lost, 2x over XDL",
        "differs",
        "The aim is not reached. MovieLens-100K, at most 60 % of the hot inputs dropped; its logs are "
        "not here",
        "2x, 2.4x, 1.2x, 1.18x over XDL, DLRM, FAE, Hotline; 0.04 points",
        lambda f: _run(f, False),
        "slipstream",
        "slipstream.md#measurements",
    ),
    Row(
        "The same number dropped at random",
        "works",
        "A control that the paper does not have",
        "",
        lambda f: _run(f, True),
        "slipstream",
        "slipstream.md#measurements",
    ),
    Row(
        "Baselines XDL, FAE, Hotline (IV.A)",
        "not here",
        "Systems of their own; random dropping is the control",
    ),
    Row("TBSM (RM1) and the Taobao log", "not here", "DLRM is the model"),
    Row("Fig. 9: mini-batch sizes on four GPUs", "not here", "No GPU"),
    Row(
        "Fig. 10: online training",
        "works",
        "`--online SHARE`",
        "up to 2.1x",
        "",
        "",
        "slipstream.md#measurements",
    ),
]
