"""The tables of all ranks in one place."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..distributed import Communicators
from ..embedding import HashTableCollection, RowOptimizer, TablePolicy


def whole_rows(
    communicators: Communicators, tables: HashTableCollection
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By logical table every rank's ids (n,), ascending, and rows (n, row width), in host memory."""
    whole = {}
    for name, part in tables.export().items():
        ids, rows = (torch.cat(communicators.shard_control.all_gather(values.cpu())) for values in part)
        ids, order = torch.sort(ids)
        whole[name] = ids, rows[order]
    return whole


def whole_tables(communicators: Communicators, tables: HashTableCollection) -> HashTableCollection:
    """Every rank's weights in tables of one process, in host memory, without policies. Collective."""
    features = [
        replace(feature, policy=TablePolicy(), optimizer=None, placement=None)
        for feature in tables.features.values()
    ]
    whole = HashTableCollection(features, RowOptimizer("sgd"), merge=False, seed=tables.seed)
    for name, (ids, rows) in whole_rows(communicators, tables).items():
        dim = whole.initial_rows(name, ids[:0]).shape[1]
        whole.load(name, ids, rows[:, :dim].contiguous())
    return whole
