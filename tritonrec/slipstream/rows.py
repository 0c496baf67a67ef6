"""Hot rows (Slipstream, section III.A): rows with a share of at least lambda of their table's accesses.

Dimensions: S inputs, C features, H hot rows of all tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import ops
from ..kernels.arguments import check_rank


@dataclass(frozen=True)
class HotRows:
    """Hot rows of all tables, one table after another, by id in each; their positions are 0 ... H - 1.

    Args:
        tables: names. table_of: the table of each feature, as an index of `tables` (C entries).
        ids: (h,) int64 ascending for each table. accesses: (h,) int64, of the counted inputs.
        left_out: hot rows left out by the memory limit.
    """

    tables: tuple[str, ...]
    table_of: tuple[int, ...]
    ids: tuple[torch.Tensor, ...]
    accesses: tuple[torch.Tensor, ...]
    left_out: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.ids))

    @property
    def starts(self) -> list[int]:
        """The first position of each table, and H."""
        starts = [0]
        for ids in self.ids:
            starts.append(starts[-1] + len(ids))
        return starts

    def places(self, categories: torch.Tensor) -> torch.Tensor:
        """(S, C) int64: the position of each row that inputs look up, -1 where it is not hot."""
        places = torch.full(categories.shape, -1, dtype=torch.int64, device="cpu")
        starts = self.starts
        for feature, table in enumerate(self.table_of):
            ids = self.ids[table]
            if len(ids):
                column = categories[:, feature].contiguous()
                at = torch.searchsorted(ids, column).clamp(max=len(ids) - 1)
                places[:, feature] = torch.where(ids[at] == column, at + starts[table], -1)
        return places


def hot_rows(
    categories: torch.Tensor, tables: Sequence[str], share: float, max_rows: int | None = None
) -> HotRows:
    """The rows with at least `share` of their table's accesses.

    Args:
        categories: (S, C) int64, ids of the inputs. tables: the table of each of the C features.
        share: lambda, in [0, 1]. max_rows: largest number of rows, those with most accesses; of equal ones
            the first table and the lowest id.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the share of accesses of a hot row must be in [0, 1], got {share}")
    names = tuple(sorted(set(tables)))
    table_of = tuple(names.index(table) for table in tables)
    ids, accesses = [], []
    for number in range(len(names)):
        lookups = categories[:, [at for at, table in enumerate(table_of) if table == number]].reshape(-1)
        found, counts = torch.unique(lookups, return_counts=True)
        hot = counts >= share * len(lookups)
        ids.append(found[hot])
        accesses.append(counts[hot])
    total = sum(map(len, ids))
    left_out = 0 if max_rows is None else max(total - max_rows, 0)
    if left_out:
        order = torch.argsort(torch.cat(accesses), descending=True, stable=True)
        stays = torch.zeros(total, dtype=torch.bool, device="cpu")
        stays[order[:max_rows]] = True
        parts = stays.split([len(part) for part in ids])
        ids = [part[mask] for part, mask in zip(ids, parts, strict=True)]
        accesses = [part[mask] for part, mask in zip(accesses, parts, strict=True)]
    return HotRows(names, table_of, tuple(ids), tuple(accesses), left_out)


def owned(hot: HotRows, shard: int, shards: int) -> torch.Tensor:
    """(h,) int64 positions of the hot rows that a rank owns, ascending."""
    check_rank(shard, shards)
    every = torch.cat([*hot.ids, torch.empty(0, dtype=torch.int64, device="cpu")])
    return (ops.owner_of(every, shards) == shard).nonzero().squeeze(1)
