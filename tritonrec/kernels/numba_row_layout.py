"""Checks of row numbers on the CPU."""

import numpy as np

from .caches import njit


@njit(cache=True, nogil=True)
def first_outside(rows, limit):
    """Position of the first row number outside [0, limit), or -1."""
    outside = 0
    for i in range(rows.shape[0]):
        outside += np.uint64(rows[i]) >= limit
    if outside:
        for i in range(rows.shape[0]):
            if np.uint64(rows[i]) >= limit:
                return i
    return -1
