# mypy: ignore-errors
"""Places of tokens and their rows plus positions on the CPU; see `cpu_token_rows`."""

import numpy as np

from tritonrec.kernels.numba_addresses import booleans, floats, integers

from ..caches import njit

U = np.uintp
(
    SAMPLES, TOKENS, DIM, LONGEST, STRIDE,  # of the lists of places
    OFFSETS, IDS, TIMES, MATRIX, MATRIX_ROWS, AT, LABELS, NEGATIVES, COUNT,
    ROWS, WEIGHT, PLACES, X, VALID,
) = range(19)  # fmt: skip
SIZE = 19


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
    timed, stride = a[TIMES] != 0, U(a[STRIDE])
    times, places = integers(a[TIMES], tokens), integers(a[PLACES], 3 * a[STRIDE])
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


@njit(cache=True, nogil=True)
def begin(a, factor):
    """Gather rows (2 L, D) of a matrix, those of labels behind those of tokens, then `place`; and tell of
    each negative (L, K) whether it is another item than its token's label. False for numbers of rows outside
    of the matrix, and where `place` says so.
    """
    tokens, dim, count = a[TOKENS], U(a[DIM]), U(a[COUNT])
    at, matrix = integers(a[AT], 2 * tokens), floats(a[MATRIX], a[MATRIX_ROWS] * a[DIM])
    rows = floats(a[ROWS], 2 * tokens * a[DIM])
    for i in range(2 * tokens):
        if at[i] < 0 or at[i] >= a[MATRIX_ROWS]:
            return False
        of, to = U(at[i]) * dim, U(i) * dim
        for d in range(dim):
            rows[to + d] = matrix[of + d]
    labels, negatives = integers(a[LABELS], tokens), integers(a[NEGATIVES], tokens * a[COUNT])
    valid = booleans(a[VALID], tokens * a[COUNT])
    for t in range(tokens):
        first = U(t) * count
        for k in range(count):
            valid[first + k] = negatives[first + k] != labels[t]
    return place(a, factor)
