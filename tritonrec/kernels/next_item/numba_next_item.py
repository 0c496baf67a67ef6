# mypy: ignore-errors
"""Gradients of a micro-batch's rows into exact sums on the CPU; see `cpu_next_item.add_row_gradients`."""

import numpy as np

from tritonrec.kernels.numba_addresses import floats, integers
from tritonrec.kernels.rows.numba_segment_sum import add_batch, add_products_batch

from ..caches import njit

I = np.int64
U = np.uintp
OUT, OUT_ROWS, DIM, ROWS, VALUES, COUNT, HIDDEN, TOKENS, SLOPES, PAIRS = range(10)


@njit(cache=True, nogil=True)
def add_row_gradients(a, scale, limit):
    """Position (row * dim + column) of the first value, or else of the first product, that its sum cannot
    take, or -1.
    """
    dim, count = a[DIM], a[COUNT]
    out = integers(a[OUT], a[OUT_ROWS] * dim)
    bad = add_batch(
        out, U(dim), floats(a[VALUES], count * dim), U(dim), integers(a[ROWS], count), np.empty(0, np.int64),
        U(dim), scale, limit,
    )  # fmt: skip
    if bad >= 0 or a[PAIRS] == 0:
        return bad
    bad = add_products_batch(
        out, U(dim), floats(a[HIDDEN], a[TOKENS] * dim), U(dim), floats(a[SLOPES], a[PAIRS]),
        integers(a[ROWS] + I(8) * count, a[PAIRS]), U(dim), U(a[PAIRS] // a[TOKENS]), scale, limit,
    )  # fmt: skip
    return bad if bad < 0 else count * dim + bad
