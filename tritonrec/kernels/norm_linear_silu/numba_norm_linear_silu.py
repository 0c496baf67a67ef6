# mypy: ignore-errors
"""Norm, linear layer and SiLU on the CPU, a few rows at a time so that what lies between stays in the cache.

The loops are those of the three ops, so the bits are theirs. In bfloat16 and float16 the three ops run one
after another.
"""

import numpy as np
import torch

from tritonrec.kernels.autocast import LOW
from tritonrec.kernels.linear.numba_linear import laid_out, rows_times
from tritonrec.kernels.norm_linear_silu.op import by_terms, one_by_one, outputs
from tritonrec.kernels.norm_mul_dropout import numba_norm as norm
from tritonrec.kernels.row_layout import contiguous_rows, flat, flat_rows
from tritonrec.kernels.silu import numba_silu as silu
from tritonrec.kernels.workers import over_ranges

from ..caches import njit

F32 = np.float32
U = np.uintp
ROWS = U(32)
NONE = np.empty(0, F32)
NO_DROPOUT = np.uint32(0), np.uint32(0), np.int64(0), np.uint64(0), F32(1.0)
FORWARD, BACKWARD_INTO = one_by_one("cpu")


@njit(cache=True, nogil=True)
def forward(
    x, x_stride, norm_weight, norm_bias, eps, weight, bias, y, z, normed, means, rstds, start, stop,
    dim, columns,
):  # fmt: skip
    """Rows [start, stop) of y, means, rstds, and of z and normed unless they are empty; all contiguous.

    weight (dim, columns) with `weight_stride`, bias (columns,) or empty.
    """
    some_z, some_normed = np.empty(ROWS * columns, F32), np.empty(ROWS * dim, F32)
    none, no_ids = np.empty(0, F32), np.empty(0, np.int64)  # as arguments; constants are types of their own
    t = start
    #     x  ->  normed  ->  z = normed W + b  ->  y = silu(z)       three loops over 32 rows at a time
    # What backward needs is written where it is kept. Elsewhere the next rows reuse small buffers.
    while t < stop:
        rows = min(ROWS, stop - t)
        of_z = z[t * columns :] if z.shape[0] else some_z
        of_normed = normed[t * dim :] if normed.shape[0] else some_normed
        norm.forward(
            x[t * x_stride :], x_stride, none, U(0), norm_weight, norm_bias, eps, NO_DROPOUT, no_ids, no_ids,
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

    An empty z is computed again, with `inner_weight` (dim, columns), the transpose of weight (columns, dim);
    each with its `weight_stride`.
    `normed` is filled unless `has_normed`.
    """
    some_z, dnormed = np.empty(ROWS * columns, F32), np.empty(ROWS * dim, F32)
    some_means, some_rstds = np.empty(ROWS, F32), np.empty(ROWS, F32)
    none, no_ids = np.empty(0, F32), np.empty(0, np.int64)
    t = start
    while t < stop:
        rows = min(ROWS, stop - t)
        of_x, of_normed, of_dz = x[t * x_stride :], normed[t * dim :], dy[t * columns :]
        if not has_normed:
            norm.forward(
                of_x, x_stride, none, U(0), norm_weight, norm_bias, eps, NO_DROPOUT, no_ids, no_ids,
                of_normed, some_means, some_rstds, U(0), rows, dim,
            )  # fmt: skip
        of_z = z[t * columns :] if z.shape[0] else some_z
        if not z.shape[0]:
            rows_times(of_normed, dim, inner_weight, bias, of_z, U(0), rows, dim, columns)
        # dy becomes dz in place: the gradient of W is made of dz and normed, which the caller multiplies.
        silu.backward_in_place(of_dz, of_z, U(0), rows * columns)
        rows_times(of_dz, columns, weight, none, dnormed, U(0), rows, columns, dim)
        norm.backward(
            dnormed, dim, of_x, x_stride, none, U(0), norm_weight, norm_bias, NO_DROPOUT, no_ids, no_ids,
            means[t:], rstds[t:], dx[t * dim :], dnormed[:0], U(0), dnorm_weight[t * dim :],
            dnorm_bias[t * dim :], U(0), rows, dim,
        )  # fmt: skip
        t += rows


def norm_linear_silu(
    x, norm_weight, norm_bias, weight, bias, eps, keep_normed, keep_linear
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, and z and normed where they are kept, means and rstds, as `outputs` has them."""
    if weight.dtype in LOW:
        return FORWARD(x, norm_weight, norm_bias, weight, bias, eps, keep_normed, keep_linear)
    _check_dtype(x)
    y, z, normed, means, rstds = outputs(x, weight, keep_normed, keep_linear)
    (rows, dim), columns = x.shape, weight.shape[0]
    arguments = (
        *flat_rows(contiguous_rows(x)), flat(norm_weight), flat(norm_bias), F32(eps), laid_out(weight.t()),
        NONE if bias is None else flat(bias), flat(y), flat(z), flat(normed), flat(means), flat(rstds),
    )  # fmt: skip

    def run(start: int, stop: int) -> None:
        forward(*arguments, U(start), U(stop), U(dim), U(columns))

    over_ranges(run, rows, rows * (2.0 * dim * columns + 20.0 * dim + 10.0 * columns))
    return y, z, normed, means, rstds


def norm_linear_silu_backward_into(
    dy, x, norm_weight, norm_bias, weight, bias, eps, z, normed, means, rstds
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.norm_linear_silu.op.norm_linear_silu_backward_into_reference`."""
    if weight.dtype in LOW:
        return BACKWARD_INTO(
            dy, x, norm_weight, norm_bias, weight, bias, eps, z, normed, means, rstds
        )  # fmt: skip
    _check_dtype(x)
    has_z, has_normed = len(z) == len(x), len(normed) == len(x)
    dx, dnorm_weight, dnorm_bias = (torch.empty(x.shape, dtype=torch.float32, device="cpu") for _ in range(3))
    again = x.new_empty(len(x) * (not has_normed), x.shape[1])
    (rows, dim), columns = x.shape, weight.shape[0]
    arguments = (
        flat(dy), *flat_rows(contiguous_rows(x)), flat(norm_weight), flat(norm_bias), F32(eps),
        NONE if has_z else laid_out(weight.t()), NONE if bias is None else flat(bias), laid_out(weight),
        flat(z), flat(normed if has_normed else again), flat(means), flat(rstds), flat(dx),
        flat(dnorm_weight), flat(dnorm_bias),
    )  # fmt: skip

    def run(start: int, stop: int) -> None:
        backward(*arguments, U(start), U(stop), U(dim), U(columns), has_normed)

    products = 1 if has_z else 2
    over_ranges(run, rows, rows * (2.0 * products * dim * columns + 60.0 * dim + 20.0 * columns))
    return dx, dnorm_weight, dnorm_bias, again


norm_linear_silu_backward_exact = by_terms(norm_linear_silu_backward_into, "cpu")


def _check_dtype(x: torch.Tensor) -> None:
    if x.dtype != torch.float32:
        raise ValueError(f"norm_linear_silu on the CPU takes float32, bfloat16 or float16, got {x.dtype}")
