# mypy: ignore-errors
"""Norm, gate and dropout on the CPU: one row at a time, sums along a row in a fixed order."""

import numpy as np

from tritonrec.kernels.numba_float import dot
from tritonrec.kernels.philox.numba_philox import philox4x32

from ..caches import njit

F32 = np.float32
U = np.uintp


@njit(cache=True, nogil=True)
def draw_kept(kept, k0, k1, tag, sample, position, threshold, factor):
    """kept[d] = factor where column d survives, else 0; one Philox block serves four columns."""
    low = np.uint32(sample & 0xFFFFFFFF)
    high = np.uint32((sample >> 32) & 0xFFFFFFFF)
    place = np.uint32(position & 0xFFFFFFFF)
    for block in range(kept.shape[0] // 4):
        w0, w1, w2, w3 = philox4x32(low, high, np.uint32(tag | block), place, k0, k1)
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
            dweight[to + d] = dbias[to + d] * normed[d]
            slope[d] = dbias[to + d] * weight[d]
        level = dot(slope, U(0), ones, U(0), dim) * inverse
        along = dot(slope, U(0), normed, U(0), dim) * inverse
        for d in range(dim):
            dx[to + d] = rstd * ((slope[d] - level) - normed[d] * along)
