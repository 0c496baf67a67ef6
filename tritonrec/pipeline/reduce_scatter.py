"""Reduce-scatter plans: of rows whose gradient sums several ranks hold, each rank adds up a part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from ..embedding.selection import distinct, valid
from ..kernels import launch
from .dist_plan import repeated

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
        # Parts of sizes that differ by one at most; [count j // G, count (j + 1) // G) is rank j's.
        bounds = [count * each // ranks for each in range(ranks + 1)]
        inner = torch.tensor(bounds[1:-1], dtype=torch.int64, device="cpu")
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


@dataclass(frozen=True)
class ReplicaReductions:
    """The reductions of a window, before the host knows their sizes; on the device of the rows.

    Args:
        rows: (K,) int64 by micro-batch. order: this rank's own rows by micro-batch and the rank that adds
            them up. received: rows of this rank's part by micro-batch and sender. All with padding behind.
        sizes: (M, 1 + 2 G) int64, by micro-batch the rows, the sums sent to each rank, those from each.
    """

    rows: torch.Tensor
    order: torch.Tensor
    received: torch.Tensor
    sizes: torch.Tensor

    def planned(self, sizes: list[list[int]]) -> list[ReplicaReduction]:
        """[M] the reduction after each micro-batch, with `sizes` on the host."""
        ranks, found, row, own, taken = len(sizes[0]) // 2, [], 0, 0, 0
        for count, *splits in sizes:
            sent, received = splits[:ranks], splits[ranks:]
            # The parts of `ReduceScatter.of`, now among the rows of one micro-batch.
            bounds = [count * each // ranks for each in range(ranks + 1)]
            plan = ReduceScatter(
                self.order[own : own + sum(sent)],
                sent,
                received,
                self.received[taken : taken + sum(received)],
                [after - before for before, after in pairwise(bounds)],
            )
            found.append(ReplicaReduction(self.rows[row : row + count], plan))
            row, own, taken = row + count, own + sum(sent), taken + sum(received)
        return found


def plan_replica_reductions(
    places: list[torch.Tensor], complete: torch.Tensor, micro_batches: int, rank: int, padded: bool = False
) -> ReplicaReductions:
    """Plan the reductions of a window.

    Args:
        places: [g] (k_g,) int64, which of K rows rank g has sums for, in the order of its sums; a row that is
            repeated has one sum, in the place of the first.
        complete: (K,) int64, the micro-batch after which the last of a row's sums is complete; M: padding.
        rank: this one. padded: the host waits for no number of rows.
    """
    ranks, device = len(places), complete.device
    rows, counts = launch.counting_sort(complete, micro_batches + 1)
    number = torch.empty_like(rows)  # of a row among those of its micro-batch
    starts = counts.cumsum(0) - counts
    number[rows] = torch.arange(len(rows), device=device) - starts[complete[rows]]
    # One key for (row, sender): what a rank has twice is sent once. In the order of first occurrence they are
    # grouped by sender, and inside it in the sender's own order, which both sides of a message know.
    sums = distinct(torch.cat(places) * ranks + repeated([len(each) for each in places], device), padded)
    row, sender = sums.keys // ranks, sums.keys % ranks
    here, when, number = valid(len(row), sums.count, device), complete[row], number[row]
    # the rank whose part [n j // G, n (j + 1) // G) has the row
    # The inverse of the bounds n j // G: row i is in part j exactly where n j // G <= i < n (j + 1) // G.
    adds = ((number + 1) * ranks - 1) // counts[when].clamp(min=1)
    groups = micro_batches * ranks  # and a last one of padding

    def sorted_by(chosen: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # A stable sort by (micro-batch, rank): slices of it are the messages of each micro-batch.
        group = torch.where(here & chosen, when * ranks + other, groups)
        order, sizes = launch.counting_sort(group, groups + 1)
        return order, sizes[:-1].view(micro_batches, ranks)

    order, sent = sorted_by(sender == rank, adds)
    taken, received = sorted_by(adds == rank, sender)
    # Where this rank's part begins among the rows of a micro-batch.
    first = (counts * rank // ranks)[when]
    before = (here & (sender < rank)).sum()  # sums of other ranks stand before this one's
    sizes = torch.cat([counts[:-1].unsqueeze(1), sent, received], 1)
    return ReplicaReductions(rows, order - before, (number - first)[taken], sizes)


@lru_cache(maxsize=8)
def even_reduce_scatter(count: int, ranks: int, rank: int) -> ReduceScatter:
    """The plan of `count` rows that every rank has sums for."""
    return ReduceScatter.of([torch.arange(count, device="cpu")] * ranks, count, rank)
