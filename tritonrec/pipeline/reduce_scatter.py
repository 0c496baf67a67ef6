"""Reduce-scatter plans: of rows whose gradient sums several ranks hold, each rank adds up a part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch

DENSE_ROW = 64
"""Values of a row of dense gradients, whose width in bytes its largest one decides."""


@dataclass(frozen=True)
class ReduceScatter:
    """Which of several ranks adds up which of K rows, from one rank's side.

    Args:
        order: (k,) int64, this rank's own rows grouped by the rank that adds them up.
        input_splits: [g] how many of them are sent to rank g. output_splits: [g] how many it sends here.
        rows: (sum of output_splits,) int64, for each received row which of this rank's part it is.
        sizes: [g] rows in rank g's part; the parts follow each other.
    """

    order: torch.Tensor
    input_splits: list[int]
    output_splits: list[int]
    rows: torch.Tensor
    sizes: list[int]

    @classmethod
    def of(cls, places: list[torch.Tensor], count: int, rank: int) -> ReduceScatter:
        """`places`: [g] (k_g,) int64, which of `count` rows rank g has sums for; `rank`: this one."""
        ranks = len(places)
        bounds = [count * each // ranks for each in range(ranks + 1)]
        inner = torch.tensor(bounds[1:-1], dtype=torch.int64)
        owners = [torch.bucketize(each, inner, right=True) for each in places]
        here = [each[owner == rank] for each, owner in zip(places, owners, strict=True)]
        return cls(
            torch.argsort(owners[rank], stable=True),
            torch.bincount(owners[rank], minlength=ranks).tolist(),
            [len(each) for each in here],
            torch.cat(here) - bounds[rank],
            [after - before for before, after in pairwise(bounds)],
        )


@dataclass(frozen=True)
class ReplicaReduction:
    """Rows whose gradient sums are complete on all replicas after one micro-batch.

    Args:
        rows: (K_i,) int64, which of all rows; ascending.
        plan: who adds them up; its `order` numbers this rank's own rows of all micro-batches.
    """

    rows: torch.Tensor
    plan: ReduceScatter


def plan_replica_reductions(
    places: list[torch.Tensor], complete: torch.Tensor, micro_batches: int, rank: int
) -> list[ReplicaReduction]:
    """[micro_batches] the reduction after each.

    Args:
        places: [g] (k_g,) int64, which of K rows rank g has sums for.
        complete: (K,) int64, the micro-batch after which the last of a row's sums is complete.
        rank: this one.
    """
    counts = torch.bincount(complete, minlength=micro_batches)
    rows = torch.argsort(complete, stable=True)
    number = torch.empty_like(rows)
    number[rows] = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[complete[rows]]
    when = [complete[each] for each in places]
    none, zeros = rows[:0], [0] * len(places)
    planned = []
    for micro_batch, each in enumerate(rows.split(counts.tolist())):
        if not len(each):
            planned.append(ReplicaReduction(none, ReduceScatter(none, zeros, zeros, none, zeros)))
            continue
        then = [(at == micro_batch).nonzero().squeeze(1) for at in when]
        parts = [number[place[here]] for place, here in zip(places, then, strict=True)]
        plan = ReduceScatter.of(parts, len(each), rank)
        planned.append(ReplicaReduction(each, replace(plan, order=then[rank][plan.order])))
    return planned


@lru_cache(maxsize=8)
def even_reduce_scatter(count: int, ranks: int, rank: int) -> ReduceScatter:
    """The plan of `count` rows that every rank has sums for."""
    return ReduceScatter.of([torch.arange(count)] * ranks, count, rank)
