"""Rows of hash embeddings in the ``state_dict`` of their module.

A table `item` has entries ``item.keys`` (n,) int64, ``item.weight`` (n, dim), and where it has policies
those of its metadata (`DynamicTable.state`); keys that wait for admission are in ``item.candidates.*``.
``seed`` and ``lookups`` () int64 let a run go on as it would have. Sizes may differ at load.
"""

from __future__ import annotations

from typing import Any

import torch


def save_module_state(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Add the rows of this rank; a hook of ``state_dict``."""
    for table, columns in module.tables.state().items():
        for column, values in columns.items():
            if column == "rows":
                column, values = "weight", values[:, : module.tables.dim_of(table)].contiguous()
            state_dict[f"{prefix}{table}.{column}"] = values
    state_dict[f"{prefix}seed"] = torch.tensor(module.tables.seed, dtype=torch.int64)
    state_dict[f"{prefix}lookups"] = torch.tensor(module.lookups, dtype=torch.int64)


def load_module_state(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Replace the rows by those of the state that this rank owns; a hook of ``load_state_dict``.

    A row that exists keeps its optimizer state; that of new rows is zero.
    """
    tables = module.tables
    expected = tables.empty_state()
    names = {
        (table, column): f"{prefix}{table}.{'weight' if column == 'rows' else column}"
        for table, columns in expected.items()
        for column in columns
    }
    missing = [
        name for name in (*names.values(), f"{prefix}seed", f"{prefix}lookups") if name not in state_dict
    ]
    missing_keys += missing
    if missing:
        for name in names.values():
            state_dict.pop(name, None)
        for name in ("seed", "lookups"):
            state_dict.pop(f"{prefix}{name}", None)
        return
    found: dict[str, dict[str, torch.Tensor]] = {table: {} for table in expected}
    for (table, column), name in names.items():
        found[table][column] = state_dict.pop(name)
    seed, lookups = (int(state_dict.pop(f"{prefix}{name}")) for name in ("seed", "lookups"))
    for table, columns in found.items():
        here = module.owns(columns["keys"].cpu())
        found[table] = {column: values.cpu()[here] for column, values in columns.items()}
    for table in tables.table_names:
        columns, dim = found[table], tables.dim_of(table)
        weights = columns["rows"]
        if weights.dim() != 2 or weights.shape[1] != dim or weights.dtype != torch.float32:
            error_msgs.append(
                f"{prefix}{table}.weight has shape {tuple(weights.shape)} {weights.dtype}, the table has "
                f"rows of {dim} float32 weights"
            )
            return
        columns["rows"] = torch.cat([weights, tables.current_rows(table, columns["keys"])[:, dim:]], 1)
    tables.clear()
    tables.set_seed(seed)
    tables.load_state(found)
    module.lookups = lookups
