# mypy: ignore-errors
"""Places of tokens and their rows plus positions on the CPU; see `cpu_token_rows`."""

import numpy as np

from tritonrec.kernels.numba_addresses import floats, integers

from ..caches import njit

U = np.uintp
SIZE = 11
SAMPLES, TOKENS, DIM, LONGEST, OFFSETS, IDS, TIMES, ROWS, WEIGHT, PLACES, X = range(SIZE)


@njit(cache=True, nogil=True)
def place(a, factor):
    """Fill places (2 or 3, L) and x (L, D); False, and nothing is written, for offsets that do not fit."""
    samples, tokens, dim = a[SAMPLES], a[TOKENS], U(a[DIM])
    offsets, ids = integers(a[OFFSETS], samples + 1), integers(a[IDS], samples)
    if offsets[0] != 0 or offsets[samples] != tokens:
        return False
    for b in range(samples):
        if offsets[b + 1] < offsets[b] or offsets[b + 1] - offsets[b] > a[LONGEST]:
            return False
    timed, stride = a[TIMES] != 0, U(tokens)
    times, places = integers(a[TIMES], tokens), integers(a[PLACES], 3 * tokens)
    rows, x = floats(a[ROWS], tokens * a[DIM]), floats(a[X], tokens * a[DIM])
    weight = floats(a[WEIGHT], a[LONGEST] * a[DIM])
    for b in range(samples):
        first, last = U(offsets[b]), U(offsets[b + 1])
        for t in range(first, last):
            places[t], places[stride + t] = ids[b], t - first
            if timed:
                places[U(2) * stride + t] = times[t + U(1)] if t + U(1) < last else times[t]
            to, of = t * dim, (t - first) * dim
            for d in range(dim):
                x[to + d] = rows[to + d] * factor + weight[of + d]
    return True
