# mypy: ignore-errors
"""Ranks and areas under curves in one pass over scores that are in their place."""

import numpy as np

from tritonrec.kernels.caches import njit


@njit(cache=True, nogil=True)
def count_above(scores, own, split, seen_users, seen_items, above):
    """Add to above[u] the items with a score above own[u], or as high and before place split[u].

    scores (U, I) of some items; the pairs of `seen_users` and `seen_items`, distinct, do not count.
    Returns (user, item) of a score that is NaN, or (-1, -1).
    """
    users, items = scores.shape
    for u in range(users):
        row, mine, before, count, wrong = scores[u], own[u], split[u], 0, False
        for i in range(before):
            count += row[i] >= mine
            wrong |= row[i] != row[i]
        for i in range(before, items):
            count += row[i] > mine
            wrong |= row[i] != row[i]
        if wrong:
            for i in range(items):
                if row[i] != row[i]:
                    return u, i
        above[u] += count
    for at in range(len(seen_users)):
        u, i = seen_users[at], seen_items[at]
        above[u] -= scores[u, i] > own[u] or (scores[u, i] == own[u] and i < split[u])
    return -1, -1


@njit(cache=True, nogil=True)
def count_pairs(packed, users, twice_won, positives, impressions):
    """Of each user the pairs of impressions that are won, twice, so that a tie counts one.

    packed (n,) uint64, ascending: user, score, label from the highest bit to the lowest, 31, 32 and one bits.
    """
    at, count = 0, len(packed)
    while at < count:
        user = packed[at] >> np.uint64(33)
        first, below = at, 0
        while at < count and packed[at] >> np.uint64(33) == user:
            key, negatives, ties = packed[at] >> np.uint64(1), 0, 0
            while at < count and packed[at] >> np.uint64(1) == key:
                label = np.int64(packed[at] & np.uint64(1))
                ties += label
                negatives += 1 - label
                at += 1
            twice_won[user] += ties * (2 * below + negatives)
            positives[user] += ties
            below += negatives
        impressions[user] = at - first
