# mypy: ignore-errors
"""Sampled softmax on the CPU: one token at a time, its scores never in memory for longer than that."""

import math

import numpy as np

from tritonrec.kernels.numba_float import dot, exp

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
        if valid[first + U(c - 1)] and not score[c] <= most:
            most = score[c]
    shifted = score[0] - most
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
        _probabilities(hidden, h, positive, h, negatives, n, valid, t * count, scale, score, dim)
        score[0] -= F32(1.0)
        factor = dloss[t] * scale
        slope = score[0] * factor
        for d in range(dim):
            dhidden[h + d] = slope * positive[h + d]
            dpositive[h + d] = slope * hidden[h + d]
        for c in range(count):
            slope = score[c + U(1)] * factor
            row = n + c * dim
            for d in range(dim):
                dhidden[h + d] += slope * negatives[row + d]
                dnegatives[row + d] = slope * hidden[h + d]
