# mypy: ignore-errors
"""Sampled softmax on the CPU with the losses of a sample's tokens added, in their order."""

import numpy as np

from tritonrec.kernels.numba_addresses import booleans, floats, integers
from tritonrec.kernels.sampled_softmax import numba_softmax as softmax

from ..caches import njit

F32 = np.float32
U = np.uintp
TOKENS, DIM, COUNT, SAMPLES, OFFSETS, HIDDEN, ITEMS, VALID, LOSSES, DHIDDEN, DITEMS = range(11)
MATRIX, MATRIX_ROWS, ROWS, SLOPES = range(11, 15)
SIZE = 15
"""Of the table. The last four: negatives in a matrix, and their slopes, gradients by hidden states."""


@njit(cache=True, nogil=True)
def _add_tokens(offsets, of_tokens, losses, start, stop):
    """Losses of samples [start, stop) from those of their tokens."""
    first = U(offsets[start])
    for b in range(start, stop):
        total = F32(0.0)
        for t in range(U(offsets[b]) - first, U(offsets[b + 1]) - first):
            total += of_tokens[t]
        losses[b] = total


@njit(cache=True, nogil=True)
def _to_tokens(offsets, dlosses, start, stop):
    """The gradient of each token's loss, of samples [start, stop)."""
    first = U(offsets[start])
    of_tokens = np.empty(U(offsets[stop]) - first, F32)
    for b in range(start, stop):
        for t in range(U(offsets[b]) - first, U(offsets[b + 1]) - first):
            of_tokens[t] = dlosses[b]
    return of_tokens


@njit(cache=True, nogil=True)
def forward(a, scale, start, stop):
    """Losses of samples [start, stop). Items are the labels (L, D), then the negatives (L, K, D)."""
    tokens, dim, count = a[TOKENS], a[DIM], a[COUNT]
    offsets = integers(a[OFFSETS], a[SAMPLES] + 1)
    first, last = U(offsets[start]), U(offsets[stop])
    items, losses = floats(a[ITEMS], (count + 1) * tokens * dim), floats(a[LOSSES], a[SAMPLES])
    of_tokens = np.empty(last - first, F32)
    softmax.forward(
        floats(a[HIDDEN], tokens * dim)[first * U(dim) :], items[first * U(dim) :],
        items[(U(tokens) + first * U(count)) * U(dim) :],
        booleans(a[VALID], tokens * count)[first * U(count) :], scale, of_tokens, U(0), last - first, U(dim),
        U(count),
    )  # fmt: skip
    _add_tokens(offsets, of_tokens, losses, start, stop)


@njit(cache=True, nogil=True)
def backward(a, scale, start, stop):
    """Gradients of the tokens of samples [start, stop); `LOSSES` are their losses' gradients."""
    tokens, dim, count = a[TOKENS], a[DIM], a[COUNT]
    offsets = integers(a[OFFSETS], a[SAMPLES] + 1)
    first, last = U(offsets[start]), U(offsets[stop])
    dlosses, size = floats(a[LOSSES], a[SAMPLES]), (count + 1) * tokens * dim
    items, ditems = floats(a[ITEMS], size), floats(a[DITEMS], size)
    of_tokens = _to_tokens(offsets, dlosses, start, stop)
    negatives = (U(tokens) + first * U(count)) * U(dim)
    softmax.backward(
        of_tokens, floats(a[HIDDEN], tokens * dim)[first * U(dim) :], items[first * U(dim) :],
        items[negatives:], booleans(a[VALID], tokens * count)[first * U(count) :], scale,
        floats(a[DHIDDEN], tokens * dim)[first * U(dim) :], ditems[first * U(dim) :], ditems[negatives:],
        U(0), last - first, U(dim), U(count),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def forward_rows(a, scale, start, stop):
    """`forward` of labels (L, D), and negatives that are rows (L, K) of a matrix (R, D)."""
    tokens, dim, count = a[TOKENS], a[DIM], a[COUNT]
    offsets = integers(a[OFFSETS], a[SAMPLES] + 1)
    first, last = U(offsets[start]), U(offsets[stop])
    losses, of_tokens = floats(a[LOSSES], a[SAMPLES]), np.empty(last - first, F32)
    softmax.forward_rows(
        floats(a[HIDDEN], tokens * dim)[first * U(dim) :], floats(a[ITEMS], tokens * dim)[first * U(dim) :],
        floats(a[MATRIX], a[MATRIX_ROWS] * dim), U(dim),
        integers(a[ROWS], tokens * count)[first * U(count) :],
        booleans(a[VALID], tokens * count)[first * U(count) :], scale, of_tokens, U(0), last - first, U(dim),
        U(count),
    )  # fmt: skip
    _add_tokens(offsets, of_tokens, losses, start, stop)


@njit(cache=True, nogil=True)
def backward_rows(a, scale, start, stop):
    """`backward` of `forward_rows`: gradients of labels, and slopes (L, K)."""
    tokens, dim, count = a[TOKENS], a[DIM], a[COUNT]
    offsets = integers(a[OFFSETS], a[SAMPLES] + 1)
    first, last = U(offsets[start]), U(offsets[stop])
    of_tokens = _to_tokens(offsets, floats(a[LOSSES], a[SAMPLES]), start, stop)
    softmax.backward_rows(
        of_tokens, floats(a[HIDDEN], tokens * dim)[first * U(dim) :],
        floats(a[ITEMS], tokens * dim)[first * U(dim) :], floats(a[MATRIX], a[MATRIX_ROWS] * dim), U(dim),
        integers(a[ROWS], tokens * count)[first * U(count) :],
        booleans(a[VALID], tokens * count)[first * U(count) :], scale,
        floats(a[DHIDDEN], tokens * dim)[first * U(dim) :], floats(a[DITEMS], tokens * dim)[first * U(dim) :],
        floats(a[SLOPES], tokens * count)[first * U(count) :], U(0), last - first, U(dim), U(count),
    )  # fmt: skip
