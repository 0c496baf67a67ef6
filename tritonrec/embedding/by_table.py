"""State of a merged table, split into its logical tables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from .key_layout import KeyLayout
from .snapshot import Snapshot, SnapshotRows
from .table import State


def part_name(table: str, part: str) -> str:
    """The name of a part of a logical table's state: of its rows, or of its candidates."""
    return table if part == "rows" else f"{table}.{part}"


def columns_by_table(layout: KeyLayout, parts: State) -> State:
    """Columns by part of the merged table -> by part of each logical table; keys become ids."""
    tables = {}
    for part, columns in parts.items():
        if len(layout.names) == 1:
            tables[part_name(layout.names[0], part)] = dict(columns)
            continue
        members, ids = layout.unpack(columns["keys"])
        for member, name in enumerate(layout.names):
            here = members == member
            own = {column: values[here] for column, values in columns.items()}
            if "rows" in own:
                own["rows"] = layout.narrowed(member, own["rows"])
            tables[part_name(name, part)] = {**own, "keys": ids[here]}
    return tables


def keys_by_table(layout: KeyLayout, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `columns_by_table`, for keys (n,) by part."""
    columns = columns_by_table(layout, {part: {"keys": keys} for part, keys in parts.items()})
    return {name: each["keys"] for name, each in columns.items()}


def rows_by_table(
    layout: KeyLayout, rows: Snapshot, keys: torch.Tensor, handles: torch.Tensor
) -> dict[str, SnapshotRows]:
    """As `columns_by_table`, for the rows of a snapshot with these keys (n,) and handles (n,) int32."""
    tables = {}
    for member, name in enumerate(layout.names):
        ids, own = keys, handles
        if len(layout.names) > 1:
            members, ids = layout.unpack(keys)
            ids, own = ids[members == member], handles[members == member]
        tables[name] = rows.part(
            ids, own, partial(layout.pack, member, feature=name), partial(layout.narrowed, member)
        )
    return tables
