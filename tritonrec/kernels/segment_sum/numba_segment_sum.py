"""Segment sums on the CPU: rows are added to their segment in order of occurrence.

Flat arrays and row strides (`kernels.row_layout.flat_rows`), so that the inner loop over columns vectorises;
the loop over occurrences never changes its order, so a vector width cannot change a bit.
"""

import numpy as np
from numba import njit

from tritonrec.kernels.grid.numba_grid import add_rounded, add_terms


@njit(cache=True, nogil=True)
def add_window(out, out_stride, values, value_stride, segments, dim):
    for i in range(segments.shape[0]):
        to = np.uintp(segments[i]) * out_stride
        first = np.uintp(i) * value_stride
        for d in range(dim):
            out[to + d] += values[first + d]


@njit(cache=True, nogil=True)
def add_batch(out, out_stride, values, value_stride, segments, dim, scale, limit):
    """Position (row * dim + column) of the first value that cannot be added, or -1."""
    for i in range(segments.shape[0]):
        to = np.uintp(segments[i]) * out_stride
        column = add_rounded(out, to, values, np.uintp(i) * value_stride, dim, scale, limit)
        if column >= 0:
            return np.int64(i) * np.int64(dim) + column
    return np.int64(-1)


@njit(cache=True, nogil=True)
def add_batch_terms(out, out_stride, terms, term_stride, segments, dim):
    """`add_batch` for values that lie on the grid already."""
    for i in range(segments.shape[0]):
        to = np.uintp(segments[i]) * out_stride
        column = add_terms(out, to, terms, np.uintp(i) * term_stride, dim)
        if column >= 0:
            return np.int64(i) * np.int64(dim) + column
    return np.int64(-1)
