"""The description of tables and features among a checkpoint's metadata, checked where it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

POOLINGS = ("none", "sum", "mean")


def check_description(described: Any, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for another thing than `HashTableCollection.describe` gives.

    Args:
        columns: by table and column dtype and shape of a row, as a checkpoint has them.
    """
    tables, features = (_mapping(described, name, "the description") for name in ("tables", "features"))
    for name, table in tables.items():
        where = f"table {name!r}"
        dim, seed, number = (_whole(table, key, where) for key in ("dim", "seed", "table_id"))
        if not (1 <= dim < 2**31 and -(2**63) <= seed < 2**63 and 0 <= number < 2**32):
            raise ValueError(f"{where} is described with dim {dim}, seed {seed} and table_id {number}")
        scale = table.get("scale")
        if type(scale) not in (int, float) or not math.isfinite(scale):
            raise ValueError(f"{where} is described with the scale {str(scale)[:40]!r}")
        kind = columns.get(name, {}).get("rows")
        if kind is None or kind[0] != "float32" or len(kind[1]) != 1 or kind[1][0] < dim:
            raise ValueError(f"{where} is described with dim {dim}, and has rows {kind}")
    for name, feature in features.items():
        table = feature.get("table") if isinstance(feature, dict) else None
        pooling = feature.get("pooling") if isinstance(feature, dict) else None
        if not isinstance(table, str) or table not in tables:
            raise ValueError(f"feature {name!r} is described with the table {str(table)[:40]!r}")
        if pooling not in POOLINGS:
            raise ValueError(f"feature {name!r} is described with the pooling {str(pooling)[:40]!r}")


def _mapping(value: Any, key: str, where: str) -> dict[str, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"{where} has no {key}, but {str(found)[:40]!r}")
    return found


def _whole(value: Any, key: str, where: str) -> int:
    found = value.get(key) if isinstance(value, dict) else None
    if type(found) is not int:
        raise ValueError(f"{where} is described with the {key} {str(found)[:40]!r}")
    return found
