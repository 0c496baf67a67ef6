# mypy: ignore-errors
"""Ranks and areas under curves in one pass over scores that are in their place."""

import numpy as np

from tritonrec.kernels.caches import njit


@njit(cache=True, nogil=True)
def count_above(scores, targets, seen_starts, seen_items, above):
    """above[u] = items with a higher score than u's target, or the same and an earlier place.

    scores (U, I); targets (U,), -1 for none. Items ``seen_items[seen_starts[u] : seen_starts[u + 1]]``,
    distinct, do not count. Returns (user, item) of a score that is NaN, or (-1, -1).
    """
    users, items = scores.shape
    for u in range(users):
        row, target = scores[u], max(targets[u], 0)
        own, count, wrong = row[target], 0, False
        for i in range(target):
            count += row[i] >= own
            wrong |= row[i] != row[i]
        for i in range(target, items):
            count += row[i] > own
            wrong |= row[i] != row[i]
        if wrong:
            for i in range(items):
                if row[i] != row[i]:
                    return u, i
        for at in range(seen_starts[u], seen_starts[u + 1]):
            i = seen_items[at]
            count -= (row[i] > own) or (row[i] == own and i < target)
        above[u] = count
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
