"""Bounded-lag synchronous all-to-alls (arXiv 2512.19342).

Latencies are meaningful on an idle machine only, and with a core for each rank: hence two ranks.
"""

from __future__ import annotations

from typing import Any

from .row import Row, only

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


ROWS = [
    Row(
        "Synchronous and bounded-lag executions (Figs 1, 2)",
        "works",
        "The bound is an argument; `--trace` draws the lag of each rank",
        link="serving.md#measuring",
    ),
    Row(
        "Listing 1 and Fig. 5: where DLRM's time goes",
        "works",
        "Lookup, exchange and dense part are three calls; a trace of each rank has them. The flame graph has "
        "no figures",
        link="serving.md#lookups-with-a-bounded-lag",
    ),
    Row(
        "Table I: overlap across iterations, also of two exchanges",
        "works",
        "k + 1 exchanges are in flight beside the computation of k + 1 batches",
        link="serving.md#lookups-with-a-bounded-lag",
    ),
    Row(
        "A backend of torch.distributed (III.B)",
        "works",
        '`init_process_group("bls")`',
        link="serving.md#as-a-backend-of-torchdistributed",
    ),
    Row(
        "One-sided puts and counting of arrivals (III.C, Fig. 3)",
        "works",
        "In shared memory between processes of one host, in windows of MPI between hosts, which has been run "
        "on one host only. UCX and NVSHMEM are not here; the page names the calls that each would need",
        link="serving.md#transports",
    ),
    Row(
        "Bound k (III.D, Fig. 4): largest lag seen",
        "works",
        "2 (k + 1) slots where the paper has k buffers, which a fast rank could overwrite",
        "at most k",
        _lag,
        "serve",
        "serving.md#transports",
    ),
    Row(
        "Listing 2: BLS-enabled DLRM, drained at the end",
        "works",
        "The run compares the predictions of every k in every bit before it prints a figure, and "
        "`tritonrec verify` those of a trained DLRM with its trainer's",
        run="serve",
        link="serving.md#lookups-with-a-bounded-lag",
    ),
    Row(
        "Fig. 6a: one all-to-all, k = 0, beside MPI, up to 4 KB",
        "works",
        f"{TWO}, no network",
        "slower than MPI",
        lambda f: _ratios(f, 1, 4096),
        "all-to-alls",
        "serving.md#plain-all-to-alls",
    ),
    Row(
        "Fig. 6a: above 4 KB",
        "differs",
        f"{TWO}, up to 67 million bytes to each. Faster than gloo and not than MPI, whose messages are "
        "copies in memory here and cross Infiniband there",
        "faster than MPI",
        lambda f: _ratios(f, 4097, 2**40),
        "all-to-alls",
        "serving.md#plain-all-to-alls",
    ),
    Row(
        "Fig. 6b: 1 to 100,000 repetitions of 32 KB; from 10 on",
        "differs",
        f"{TWO}. Further behind MPI than in the paper",
        "MPI 2 to 3 times as fast",
        lambda f: _ratios(f, 10, 10**6),
        "repetitions",
        "serving.md#plain-all-to-alls",
    ),
    Row(
        "Fig. 7, random delays of 0 to 10 ms",
        "works",
        f"{TWO}; all delays that two ranks leave to be masked",
        "17 to 12 ms on both backends",
        lambda f: _latencies(f, "delays"),
        "serve",
        "serving.md#latency-over-k",
    ),
    Row(
        "Fig. 7, heterogeneous sizes",
        "differs",
        f"{TWO}. The gain from k is inside the interval on both backends",
        "BLS 7 % less latency, MPI nothing",
        lambda f: _latencies(f, "sizes"),
        "serve",
        "serving.md#latency-over-k",
    ),
    Row(
        "A straggler cannot be masked (VI.B)",
        "works",
        TWO,
        "no gain",
        lambda f: _latencies(f, "straggler"),
        "serve",
        "serving.md#latency-over-k",
    ),
    Row(
        "Fig. 8: Mini-Kaggle and Ali-CCP",
        "differs",
        f"{TWO}. Drawn clicks in Mini-Kaggle's shape, 26 tables with 26,768 rows of 16; readers for both "
        "formats are here and their data are not. bls gains nothing as there, gloo a little. With 10 million "
        "rows of 64 see the page",
        "no gain",
        lambda f: _latencies(f, "balanced"),
        "serve",
        "serving.md#tables-of-criteos-size",
    ),
]
