"""Bounded-lag synchronous all-to-alls (arXiv 2512.19342).

Latencies need an idle machine, which `make papers` does not ask for: those of docs/serving.md are shown.
"""

from __future__ import annotations

from typing import Any

from .row import Row


def _lag(figures: Any) -> str:
    return ", ".join(f"k = {k}: {figures['largest_lag'][f'delays, bls, {k}']}" for k in (0, 1, 4))


ROWS = [
    Row(
        "Synchronous and bounded-lag executions (Figs 1, 2)",
        "works",
        "The bound is an argument; `--trace` draws the lag of each rank",
        link="serving.md",
    ),
    Row(
        "Listing 1 and Fig. 5: where DLRM's time goes",
        "works",
        "Lookup, exchange and dense part are three calls; a trace of each rank has them. The flame graph has "
        "no figures",
        link="serving.md",
    ),
    Row(
        "A backend of torch.distributed (III.B)",
        "works",
        '`init_process_group("bls")`',
        link="serving.md",
    ),
    Row(
        "One-sided puts and counting of arrivals (III.C, Fig. 3)",
        "differs",
        "Messages are two-sided, posted with k + 1 slots and tags",
        link="serving.md",
    ),
    Row(
        "Bound k (III.D, Fig. 4): largest lag seen",
        "works",
        "k + 1 slots where the paper has k buffers, which a fast rank could overwrite",
        "at most k",
        _lag,
        "serve",
        "serving.md",
    ),
    Row(
        "Listing 2: BLS-enabled DLRM, drained at the end",
        "works",
        "The run compares the predictions of every k in every bit before it prints a figure",
        run="serve",
        link="serving.md",
    ),
    Row(
        "Fig. 6a: one all-to-all, k = 0, beside MPI",
        "differs",
        "Four ranks on two cores, no network. The paper is slower than MPI below 4 KB and faster above",
        "",
        "1.3 to 1.9 times gloo's time, 1 B to 16 MiB",
        "",
        "serving.md",
    ),
    Row("Fig. 6b: 1 to 100,000 repetitions of 32 KB", "not here", "Single exchanges only"),
    Row(
        "Fig. 7, random delays of 0 to 10 ms",
        "works",
        "Four ranks, 60 batches a run, an idle machine",
        "17 to 12 ms on both backends",
        "bls 12.45, 10.35, 8.91 ms, gloo 11.99, 9.02, 8.10 ms at k = 0, 1, 4",
        "",
        "serving.md",
    ),
    Row(
        "Fig. 7, heterogeneous sizes",
        "differs",
        "A gain over its own k = 0; gloo gains more and is faster at every k",
        "BLS 7 % less latency, MPI nothing",
        "bls 6.47, 5.79, 5.47 ms, gloo 4.91, 3.81, 3.36 ms at k = 0, 1, 4",
        "",
        "serving.md",
    ),
    Row(
        "A straggler cannot be masked (VI.B)",
        "works",
        "",
        "no gain",
        "bls 9.38, 9.20, 9.10 ms at k = 0, 1, 4",
        "",
        "serving.md",
    ),
    Row(
        "Fig. 8: Mini-Kaggle and Ali-CCP",
        "differs",
        "Drawn data of Mini-Kaggle's shape (26 tables of 1,000 rows of 16); no data set is here",
        "no gain",
        "bls 6.39, 6.01, 5.66 ms at k = 0, 1, 4",
        "",
        "serving.md",
    ),
]
