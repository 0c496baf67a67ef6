# mypy: ignore-errors
"""Norm, gate and dropout on the CPU: one row at a time, sums along a row in a fixed order."""

import numpy as np
import torch

from tritonrec.kernels.norm_mul_dropout.op import by_terms
from tritonrec.kernels.numba_float import dot
from tritonrec.kernels.philox.numba_philox import philox4x32
from tritonrec.kernels.philox.reference import DROPOUT, halves
from tritonrec.kernels.row_layout import contiguous_rows, flat, flat_rows
from tritonrec.kernels.workers import over_ranges

from ..caches import njit

F32 = np.float32
U = np.uintp
NO_GATE = np.empty(0, F32), U(0)
NO_IDS = np.empty(0, np.int64)


@njit(cache=True, nogil=True)
def draw_kept(kept, k0, k1, tag, sample, position, threshold, factor):
    """kept[d] = factor where column d survives, else 0; one Philox block serves four columns."""
    low = np.uint32(sample & 0xFFFFFFFF)
    high = np.uint32((sample >> 32) & 0xFFFFFFFF)
    place = np.uint32(position & 0xFFFFFFFF)
    for block in range(kept.shape[0] // 4):
        w0, w1, w2, w3 = philox4x32(low, high, np.uint32(tag | block), place, k0, k1)
        # A word below p * 2**32 drops its column; what survives is scaled by 1 / (1 - p).
        kept[4 * block] = factor if np.uint64(w0) >= threshold else F32(0.0)
        kept[4 * block + 1] = factor if np.uint64(w1) >= threshold else F32(0.0)
        kept[4 * block + 2] = factor if np.uint64(w2) >= threshold else F32(0.0)
        kept[4 * block + 3] = factor if np.uint64(w3) >= threshold else F32(0.0)


@njit(cache=True, nogil=True, error_model="numpy")  # a constant row is NaN with eps = 0, as elsewhere
def forward(
    x, x_stride, u, u_stride, weight, bias, eps, dropout, samples, positions, y, means, rstds,
    start, stop, dim,
):  # fmt: skip
    """Rows [start, stop) of y (contiguous), means and rstds; `u` of length 0 means a gate of ones."""
    k0, k1, tag, threshold, factor = dropout
    gated = u.shape[0] > 0
    ones = np.ones(dim, F32)
    centred = np.empty(dim, F32)
    kept = np.ones((dim + U(3)) // U(4) * U(4), F32)
    inverse = F32(1.0) / F32(dim)
    for t in range(start, stop):
        row = t * x_stride
        # A sum as a product with ones: `dot` has one order of summation for each dim.
        mean = dot(x, row, ones, U(0), dim) * inverse
        for d in range(dim):
            centred[d] = x[row + d] - mean
        rstd = F32(1.0) / np.sqrt(dot(centred, U(0), centred, U(0), dim) * inverse + eps)
        means[t], rstds[t] = mean, rstd
        if threshold:
            draw_kept(kept, k0, k1, tag, samples[t], positions[t], threshold, factor)
        to = t * dim
        gate = t * u_stride
        if gated:
            for d in range(dim):
                y[to + d] = (u[gate + d] * (centred[d] * rstd * weight[d] + bias[d])) * kept[d]
        else:
            for d in range(dim):
                y[to + d] = (centred[d] * rstd * weight[d] + bias[d]) * kept[d]


@njit(cache=True, nogil=True)
def backward(
    dy, dy_stride, x, x_stride, u, u_stride, weight, bias, dropout, samples, positions, means, rstds,
    dx, du, du_stride, dweight, dbias, start, stop, dim,
):  # fmt: skip
    """Rows [start, stop) of dx, du and each token's own terms of dweight and dbias, contiguous but for du."""
    k0, k1, tag, threshold, factor = dropout
    gated = u.shape[0] > 0
    ones = np.ones(dim, F32)
    normed = np.empty(dim, F32)
    slope = np.empty(dim, F32)
    kept = np.ones((dim + U(3)) // U(4) * U(4), F32)
    inverse = F32(1.0) / F32(dim)
    for t in range(start, stop):
        if threshold:
            draw_kept(kept, k0, k1, tag, samples[t], positions[t], threshold, factor)
        mean, rstd = means[t], rstds[t]
        row, gate, from_, to = t * x_stride, t * u_stride, t * dy_stride, t * dim
        du_row = t * du_stride
        for d in range(dim):
            normed[d] = (x[row + d] - mean) * rstd
        if gated:
            for d in range(dim):
                g = dy[from_ + d] * kept[d]
                du[du_row + d] = g * (normed[d] * weight[d] + bias[d])
                dbias[to + d] = g * u[gate + d]
        else:
            for d in range(dim):
                dbias[to + d] = dy[from_ + d] * kept[d]
        for d in range(dim):
            # With g = dy * kept * u: y = normed * weight + bias, so
            # dweight takes g * normed, dbias g, and normed g * weight.
            dweight[to + d] = dbias[to + d] * normed[d]
            slope[d] = dbias[to + d] * weight[d]
        # The norm takes mean and scale out of x: dx has no part
        # along a constant (level) or along normed (along).
        level = dot(slope, U(0), ones, U(0), dim) * inverse
        along = dot(slope, U(0), normed, U(0), dim) * inverse
        for d in range(dim):
            dx[to + d] = rstd * ((slope[d] - level) - normed[d] * along)


def norm_mul_dropout(
    x, u, weight, bias, eps, p, seed, sample_ids, positions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y (L, D), and means and rstds (L,) of the rows of x."""
    y, means, rstds = x.new_empty(x.shape), x.new_empty(len(x)), x.new_empty(len(x))
    if y.numel() == 0:
        return y, means.zero_(), rstds.zero_()
    rows, dim = x.shape
    arguments = (
        *_rows(x), *_rows(u), flat(weight), flat(bias), F32(eps), *_draws(p, seed, sample_ids, positions),
        flat(y), flat(means), flat(rstds),
    )  # fmt: skip
    over_ranges(
        lambda start, stop: forward(*arguments, U(start), U(stop), U(dim)), rows,
        (60.0 if p else 20.0) * y.numel(),
    )  # fmt: skip
    return y, means, rstds


def norm_mul_dropout_backward_into(
    du, dy, x, u, weight, bias, p, seed, sample_ids, positions, means, rstds
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx and the terms of dweight and dbias; overwrites du, which may have any row stride."""
    dx, dweight, dbias = (x.new_empty(x.shape) for _ in range(3))
    if dx.numel() == 0:
        return dx, dweight, dbias
    rows, dim = x.shape
    arguments = (
        *_rows(dy), *_rows(x), *_rows(u), flat(weight), flat(bias), *_draws(p, seed, sample_ids, positions),
        flat(means), flat(rstds), flat(dx), *flat_rows(du), flat(dweight), flat(dbias),
    )  # fmt: skip
    over_ranges(
        lambda start, stop: backward(*arguments, U(start), U(stop), U(dim)), rows,
        (80.0 if p else 40.0) * dx.numel(),
    )  # fmt: skip
    return dx, dweight, dbias


norm_mul_dropout_backward_exact = by_terms(norm_mul_dropout_backward_into, "cpu")


def _rows(matrix: torch.Tensor | None) -> tuple[np.ndarray, np.uintp]:
    return NO_GATE if matrix is None else flat_rows(contiguous_rows(matrix))


def _draws(
    p: float, seed: int, sample_ids: torch.Tensor | None, positions: torch.Tensor | None
) -> tuple[tuple[np.uint32, np.uint32, np.int64, np.uint64, np.float32], np.ndarray, np.ndarray]:
    """What dropout is drawn from: seed, tag, threshold and factor, then the ids of the tokens."""
    k0, k1 = halves(seed)
    drawing = np.uint32(k0), np.uint32(k1), np.int64(DROPOUT), np.uint64(int(p * 2**32)), F32(1 / (1 - p))
    if not p or sample_ids is None or positions is None:
        return drawing, NO_IDS, NO_IDS
    return drawing, flat(sample_ids), flat(positions)
