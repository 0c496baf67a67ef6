# mypy: ignore-errors
"""Batch-invariant products on the CPU, over the one inner loop of `kernels.numba_matmul`."""

import numpy as np

from tritonrec.kernels.fixed_point.numba_fixed_point import add_rounded
from tritonrec.kernels.numba_matmul import add_products

from ..caches import njit

U = np.uintp


@njit(cache=True, nogil=True)
def rows_times(x, x_stride, weight, bias, out, start, stop, inner, columns):
    """Rows [start, stop) of ``x @ weight + bias``: weight (inner, columns), bias (columns,) or empty."""
    for r in range(start, stop):
        first = r * columns
        if bias.shape[0]:
            for c in range(columns):
                out[first + c] = bias[c]
        else:
            for c in range(columns):
                out[first + c] = np.float32(0.0)
    add_products(
        out, start * columns, columns, x, start * x_stride, x_stride, U(1), weight, U(0), columns,
        stop - start, inner, columns,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def add_weight_gradients(
    grid, grid_stride, dy, dy_stride, x, x_stride, offsets, start, stop, inner, scale, limit
):
    """Rows [start, stop) of the grid: per sample the float32 product, rounded once, added.

    Four output rows of one sample fit the first-level cache together, so a product never reaches memory.
    Returns (sample, row, column) of the first value that cannot be added, or (-1, -1, -1), and the value;
    the first by sample, then row, whatever the order of the loops.
    """
    tile = np.empty(4 * inner, np.float32)
    first_bad = (np.int64(-1), np.int64(-1), np.int64(-1), np.float32(0.0))
    samples = offsets.shape[0] - 1
    o = start
    while o < stop:
        rows = min(U(4), stop - o)
        s = 0
        while s < samples:
            first = U(offsets[s])
            terms = U(offsets[s + 1]) - first
            s += 1
            if terms == 0:
                continue
            tile[:] = 0
            add_products(
                tile, U(0), inner, dy, first * dy_stride + o, U(1), dy_stride, x, first * x_stride, x_stride,
                rows, terms, inner,
            )  # fmt: skip
            for r in range(rows):
                column = add_rounded(grid, (o + r) * grid_stride, tile, r * inner, inner, scale, limit)
                if column >= 0:
                    first_bad = (np.int64(s - 1), np.int64(o + r), column, tile[r * inner + U(column)])
                    samples = s - 1  # what fails in this sample further down comes after
                    break
        o += U(4)
    return first_bad
