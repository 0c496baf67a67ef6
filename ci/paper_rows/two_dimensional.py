"""2D sparse parallelism (Meta's article on DMPCollection, and arXiv 2508.03854)."""

from __future__ import annotations

from typing import Any

from .row import Row


def _averaged(figures: Any) -> str:
    rows = [row for row in figures["replicas"] if row["copies"] == 2]
    return "; ".join(
        f"{'averaged every ' + str(row['average_every']) if row['average_every'] else 'exact'}: bytes "
        f"{row['bytes']:.2f}, loss {row['loss']:+.1%}"
        for row in rows
    )


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
        "Optimizer states one round late (Adagrad)",
        "not here",
        "Weights and states are averaged together. The text gives no formula; exact copies need no delay",
    ),
    Row(
        "Row-wise Adagrad scaled by the moment (arXiv 2508.03854)",
        "not here",
        "It corrects the effective step of averaged copies. Exact copies have nothing to correct, and the "
        "formula is not in the text at hand",
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
        "A row's "
        "exact sum, norm and optimizer state have one owner; columns on several ranks would send every id "
        "as often",
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
