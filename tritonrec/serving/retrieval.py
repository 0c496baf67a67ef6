"""The best of many scores, with one answer where scores are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.linear.numba_linear import laid_out
from ..kernels.row_layout import contiguous_rows, flat_rows
from ..kernels.workers import over_ranges
from ..settings import typed


@typed
def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of each row's scores: places (B, k) int64 and scores (B, k), best first.

    Of equal scores the first place wins, which `torch.topk` leaves open. Raises ValueError for scores that
    are not (B, I) or have a NaN, and for a k outside [1, I].
    """
    if scores.dim() != 2:
        raise ValueError(f"scores must be (B, I), got {tuple(scores.shape)}")
    rows, items = scores.shape
    check_k(k, items)
    if bool(scores.isnan().any()):
        raise not_finite(*scores.isnan().nonzero()[0].tolist())
    least = scores.topk(k).values[:, -1:]
    row, place = (scores >= least).nonzero(as_tuple=True)  # k or more of each row, places ascending
    best = scores[row, place]
    order = best.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]  # by row, then score, then place
    numbers = torch.arange(max(rows, k), device=row.device)
    chosen = order[torch.searchsorted(row, numbers[:rows])[:, None] + numbers[:k]]
    return place[chosen], best[chosen]


def check_k(k: object, items: int) -> None:
    """Raise ValueError for a k that is no whole number in [1, items]."""
    if not isinstance(k, int | np.integer) or isinstance(k, bool):
        raise ValueError(f"k must be a whole number, got {k!r}")
    if not 1 <= k <= items:
        raise ValueError(f"k must be in [1, {items}], the number of items, got {k}")


def not_finite(row: int, item: int, score: object = "NaN") -> ValueError:
    return ValueError(f"the score of row {row} for item {item} is {score}")


def seen_places(items: Tensor, seen: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Places (n,) among `items` of what each user has seen, ascending and distinct, and offsets (B + 1,).

    Args:
        items: (I,) int64, ascending, at least one. k: items that each user needs.
        seen, offsets: ids of each user (B + 1,); repeats and unknown ones are allowed.

    Raises ValueError where fewer than k items are left to a user.
    """
    # numpy's calls cost a fifth of torch's, which is what a single user's history takes
    ids, bounds = items.numpy(), offsets.numpy()
    wanted, count = seen.numpy()[bounds[0] : bounds[-1]], len(bounds) - 1
    places = np.minimum(ids.searchsorted(wanted), len(ids) - 1)
    known = ids[places] == wanted
    users = np.arange(count).repeat(np.diff(bounds))
    pairs = np.unique(users[known] * len(ids) + places[known])  # ascending
    counts = np.bincount(pairs // len(ids), minlength=count)
    left = len(ids) - counts
    if (left < k).any():
        user = int((left < k).argmax())
        raise ValueError(
            f"k = {k} items are wanted, and user {user} has {int(left[user])} of {len(ids)} left "
            "without those that are left out: take a smaller k, or exclude=None"
        )
    ends = np.concatenate([np.zeros(1, np.int64), counts.cumsum()])
    return torch.from_numpy(pairs % len(ids)), torch.from_numpy(ends)


def best_items(
    vectors: Tensor, weights: Tensor, k: int, seen: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """`top_k` of ``ops.linear(vectors, weights)`` without what was seen, and without all scores in memory.

    Args:
        vectors: (B, d) float32. weights: (I, d) float32 of the items. seen, offsets: of `seen_places`, which
            leaves k items or more to each user.

    Raises ValueError where a score is NaN.
    """
    parts = best_of_each(vectors, weights, k, seen, offsets)
    places, scores = ([each[column] for each in parts] for column in (0, 1))
    return (
        torch.from_numpy(np.array(places, np.int64).reshape(-1, k)),
        torch.from_numpy(np.array(scores, np.float32).reshape(-1, k)),
    )


def best_of_each(
    vectors: Tensor, weights: Tensor, k: int, seen: Tensor, offsets: Tensor
) -> list[tuple[np.ndarray, np.ndarray]]:
    """As `best_items`, places and scores of each user by itself: fewer than k where fewer are left."""
    from .numba_retrieval import USERS

    parts = []
    for first in range(0, len(vectors), USERS):
        own = offsets[first : first + USERS + 1].numpy()
        parts += _best_of(vectors[first : first + USERS].detach(), weights, k, seen.numpy(), own, first)
    return parts


def _best_of(
    vectors: Tensor, weights: Tensor, k: int, seen: np.ndarray, offsets: np.ndarray, first: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Places and scores of each of these users, whose numbers begin with `first`."""
    from .numba_retrieval import search

    users, (items, dim) = len(vectors), weights.shape
    given = (*flat_rows(contiguous_rows(weights)), laid_out(vectors.t()), np.uintp(users), np.uintp(dim))

    def run(start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]:
        size = users, min(2 * k, stop - start + 1)
        found = np.empty(size, np.float32), np.empty(size, np.int64), np.zeros(users, np.int64)
        return *found, search(*given, np.uintp(start), np.uintp(stop), seen, offsets, k, *found)

    ranges = over_ranges(run, items, 2.0 * items * dim * users)
    for *_, (user, item) in ranges:
        if user >= 0:
            raise not_finite(first + int(user), int(item))
    return [_joined(ranges, user, k) for user in range(users)]


def _joined(found: list[Any], user: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Places and scores of a user's best k of all ranges of items."""
    scores = np.concatenate([scores[user, : counts[user]] for scores, _, counts, _ in found])
    places = np.concatenate([places[user, : counts[user]] for _, places, counts, _ in found])
    order = np.argsort(-scores, kind="stable")[:k]
    return places[order], scores[order]


def recall(found: Tensor, wanted: Tensor) -> float:
    """Share of `wanted` (B, k) ids that are in the same row of `found` (B, m), the mean over all rows.

    1.0 without rows.
    """
    hits = (wanted[:, :, None] == found[:, None, :]).any(2)
    return float(hits.double().mean()) if hits.numel() else 1.0
