# mypy: ignore-errors
"""Segment sums on the CPU: rows are added to their segment in order of occurrence.

Flat arrays and row strides (`kernels.row_layout.flat_rows`), so that the inner loop over columns vectorises;
the loop over occurrences never changes its order, so a vector width cannot change a bit.
"""

import numpy as np

from tritonrec.kernels.fixed_point.numba_fixed_point import add_rounded, add_terms
from tritonrec.kernels.numba_intrinsics import prefetch

from ..caches import njit

# Rows of a large `out` are met at random, so each loop asks for the cache lines of the row 16 occurrences on.
# 262,144 rows of 64 columns into 131,072 segments took 17.8 ms without, 9.9 ms 4 ahead, 7.6 ms 8 ahead and
# 6.0 ms 16 ahead ("batch", one Zen 5 thread); where `out` fits the cache it costs up to 5 %. The request is
# written out in each loop: as a function it halved the gain.
AHEAD = 16


@njit(cache=True, nogil=True)
def add_window(out, out_stride, values, value_stride, segments, dim):
    count = segments.shape[0]
    for i in range(count):
        if i + AHEAD < count:
            ahead = np.uintp(segments[i + AHEAD]) * out_stride
            for d in range(np.uintp(0), dim, np.uintp(16)):
                prefetch(out, ahead + d)
        to = np.uintp(segments[i]) * out_stride
        first = np.uintp(i) * value_stride
        for d in range(dim):
            out[to + d] += values[first + d]


@njit(cache=True, nogil=True)
def add_batch(out, out_stride, values, value_stride, segments, dim, scale, limit):
    """Position (row * dim + column) of the first value that cannot be added, or -1."""
    count = segments.shape[0]
    for i in range(count):
        if i + AHEAD < count:
            ahead = np.uintp(segments[i + AHEAD]) * out_stride
            for d in range(np.uintp(0), dim, np.uintp(8)):
                prefetch(out, ahead + d)
        to = np.uintp(segments[i]) * out_stride
        column = add_rounded(out, to, values, np.uintp(i) * value_stride, dim, scale, limit)
        if column >= 0:
            return np.int64(i) * np.int64(dim) + column
    return np.int64(-1)


@njit(cache=True, nogil=True)
def add_batch_terms(out, out_stride, terms, term_stride, segments, dim):
    """`add_batch` for values that lie on the grid already."""
    count = segments.shape[0]
    for i in range(count):
        if i + AHEAD < count:
            ahead = np.uintp(segments[i + AHEAD]) * out_stride
            for d in range(np.uintp(0), dim, np.uintp(8)):
                prefetch(out, ahead + d)
        to = np.uintp(segments[i]) * out_stride
        column = add_terms(out, to, terms, np.uintp(i) * term_stride, dim)
        if column >= 0:
            return np.int64(i) * np.int64(dim) + column
    return np.int64(-1)
