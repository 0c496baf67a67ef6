# mypy: ignore-errors
"""Sampled softmax on the CPU: one token at a time, its scores never in memory for longer than that."""

import math
from typing import Any

import numpy as np
import torch

from tritonrec.kernels.numba_float import dot, exp
from tritonrec.kernels.row_layout import contiguous_rows, flat, flat_rows
from tritonrec.kernels.workers import over_ranges

from ..caches import njit

F32 = np.float32
U = np.uintp


@njit(cache=True, nogil=True)
def _probabilities(hidden, h, positive, p, negatives, n, valid, first, scale, score, dim):
    """Turn the token's scores into probabilities in `score`; returns its loss."""
    count = score.shape[0]
    score[0] = dot(hidden, h, positive, p, dim) * scale
    most = score[0]
    for c in range(1, count):
        score[c] = dot(hidden, h, negatives, n + U(c - 1) * dim, dim) * scale
        # `not <=` and not `>`: a NaN becomes the greatest score, and the loss is NaN.
        if valid[first + U(c - 1)] and not score[c] <= most:
            most = score[c]
    shifted = score[0] - most
    # `exp` takes what is below e**-87 for that: terms of negatives that are not valid are set to 0 below.
    for c in range(count):
        score[c] = exp(score[c] - most)
    total = score[0]
    for c in range(1, count):
        if not valid[first + U(c - 1)]:
            score[c] = F32(0.0)
        total += score[c]
    for c in range(count):
        score[c] = score[c] / total
    return F32(math.log(total)) - shifted


@njit(cache=True, nogil=True)
def _start_gradients(hidden, positive, h, slope, dhidden, dpositive, dim):
    """The positive's part of the gradients of one token."""
    for d in range(dim):
        dhidden[h + d] = slope * positive[h + d]
        dpositive[h + d] = slope * hidden[h + d]


@njit(cache=True, nogil=True)
def forward(hidden, positive, negatives, valid, scale, losses, start, stop, dim, count):
    score = np.empty(count + U(1), F32)
    for t in range(start, stop):
        losses[t] = _probabilities(
            hidden,
            t * dim,
            positive,
            t * dim,
            negatives,
            t * count * dim,
            valid,
            t * count,
            scale,
            score,
            dim,
        )


@njit(cache=True, nogil=True)
def backward(
    dloss, hidden, positive, negatives, valid, scale, dhidden, dpositive, dnegatives, start, stop, dim, count
):  # fmt: skip
    score = np.empty(count + U(1), F32)
    for t in range(start, stop):
        h, n = t * dim, t * count * dim
        # Scores are computed again: keeping them would take L * K floats.
        _probabilities(hidden, h, positive, h, negatives, n, valid, t * count, scale, score, dim)
        factor = dloss[t] * scale
        _start_gradients(hidden, positive, h, (score[0] - F32(1.0)) * factor, dhidden, dpositive, dim)
        for c in range(count):
            slope = score[c + U(1)] * factor
            row = n + c * dim
            for d in range(dim):
                dhidden[h + d] += slope * negatives[row + d]
                dnegatives[row + d] = slope * hidden[h + d]


@njit(cache=True, nogil=True)
def _take(matrix, stride, rows, first, own, dim, count):
    """own[c] = matrix[rows[first + c]], for the negatives of one token."""
    for c in range(count):
        row = U(rows[first + c]) * stride
        for d in range(dim):
            own[c * dim + d] = matrix[row + d]


@njit(cache=True, nogil=True)
def forward_rows(
    hidden, positive, matrix, stride, rows, valid, scale, losses, start, stop, dim, count
):  # fmt: skip
    """`forward` of negatives that are rows of a matrix; those of one token at a time are side by side."""
    score, own = np.empty(count + U(1), F32), np.empty(count * dim, F32)
    for t in range(start, stop):
        _take(matrix, stride, rows, t * count, own, dim, count)
        losses[t] = _probabilities(
            hidden, t * dim, positive, t * dim, own, U(0), valid, t * count, scale, score, dim
        )


@njit(cache=True, nogil=True)
def backward_rows(
    dloss, hidden, positive, matrix, stride, rows, valid, scale, dhidden, dpositive, slopes, start, stop, dim,
    count,
):  # fmt: skip
    """`backward`, with the slopes (L, K) for the gradients of negatives."""
    score, own = np.empty(count + U(1), F32), np.empty(count * dim, F32)
    for t in range(start, stop):
        h = t * dim
        _take(matrix, stride, rows, t * count, own, dim, count)
        _probabilities(hidden, h, positive, h, own, U(0), valid, t * count, scale, score, dim)
        factor = dloss[t] * scale
        _start_gradients(hidden, positive, h, (score[0] - F32(1.0)) * factor, dhidden, dpositive, dim)
        for c in range(count):
            slope = score[c + U(1)] * factor
            slopes[t * count + c] = slope
            for d in range(dim):
                dhidden[h + d] += slope * own[c * dim + d]


def sampled_softmax(hidden, positive, negatives, valid, scale, rows) -> torch.Tensor:
    """`tritonrec.kernels.sampled_softmax.op.sampled_softmax`, with scale = 1 / temperature."""
    losses = hidden.new_empty(len(hidden))
    kernel, arrays = (forward, (flat(negatives),)) if rows is None else (forward_rows, _rows(negatives, rows))
    arrays = flat(hidden), flat(positive), *arrays, flat(valid), F32(scale), flat(losses)
    dim, count = U(hidden.shape[1]), U(valid.shape[1])
    over_ranges(
        lambda start, stop: kernel(*arrays, U(start), U(stop), dim, count),
        len(hidden), 4.0 * valid.numel() * hidden.shape[1],
    )  # fmt: skip
    return losses


def sampled_softmax_backward(
    dloss, hidden, positive, negatives, valid, scale, rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.sampled_softmax.op.sampled_softmax_backward_reference`."""
    last = negatives if rows is None else valid
    gradients = tuple(hidden.new_empty(each.shape) for each in (hidden, positive, last))
    if len(hidden) == 0:
        return gradients
    kernel, arrays = (
        (backward, (flat(negatives),)) if rows is None else (backward_rows, _rows(negatives, rows))
    )
    arrays = *map(flat, (dloss, hidden, positive)), *arrays, flat(valid), F32(scale), *map(flat, gradients)
    dim, count = U(hidden.shape[1]), U(valid.shape[1])
    over_ranges(
        lambda start, stop: kernel(*arrays, U(start), U(stop), dim, count),
        len(hidden), 8.0 * valid.numel() * hidden.shape[1],
    )  # fmt: skip
    return gradients


def _rows(negatives: torch.Tensor, rows: torch.Tensor) -> tuple[Any, ...]:
    """The matrix that holds the negatives, its row stride, and which of its rows they are."""
    return *flat_rows(contiguous_rows(negatives)), flat(rows)
