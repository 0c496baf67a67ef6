# mypy: ignore-errors
"""A layer norm, and the losses by sample of its result, on the CPU: the loops of both one after the other."""

import numpy as np

from tritonrec.kernels.norm_mul_dropout import numba_norm as norm
from tritonrec.kernels.numba_addresses import floats, integers
from tritonrec.kernels.rows.numba_segment_sum import add_all
from tritonrec.kernels.sampled_softmax import numba_by_sample as softmax

from ..caches import njit

F32 = np.float32
I = np.int64
U = np.uintp
# The table: what `numba_by_sample` has in it, and then these.
TOKENS, DIM, COUNT, SAMPLES, OFFSETS = range(softmax.OFFSETS + 1)
HIDDEN, ITEMS, VALID, LOSSES, DHIDDEN, DITEMS = range(softmax.HIDDEN, softmax.MATRIX)
MATRIX, ROWS, SLOPES = softmax.MATRIX, softmax.ROWS, softmax.SLOPES
SIZE = softmax.SIZE + 10
X, WEIGHT, BIAS, MEANS, RSTDS, DX, DWEIGHT, DBIAS, SUM_WEIGHT, SUM_BIAS = range(softmax.SIZE, SIZE)


@njit(cache=True, nogil=True)
def _no_dropout():
    return np.uint32(0), np.uint32(0), I(0), np.uint64(0), F32(1.0)


@njit(cache=True, nogil=True)
def forward(a, eps, scale, start, stop):
    """Hidden states of the tokens of samples [start, stop), and the losses of these."""
    tokens, dim = a[TOKENS], a[DIM]
    offsets, none, no_ids = integers(a[OFFSETS], a[SAMPLES] + 1), np.empty(0, F32), np.empty(0, np.int64)
    norm.forward(
        floats(a[X], tokens * dim), U(dim), none, U(0), floats(a[WEIGHT], dim), floats(a[BIAS], dim), eps,
        _no_dropout(), no_ids, no_ids, floats(a[HIDDEN], tokens * dim), floats(a[MEANS], tokens),
        floats(a[RSTDS], tokens), U(offsets[start]), U(offsets[stop]), U(dim),
    )  # fmt: skip
    softmax.forward_rows(a, scale, start, stop)


@njit(cache=True, nogil=True)
def backward(a, scale, start, stop):
    """Gradients of labels and of x, slopes of negatives, and each token's terms of weight and bias."""
    tokens, dim = a[TOKENS], a[DIM]
    offsets, none, no_ids = integers(a[OFFSETS], a[SAMPLES] + 1), np.empty(0, F32), np.empty(0, np.int64)
    softmax.backward_rows(a, scale, start, stop)
    norm.backward(
        floats(a[DHIDDEN], tokens * dim), U(dim), floats(a[X], tokens * dim), U(dim), none, U(0),
        floats(a[WEIGHT], dim), floats(a[BIAS], dim), _no_dropout(), no_ids, no_ids,
        floats(a[MEANS], tokens), floats(a[RSTDS], tokens), floats(a[DX], tokens * dim), none, U(0),
        floats(a[DWEIGHT], tokens * dim), floats(a[DBIAS], tokens * dim), U(offsets[start]),
        U(offsets[stop]), U(dim),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def add_terms(a, scale, limit):
    """Add all terms of weight and bias to their int64 sums.

    Position (token * dim + column) of the first term of each that its sum cannot take, or -1.
    """
    tokens, dim = a[TOKENS], a[DIM]
    of_weight = add_all(
        integers(a[SUM_WEIGHT], dim), floats(a[DWEIGHT], tokens * dim), U(dim), tokens, U(dim), scale, limit
    )
    of_bias = add_all(
        integers(a[SUM_BIAS], dim), floats(a[DBIAS], tokens * dim), U(dim), tokens, U(dim), scale, limit
    )
    return of_weight, of_bias
