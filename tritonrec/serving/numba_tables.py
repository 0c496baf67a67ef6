# mypy: ignore-errors
"""Rows of many tables by id in one call of the CPU: a call for each table costs more than its rows."""

import numpy as np

from tritonrec.kernels.caches import njit
from tritonrec.kernels.numba_addresses import floats, integers

U = np.uintp


@njit(cache=True, nogil=True)
def place_of(ids, wanted):
    """The place of an id among ascending, distinct ones, or -1.

    Distinct whole numbers ascend by one at least, so the distances to both ends bound the place: of ids
    without gaps, as numbered words have, nothing is left to search.
    """
    last = len(ids) - 1
    if last < 0 or wanted < ids[0] or wanted > ids[last]:
        return -1
    # differences of int64 fit uint64 alone
    below, above = np.uint64(wanted) - np.uint64(ids[0]), np.uint64(ids[last]) - np.uint64(wanted)
    low = last - np.int64(above) if above < np.uint64(last) else 0
    high = np.int64(below) if below < np.uint64(last) else last
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if ids[low] == wanted else -1


@njit(cache=True, nogil=True)
def look_up(tables, count, dim, out, unknown, start, stop):
    """Rows of samples [start, stop) into flat out (count, T, dim); of a table without one, `unknown` (T,).

    tables: (T, 4) int64: addresses of a table's ids and weights, their number, the address of the samples'
    ids.
    """
    width = U(len(tables)) * dim
    for t in range(len(tables)):
        rows = tables[t, 2]
        ids, weights = integers(tables[t, 0], rows), floats(tables[t, 1], rows * np.int64(dim))
        wanted = integers(tables[t, 3], count)
        for i in range(start, stop):
            place = place_of(ids, wanted[i])
            if place < 0:
                unknown[t] = True
                continue
            to, row = U(i) * width + U(t) * dim, U(place) * dim
            for d in range(dim):
                out[to + d] = weights[row + d]
