# mypy: ignore-errors
"""`masks.visible` as spans of keys, for loops on the CPU.

The query of row i sees [0, prefix), [low, high) and [own, i + 1): tokens that the window does not hide, the
history in its window, and the targets of its group up to itself. Four rows share runs of columns that cover
all their spans. Runs start at multiples of 64, where `add_products` starts a chain, so that a row's sums do
not depend on its company.
"""

import numpy as np

from ..caches import njit

I = np.int64
U = np.uintp
CHAIN = I(64)


@njit(cache=True, nogil=True)
def find_spans(spans, first, length, history, contexts, mask):
    """Write (prefix, low, high, own) of the rows from `first` to the end of a sequence to ``spans[row]``."""
    group, window, full, whole_prefix = mask[0], mask[1], mask[2], mask[3]
    near = window + max(contexts - 1, 0)  # rows up to here have everything before them in the window
    for row in range(first, length):
        place = min(row, history)
        low = I(0)
        if window > 0 and place > near and row >= contexts and (full == 0 or place < history - full):
            low = place - window
        spans[row, 0] = min(whole_prefix, low)
        spans[row, 1] = low
        spans[row, 2] = history if row < contexts else min(row + 1, history)
        spans[row, 3] = row + 1 if row < history else history + (row - history) // group * group


@njit(cache=True, nogil=True)
def find_runs(runs, spans, first, stop):
    """Write ascending runs of columns that cover the spans of rows [first, stop) to `runs`; how many."""
    prefix, low, high, own = spans[first, 0], spans[first, 1], spans[first, 2], spans[first, 3]
    for row in range(first + 1, stop):
        prefix, low = max(prefix, spans[row, 0]), min(low, spans[row, 1])
        high, own = max(high, spans[row, 2]), min(own, spans[row, 3])
    low, own = low // CHAIN * CHAIN, own // CHAIN * CHAIN
    if low <= prefix:
        low = prefix = I(0)
    if own <= high:
        high, own = max(high, stop), stop
    count = 0
    for left, right in ((I(0), prefix), (low, high), (own, stop)):
        if left < right:
            runs[count, 0], runs[count, 1] = left, right
            count += 1
    return count
