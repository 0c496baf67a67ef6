"""Checks of a saved state and of its description, before tables load it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .. import ops
from .row_optimizer import RowOptimizer

POOLINGS = ("none", "sum", "mean")
LEAST = {"score": -1, "counts": 1, "last": 0}
"""Columns of policies that have a least number: of a row that no step has used, and of candidates."""


def check_state(
    given: Mapping[str, Mapping[str, torch.Tensor]], expected: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Raise ValueError naming every table, column, dtype and size that differs, or a key given twice."""
    for table, columns in given.items():
        if not isinstance(columns, Mapping):
            raise ValueError(f"table {table!r} of the state has no columns, but {type(columns).__name__}")
        for column, values in columns.items():
            check_values(values, f"column {column!r} of table {table!r} of the state")
    there, here = (
        {
            (table, column): f"{values.dtype} {('n', *values.shape[1:]) if values.dim() else ()}"
            for table, columns in state.items()
            for column, values in columns.items()
        }
        for state in (given, expected)
    )
    different = [
        f"column {column!r} of table {table!r} is {there.get((table, column), 'not there')} in the state, "
        f"{here.get((table, column), 'not there')} here"
        for table, column in sorted({*there, *here})
        if there.get((table, column)) != here.get((table, column))
    ]
    if different:
        raise ValueError(
            f"the state does not fit these tables: {'; '.join(different)}; was it saved under another "
            "policy, optimizer or dimension?"
        )
    for table, columns in given.items():
        lengths = {column: len(values) for column, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of table {table!r} have different numbers of rows: {lengths}")
        check_distinct(columns["keys"], f"the state of table {table!r}")


def check_values(values: object, where: str) -> None:
    """Raise ValueError unless it is a tensor that has its values."""
    if not isinstance(values, torch.Tensor) or values.is_meta:
        there = "a tensor of the meta device" if isinstance(values, torch.Tensor) else type(values).__name__
        raise ValueError(f"{where} is no tensor with values, but {there}")


def check_numbers(columns: Mapping[str, torch.Tensor], rule: RowOptimizer, dim: int, where: str) -> None:
    """Raise ValueError for numbers among a table's columns that no training keeps."""
    if "rows" in columns:
        rule.check_state(columns["rows"][:, dim:], dim, where)
    for column in LEAST.keys() & columns.keys():
        if bool((columns[column] < LEAST[column]).any()):
            raise ValueError(f"{where} has {int(columns[column].min())} in column {column!r}: it is damaged")


def check_distinct(keys: torch.Tensor, where: str) -> None:
    """Raise ValueError naming a key of `keys` (n,) int64 that is there twice."""
    if bool((keys[1:] > keys[:-1]).all()):
        return
    distinct, _inverse, counts = ops.unique(keys)
    if len(distinct) < len(keys):
        twice = int(distinct[counts > 1][0])
        raise ValueError(f"key {twice} is given twice in {where}: give every row once")


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
