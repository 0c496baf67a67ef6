# mypy: ignore-errors
"""Sampled softmax on the CPU with the losses of a sample's tokens added, in their order."""

import numpy as np

from tritonrec.kernels.numba_addresses import booleans, floats, integers
from tritonrec.kernels.sampled_softmax import numba_softmax as softmax

from ..caches import njit

F32 = np.float32
U = np.uintp
TOKENS, DIM, COUNT, SAMPLES, OFFSETS, HIDDEN, ITEMS, VALID, LOSSES, DHIDDEN, DITEMS = range(11)


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
    for b in range(start, stop):
        total = F32(0.0)
        for t in range(U(offsets[b]) - first, U(offsets[b + 1]) - first):
            total += of_tokens[t]
        losses[b] = total


@njit(cache=True, nogil=True)
def backward(a, scale, start, stop):
    """Gradients of the tokens of samples [start, stop); `LOSSES` are their losses' gradients."""
    tokens, dim, count = a[TOKENS], a[DIM], a[COUNT]
    offsets = integers(a[OFFSETS], a[SAMPLES] + 1)
    first, last = U(offsets[start]), U(offsets[stop])
    dlosses, size = floats(a[LOSSES], a[SAMPLES]), (count + 1) * tokens * dim
    items, ditems = floats(a[ITEMS], size), floats(a[DITEMS], size)
    of_tokens = np.empty(last - first, F32)
    for b in range(start, stop):
        for t in range(U(offsets[b]) - first, U(offsets[b + 1]) - first):
            of_tokens[t] = dlosses[b]
    negatives = (U(tokens) + first * U(count)) * U(dim)
    softmax.backward(
        of_tokens, floats(a[HIDDEN], tokens * dim)[first * U(dim) :], items[first * U(dim) :],
        items[negatives:], booleans(a[VALID], tokens * count)[first * U(count) :], scale,
        floats(a[DHIDDEN], tokens * dim)[first * U(dim) :], ditems[first * U(dim) :], ditems[negatives:],
        U(0), last - first, U(dim), U(count),
    )  # fmt: skip
