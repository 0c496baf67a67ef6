"""The best of many scores, with one answer where scores are equal."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of each row's scores: places (B, k) int64 and scores (B, k), best first.

    Of equal scores the first place wins, which `torch.topk` leaves open. Raises ValueError for scores that
    are not (B, I) or have a NaN, and for a k outside [1, I].
    """
    if scores.dim() != 2:
        raise ValueError(f"scores must be (B, I), got {tuple(scores.shape)}")
    rows, items = scores.shape
    if not isinstance(k, int) or isinstance(k, bool):
        raise ValueError(f"k must be a whole number, got {k!r}")
    if not 1 <= k <= items:
        raise ValueError(f"k must be in [1, {items}], the number of items, got {k}")
    if bool(scores.isnan().any()):
        row, item = scores.isnan().nonzero()[0].tolist()
        raise ValueError(f"the score of row {row} for item {item} is NaN")
    least = scores.topk(k).values[:, -1:]
    row, place = (scores >= least).nonzero(as_tuple=True)  # k or more of each row, places ascending
    best = scores[row, place]
    order = torch.from_numpy(np.lexsort((-best.numpy(), row.numpy())))  # stable: by row, then score
    starts = torch.searchsorted(row, torch.arange(rows))[:, None] + torch.arange(k)
    chosen = order[starts]
    return place[chosen], best[chosen]


def leave_out(scores: Tensor, items: Tensor, seen: Tensor, offsets: Tensor, first: int, k: int) -> Tensor:
    """`scores` (b, I) of the users from `first` on, with -inf where a user has seen an item.

    Args:
        items: (I,) int64, ascending, at least one. k: items that each user needs.
        seen, offsets: ids (n,) of each user (B + 1,); repeats and unknown ones are allowed.

    Raises ValueError where fewer than k items are left to a user.
    """
    own = offsets[first : first + len(scores) + 1]
    ids = seen[own[0] : own[-1]]
    users = torch.repeat_interleave(torch.arange(len(scores)), own.diff())
    places = torch.searchsorted(items, ids.contiguous()).clamp(max=len(items) - 1)
    known = items[places] == ids
    out = torch.zeros(scores.shape, dtype=torch.bool)
    out[users[known], places[known]] = True
    left = len(items) - out.sum(1)
    if 1 <= k <= len(items) and bool((left < k).any()):
        user = int((left < k).nonzero()[0])
        raise ValueError(
            f"k = {k} items are wanted, and user {first + user} has {int(left[user])} of {len(items)} left "
            "without those that are left out: take a smaller k, or exclude=None"
        )
    return scores.masked_fill(out, -torch.inf)


def recall(found: Tensor, wanted: Tensor) -> float:
    """Share of `wanted` (B, k) ids that are in the same row of `found` (B, m), the mean over all rows.

    1.0 without rows.
    """
    hits = (wanted[:, :, None] == found[:, None, :]).any(2)
    return float(hits.double().mean()) if hits.numel() else 1.0
