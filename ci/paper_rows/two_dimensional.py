"""2D sparse parallelism (Meta's article on DMPCollection, and arXiv 2508.03854)."""

from __future__ import annotations

from functools import partial
from typing import Any

from .row import Row, only


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


ROWS = [
    Row(
        "Groups: T ranks in G sharding groups [i, G + i, ...] of L, replica groups of G neighbours (Fig. 1)",
        "works",
        "`Communicators.over(..., replicas=G)`, and on a `DeviceMesh` of shard and replicate",
        "T = 8, G = 2: 0 2 4 6 and 1 3 5 7",
        "the same",
        "",
        "scale.md#copies-of-the-tables-2d-sparse-parallelism",
    ),
    Row(
        "Weights averaged over replicas, `sync()` every N steps",
        "works",
        "`average_every`, labelled approximate. Exact copies, which add up gradients, are the default with "
        "the bits of one process",
        "",
        _averaged,
        "switches",
        "scale.md#copies-of-the-tables-2d-sparse-parallelism",
    ),
    Row(
        "Convergence of averaged copies",
        "differs",
        "MovieLens-100K, FuXi, eight epochs of Adam, averaged in every update: clearly behind. Policies are "
        "refused under averaging, because their scores would drift apart",
        "comparable to the baseline, no figure",
        _behind,
        "curves",
        "scale.md#what-approximate-updates-change",
    ),
    Row(
        "The same with Adagrad, averaged every N steps",
        "differs",
        "MovieLens-100K, FuXi, eight epochs, three seeds: behind in loss, the more the larger N; HR@10 is "
        "behind for N = 1, and for 4 and 16 the difference is inside its scatter",
        "comparable to the baseline, no figure",
        _every,
        "averaging",
        "scale.md#what-approximate-updates-change",
    ),
    Row(
        "Optimizer states one round late (Adagrad)",
        "works",
        "`late_states`. The text gives no formula: here a copy goes on with its own sums, and gets the mean "
        "of an average's with the next one, to which it adds its own squares since. The same run as above",
        "comparable to the baseline, no figure",
        _late,
        "averaging",
        "scale.md#what-approximate-updates-change",
    ),
    Row(
        "The same with the moment scaled",
        "works",
        "The same run as above",
        "",
        _scaled_late,
        "averaging",
        "scale.md#what-approximate-updates-change",
    ),
    Row(
        "Adagrad and row-wise Adagrad scaled by the moment (arXiv 2508.03854)",
        "works",
        "`moment_scaling`: the moment over the number of copies. The same run as above; the formula is not "
        "in the text at hand, the correction is for the scatter of a copy's gradients",
        "",
        _scaled,
        "averaging",
        "scale.md#what-approximate-updates-change",
    ),
    Row(
        "Row-wise sharding inside a group",
        "works",
        "By the hash of the id, since a dynamic table has no ranges of rows",
        link="embedding.md#tables",
    ),
    Row(
        "Column-wise and grid sharding inside a group",
        "not here",
        "A row's exact sum, norm and optimizer state have one owner. Columns on several ranks would send "
        "every id to each of them, and a row-wise optimizer's state would need a sum over them; hashing "
        "already spreads the rows of one large table over all ranks evenly",
    ),
    Row(
        "DMPCollection: wrapping of modules that exist",
        "differs",
        "`EmbeddingCollection` and `EmbeddingBagCollection` with TorchRec's names take their place; 2D is an "
        "argument of the trainer",
        link="migrate.md",
    ),
    Row(
        "Fig. 2: latencies on 1,024 GPUs in groups of 256",
        "not here",
        "The article prints no figures. NestPipe's 2D-SP rows are simulated",
        link="simulator.md",
    ),
    Row(
        "Replicas on the same node",
        "works",
        "The order of ranks puts them there; not measured on nodes",
    ),
]
