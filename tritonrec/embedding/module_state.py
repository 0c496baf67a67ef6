"""Rows of hash embeddings in the ``state_dict`` of their module.

A table `item` has entries ``item.keys`` (n,) int64, ``item.weight`` (n, dim), and where it has policies
those of its metadata (`DynamicTable.state`); keys that wait for admission are in ``item.candidates.*``.
``seed`` and ``lookups`` () int64 let a run go on as it would have. Sizes may differ at load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .state_check import check_distinct


def save_module_state(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Add the rows of this rank; a hook of ``state_dict``."""
    for table, columns in module.tables.state(optimizer=False).items():
        for column, values in columns.items():
            state_dict[f"{prefix}{table}.{'weight' if column == 'rows' else column}"] = values
    state_dict[f"{prefix}seed"] = torch.tensor(module.tables.seed, dtype=torch.int64, device="cpu")
    state_dict[f"{prefix}lookups"] = torch.tensor(module.lookups, dtype=torch.int64, device="cpu")


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

    A row that exists keeps its optimizer state; that of new rows is zero. With ``strict=False`` the tables
    that the state has are loaded: one without a column of a policy begins there as one of new rows, and a
    table that the state does not have stays as it is. Otherwise, and after an error, nothing is.
    """
    expected = module.tables.empty_state()
    names = {
        (table, column): f"{prefix}{table}.{'weight' if column == 'rows' else column}"
        for table, columns in expected.items()
        for column in columns
    }
    names |= {("", name): f"{prefix}{name}" for name in ("seed", "lookups")}
    given = {place: state_dict.pop(name) for place, name in names.items() if name in state_dict}
    missing_keys += [name for place, name in names.items() if place not in given]
    without_ids = [
        names[(table, "rows")]
        for table in module.tables.table_names
        if (table, "rows") in given and (table, "keys") not in given
    ]
    if without_ids:
        error_msgs.append(
            f"{', '.join(without_ids)} has no ids beside it, as in TorchRec: "
            "tritonrec.embedding.load_table_weights(module, state) takes row i for id i"
        )
        return
    others = any(name.startswith(prefix) for name in state_dict)  # which torch reports
    if (others or len(given) < len(names)) and _caller_is_strict():
        return
    try:
        load = _prepared(module, given, expected)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        error_msgs.append(f"{prefix}{error}")
        return
    load()


def _caller_is_strict() -> bool:
    """The argument `strict` of the ``load_state_dict`` that runs: torch gives True to every hook."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is torch.nn.Module.load_state_dict.__code__:
            return bool(frame.f_locals["strict"])
    return True


Given = Mapping[tuple[str, str], torch.Tensor]


def _prepared(module: Any, given: Given, expected: Mapping[str, Mapping[str, Any]]) -> Callable[[], None]:
    """Check what is `given` by table and column, and change nothing; the function returned loads it."""
    tables = module.tables
    seed, lookups = (
        _number(name, given[("", name)]) if ("", name) in given else own
        for name, own in (("seed", tables.seed), ("lookups", module.lookups))
    )
    there = {table for table in tables.table_names if {(table, "keys"), (table, "rows")} <= given.keys()}
    kept = {} if there == {*tables.table_names} else tables.state()
    state: dict[str, dict[str, torch.Tensor]] = {}
    without_policies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for part, columns in expected.items():
        table = part if part in tables.table_names else part.rpartition(".")[0]
        own = {column: given[(part, column)] for column in columns if (part, column) in given}
        if table not in there:
            state[part] = kept[part]
            continue
        state[part] = dict(columns)
        if own:
            _check_columns(part, own)
            here = module.owns(own["keys"].cpu())
            whole = bool(here.all())
            own = {name: values.cpu() if whole else values.cpu()[here] for name, values in own.items()}
        if part == table:
            own["rows"] = _with_optimizer_state(tables, table, own["keys"], own["rows"])
        if own.keys() == columns.keys():
            state[part] = own
        elif part == table:
            check_distinct(own["keys"], f"the state of table {table!r}")
            without_policies[table] = own["keys"], own["rows"]
    load_state = tables.prepare_state(state)

    def load() -> None:
        tables.clear()
        tables.set_seed(seed)
        load_state()
        for table, (ids, rows) in without_policies.items():
            tables.load(table, ids, rows)
        module.lookups = lookups

    return load


def _number(name: str, value: Any) -> int:
    """Raise ValueError unless a value is one whole number, `lookups` from 0."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if type(value) is not int or (name == "lookups" and value < 0):
        raise ValueError(f"{name} must be one int64, got {_told(value)} {str(value)[:40]}")
    return value


def _check_columns(part: str, columns: Mapping[str, Any]) -> None:
    """Raise ValueError unless they are tensors of as many rows as keys."""
    keys = columns.get("keys")
    if not isinstance(keys, torch.Tensor) or keys.dim() != 1 or keys.dtype != torch.int64:
        raise ValueError(f"{part}.keys must be (n,) int64, got {_told(keys)}")
    for column, values in columns.items():
        if not isinstance(values, torch.Tensor) or values.dim() < 1 or len(values) != len(keys):
            raise ValueError(
                f"{part}.{'weight' if column == 'rows' else column} must have {len(keys)} rows as its keys, "
                f"got {_told(values)}"
            )


def _with_optimizer_state(tables: Any, table: str, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    dim = tables.dim_of(table)
    if weights.dim() != 2 or weights.shape[1] != dim or weights.dtype != torch.float32:
        raise ValueError(
            f"{table}.weight has shape {_told(weights)}, the table has rows of {dim} float32 weights"
        )
    rows: torch.Tensor = tables.current_rows(table, ids).cpu()
    rows[:, :dim] = weights
    return rows


def _told(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
