"""TorchRec's tables as features of ours: names, initial weights, types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..embedding.bags import Pooling
from ..embedding.features import FeatureConfig
from ..embedding.policy import TablePolicy
from ..embedding.row_optimizer import RowOptimizer

if TYPE_CHECKING:
    from ..embedding.modules import HashEmbeddingCollection

POOLING: dict[str, Pooling] = {"SUM": "sum", "MEAN": "mean"}


def check_tables(tables: Sequence[Any]) -> None:
    """Raise a ValueError for two tables of one name, and for rows that are not float32."""
    for name, count in Counter(table.name for table in tables).items():
        if count > 1:
            raise ValueError(f"there are {count} tables of the name {name!r}: give each its own")
    for table in tables:
        data_type = getattr(table, "data_type", None)
        if data_type is not None and data_type.value != "FP32":
            raise ValueError(
                f"table {table.name!r} has data_type {data_type.value}, and rows are float32: "
                "TablePolicy(precision=PrecisionTiers(...)) keeps seldom used ones in 16 bits"
            )


def embedding_names(tables: Sequence[Any]) -> list[list[str]]:
    """Names of each table's results: its features, or ``"feature@table"`` where another table has it too."""
    uses = Counter(name for table in tables for name in _features_of(table))
    return [
        [f"{name}@{table.name}" if uses[name] > 1 else name for name in _features_of(table)]
        for table in tables
    ]


def features_of_tables(
    tables: Sequence[Any], optimizer: RowOptimizer | None
) -> list[tuple[FeatureConfig, str]]:
    """Features under the names of `embedding_names`, and each one's name in the input.

    Raises ValueError for initial weights between bounds that are not -scale and scale.
    """
    return [
        (
            FeatureConfig(
                name,
                table.embedding_dim,
                table.name,
                POOLING[table.pooling.value] if hasattr(table, "pooling") else "none",
                _scale(table),
                getattr(table, "optimizer", None) or optimizer,
                getattr(table, "policy", None) or TablePolicy(),
            ),
            feature,
        )
        for table, names in zip(tables, embedding_names(tables), strict=True)
        for name, feature in zip(names, _features_of(table), strict=True)
    ]


def fill_by_init_fn(tables: Sequence[Any], module: HashEmbeddingCollection) -> None:
    """Make the rows of ids 0 up to ``num_embeddings`` of tables with an ``init_fn``, this rank's ones.

    What it draws depends on the tables' seed and the table's name. Raises ValueError without num_embeddings.
    """
    for table in tables:
        if getattr(table, "init_fn", None) is None or _uniform_bound(table.init_fn) is not None:
            continue
        if table.num_embeddings < 1:
            raise ValueError(
                f"table {table.name!r}: init_fn needs num_embeddings, the number of rows to fill"
            )
        weights = torch.empty(table.num_embeddings, table.embedding_dim, dtype=torch.float32, device="cpu")
        table_id = module.tables.describe()["tables"][table.name]["table_id"]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(ops.derive_seed(module.tables.seed, table_id, 0))
            table.init_fn(weights)
        ids = torch.arange(table.num_embeddings, device="cpu")
        here = module.owns(ids)
        module.tables.load_weights(table.name, ids[here], weights[here])


def _features_of(table: Any) -> list[str]:
    return table.feature_names or [table.name]


def _scale(table: Any) -> float | None:
    """Of the uniform initial weights; None for the default."""
    low, high = table.weight_init_min, table.weight_init_max
    if (low is None) != (high is None) or (high is not None and low != -high):
        raise ValueError(
            f"table {table.name!r}: initial weights are uniform in [-scale, scale): give weight_init_min="
            f"-weight_init_max, got {low} and {high}"
        )
    bound = _uniform_bound(getattr(table, "init_fn", None))
    return high if bound is None else bound


def _uniform_bound(init_fn: Any) -> float | None:
    """``scale`` of ``partial(torch.nn.init.uniform_, a=-scale, b=scale)``, TorchRec's default; else None."""
    if isinstance(init_fn, partial) and init_fn.func is torch.nn.init.uniform_ and not init_fn.args:
        low, high = init_fn.keywords.get("a", 0.0), init_fn.keywords.get("b", 1.0)
        if init_fn.keywords.keys() <= {"a", "b"} and low == -high <= 0:
            return float(high)
    return None
