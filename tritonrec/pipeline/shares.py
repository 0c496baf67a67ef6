"""Shares of rows whose sums several ranks hold: each rank adds up one share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Shares:
    """Who of several ranks adds up which of K rows, from one rank's side.

    Args:
        order: (k,) int64, this rank's own rows grouped by the rank that adds them up.
        send: [g] how many of them go to rank g. receive: [g] how many come from it.
        rows: (sum of receive,) int64, which row of this rank's share each arrival is.
        sizes: [g] rows in rank g's share; the shares follow each other.
    """

    order: torch.Tensor
    send: list[int]
    receive: list[int]
    rows: torch.Tensor
    sizes: list[int]

    @classmethod
    def of(cls, places: list[torch.Tensor], count: int, rank: int) -> Shares:
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
class Meeting:
    """Rows whose sums are complete on all ranks at one time.

    Args:
        rows: (K_i,) int64, which of all rows; ascending.
        shares: who adds them up; its `order` numbers this rank's own rows of all times.
    """

    rows: torch.Tensor
    shares: Shares


def meetings(places: list[torch.Tensor], complete: torch.Tensor, times: int, rank: int) -> list[Meeting]:
    """[times] one `Meeting` for each time.

    Args:
        places: [g] (k_g,) int64, which of K rows rank g has sums for.
        complete: (K,) int64, the time at which the last of a row's sums is complete.
        rank: this one.
    """
    counts = torch.bincount(complete, minlength=times)
    rows = torch.argsort(complete, stable=True)
    number = torch.empty_like(rows)
    number[rows] = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[complete[rows]]
    when = [complete[each] for each in places]
    none, zeros = rows[:0], [0] * len(places)
    found = []
    for time, each in enumerate(rows.split(counts.tolist())):
        if not len(each):
            found.append(Meeting(none, Shares(none, zeros, zeros, none, zeros)))
            continue
        then = [(at == time).nonzero().squeeze(1) for at in when]
        parts = [number[place[here]] for place, here in zip(places, then, strict=True)]
        shares = Shares.of(parts, len(each), rank)
        found.append(Meeting(each, replace(shares, order=then[rank][shares.order])))
    return found


@lru_cache(maxsize=8)
def even_shares(count: int, ranks: int, rank: int) -> Shares:
    """Shares of `count` rows that every rank has sums for."""
    return Shares.of([torch.arange(count)] * ranks, count, rank)
