# mypy: ignore-errors
"""Norm, linear layer and SiLU on the CPU, a few rows at a time so that what lies between stays in the cache.

The loops are those of the three ops, so the bits are theirs.
"""

import numpy as np

from tritonrec.kernels.linear.numba_linear import rows_times
from tritonrec.kernels.norm_mul_dropout import numba_norm as norm
from tritonrec.kernels.silu import numba_silu as silu

from ..caches import njit

F32 = np.float32
U = np.uintp
ROWS = U(32)
NONE = np.empty(0, F32)
NO_IDS = np.empty(0, np.int64)
NO_DROPOUT = np.uint32(0), np.uint32(0), np.int64(0), np.uint64(0), F32(1.0)


@njit(cache=True, nogil=True)
def forward(
    x, x_stride, norm_weight, norm_bias, eps, weight, bias, y, z, normed, means, rstds, start, stop,
    dim, columns,
):  # fmt: skip
    """Rows [start, stop) of y, means, rstds, and of z and normed unless they are empty; all contiguous.

    weight (dim, columns), bias (columns,) or empty.
    """
    some_z, some_normed = np.empty(ROWS * columns, F32), np.empty(ROWS * dim, F32)
    t = start
    while t < stop:
        rows = min(ROWS, stop - t)
        of_z = z[t * columns :] if z.shape[0] else some_z
        of_normed = normed[t * dim :] if normed.shape[0] else some_normed
        norm.forward(
            x[t * x_stride :], x_stride, NONE, U(0), norm_weight, norm_bias, eps, NO_DROPOUT, NO_IDS, NO_IDS,
            of_normed, means[t:], rstds[t:], U(0), rows, dim,
        )  # fmt: skip
        rows_times(of_normed, dim, weight, bias, of_z, U(0), rows, dim, columns)
        silu.forward(of_z, y[t * columns :], U(0), rows * columns)
        t += rows


@njit(cache=True, nogil=True)
def backward(
    dy, x, x_stride, norm_weight, norm_bias, eps, inner_weight, bias, weight, z, normed, means, rstds,
    dx, dnorm_weight, dnorm_bias, start, stop, dim, columns, has_normed,
):  # fmt: skip
    """Rows [start, stop): dy becomes dz; dx and each token's terms of the norm's gradients; all contiguous.

    An empty z is computed again, with `inner_weight` (dim, columns), the transpose of weight (columns, dim).
    `normed` is filled unless `has_normed`.
    """
    some_z, dnormed = np.empty(ROWS * columns, F32), np.empty(ROWS * dim, F32)
    some_means, some_rstds = np.empty(ROWS, F32), np.empty(ROWS, F32)
    t = start
    while t < stop:
        rows = min(ROWS, stop - t)
        of_x, of_normed, of_dz = x[t * x_stride :], normed[t * dim :], dy[t * columns :]
        if not has_normed:
            norm.forward(
                of_x, x_stride, NONE, U(0), norm_weight, norm_bias, eps, NO_DROPOUT, NO_IDS, NO_IDS,
                of_normed, some_means, some_rstds, U(0), rows, dim,
            )  # fmt: skip
        of_z = z[t * columns :] if z.shape[0] else some_z
        if not z.shape[0]:
            rows_times(of_normed, dim, inner_weight, bias, of_z, U(0), rows, dim, columns)
        silu.backward_in_place(of_dz, of_z, U(0), rows * columns)
        rows_times(of_dz, columns, weight, NONE, dnormed, U(0), rows, columns, dim)
        norm.backward(
            dnormed, dim, of_x, x_stride, NONE, U(0), norm_weight, norm_bias, NO_DROPOUT, NO_IDS, NO_IDS,
            means[t:], rstds[t:], dx[t * dim :], dnormed[:0], U(0), dnorm_weight[t * dim :],
            dnorm_bias[t * dim :], U(0), rows, dim,
        )  # fmt: skip
        t += rows
