# mypy: ignore-errors
"""Exact search in one pass over the items, whose scores are looked at block by block, in the cache.

A user's candidates are the items whose score is above the k-th best so far, in the order of the items. Twice
k of them are sorted, k are kept, and the k-th is the new limit; few items pass it. A score has the bits of
`ops.linear`.
"""

import numpy as np

from tritonrec.kernels.caches import njit
from tritonrec.kernels.linear.numba_linear import NO_BIAS, rows_times
from tritonrec.kernels.numba_matmul import add_column_products

U = np.uintp
ITEMS = U(256)
"""Items of a block."""
USERS = 64
"""Users that are searched together: 64 KiB of scores."""


@njit(cache=True, nogil=True)
def _keep_best(scores, places, count, k):
    """Sort the candidates of a user, of equal scores the earlier one first, and keep k."""
    order = np.argsort(-scores[:count], kind="mergesort")[:k]
    scores[: len(order)], places[: len(order)] = scores[:count][order], places[:count][order]
    return len(order)


@njit(cache=True, nogil=True)
def search(weights, stride, vectors, users, dim, start, stop, seen, offsets, k, scores, places, counts):
    """The best of items [start, stop) for each user, best first: scores, places, their counts.

    `weights` are rows of items (I, dim) with `stride`, `vectors` users' as a weight (dim, users) laid out for
    `rows_times`. `seen` are the places of items that a user is not given, ascending, at `offsets`
    (users + 1,). `scores` and `places` are (users, n), n at least min(2 k, items + 1), and `counts` (users,)
    begin with 0.
    Returns (user, place) of a score that is NaN, or (-1, -1).
    """
    block = np.empty(ITEMS * users + U(1), np.float32)
    together = max(U(1), U(16) // users)  # items that are looked at together
    limits = np.full(together * users, np.nan, np.float32)  # NaN: below k candidates, and any score passes
    for first in range(start, stop, ITEMS):
        items = min(ITEMS, stop - first)
        rows = weights[first * stride :]
        if users == U(1):
            block[:items] = 0
            add_column_products(block, rows, stride, vectors, items, dim)
        else:
            rows_times(rows, stride, vectors, NO_BIAS, block, U(0), items, dim, users)
        for r in range(U(0), items, together):
            last = min(r + together, items)
            passes = False
            for i in range((last - r) * users):
                passes |= not (block[r * users + i] <= limits[i])
            for i in range((last - r) * users if passes else U(0)):
                b, score, place = i % users, block[r * users + i], np.int64(first + r + i // users)
                if score <= limits[b]:
                    continue
                if score != score:
                    return np.int64(b), place
                own = seen[offsets[b] : offsets[b + U(1)]]
                at = np.searchsorted(own, place)
                if at < len(own) and own[at] == place:
                    continue
                count = counts[b]
                scores[b, count], places[b, count] = score, place
                counts[b] = count + 1
                if count + 1 == scores.shape[1]:
                    counts[b] = _keep_best(scores[b], places[b], count + 1, k)
                    limits[b::users] = scores[b, k - 1]
    for b in range(users):
        counts[b] = _keep_best(scores[b], places[b], counts[b], k)
    return np.int64(-1), np.int64(-1)
