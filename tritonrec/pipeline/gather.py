"""The tables of all ranks in one place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..distributed import Communicators
from ..embedding import HashTableCollection, RowOptimizer, TablePolicy

PART_ROWS = 1 << 16
"""Rows that are gathered at a time."""


def whole_ids(
    communicators: Communicators, tables: HashTableCollection
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By logical table this rank's ids, and those of all ranks, (n,) int64 ascending. Collective."""
    whole = {}
    for group in tables.groups:
        members, ids = group.layout.unpack(group.table.keys().cpu())
        for member, name in enumerate(group.layout.names):
            own = ids[members == member]
            whole[name] = own, torch.cat(communicators.shard_control.all_gather(own)).sort()[0]
    return whole


def rows_in_parts(
    communicators: Communicators,
    tables: HashTableCollection,
    table: str,
    own: torch.Tensor,
    ids: torch.Tensor,
    width: int | None = None,
    to_all: bool = True,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`PART_ROWS` ids at a time in ascending order, and their rows (n, width) in host memory. Collective.

    Args:
        own, ids: of the table, from `whole_ids`.
        width: values of a row; all with the optimizer state by default.
        to_all: False: only the first rank of the shards gets rows, others none.
    """
    over = communicators.shard_control

    def gathered(values: torch.Tensor) -> torch.Tensor:
        if to_all:
            return torch.cat(over.all_gather(values))
        return over.all_to_all_counted(values, [len(values)] + [0] * (over.world_size - 1))

    for part in ids.split(PART_ROWS) if len(ids) else ():
        first, end = torch.searchsorted(own, part[:1]), torch.searchsorted(own, part[-1:], right=True)
        here = own[int(first) : int(end)]
        values = tables.current_rows(table, here)[:, :width].cpu().contiguous()
        found = gathered(here)
        yield part, gathered(values)[found.argsort()]


def whole_tables(communicators: Communicators, tables: HashTableCollection) -> HashTableCollection:
    """Every rank's weights in tables of one process, in host memory, without policies. Collective."""
    features = [
        replace(feature, policy=TablePolicy(), optimizer=None, placement=None)
        for feature in tables.features.values()
    ]
    whole = HashTableCollection(features, RowOptimizer("sgd"), merge=False, seed=tables.seed)
    for name, (own, ids) in whole_ids(communicators, tables).items():
        for part, weights in rows_in_parts(communicators, tables, name, own, ids, tables.dim_of(name)):
            whole.load(name, part, weights)
    return whole
