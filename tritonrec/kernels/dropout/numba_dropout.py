# mypy: ignore-errors
"""Dropout on the CPU, a row at a time."""

import numpy as np
import torch

from tritonrec.kernels.norm_mul_dropout.numba_norm import draw_kept
from tritonrec.kernels.philox.reference import DROPOUT, halves
from tritonrec.kernels.row_layout import contiguous_rows, flat, flat_rows
from tritonrec.kernels.workers import over_ranges

from ..caches import njit

U = np.uintp


@njit(cache=True, nogil=True)
def drop(x, x_stride, y, k0, k1, tag, threshold, factor, samples, positions, start, stop, dim):
    """Rows [start, stop) of y, contiguous."""
    kept = np.empty((dim + U(3)) // U(4) * U(4), np.float32)
    for t in range(start, stop):
        draw_kept(kept, k0, k1, tag, samples[t], positions[t], threshold, factor)
        from_, to = t * x_stride, t * dim
        for d in range(dim):
            y[to + d] = x[from_ + d] * kept[d]


def dropout(x, p, seed, sample_ids, positions) -> torch.Tensor:
    """See `tritonrec.kernels.dropout.op.dropout`."""
    y = x.new_empty(x.shape)
    if y.numel() == 0:
        return y
    k0, k1 = halves(seed)
    arguments = (
        *flat_rows(contiguous_rows(x)), flat(y), np.uint32(k0), np.uint32(k1), np.int64(DROPOUT),
        np.uint64(int(p * 2**32)), np.float32(1 / (1 - p)), flat(sample_ids), flat(positions),
    )  # fmt: skip
    rows, dim = x.shape
    over_ranges(
        lambda start, stop: drop(*arguments, U(start), U(stop), U(dim)), rows, 40.0 * y.numel()
    )  # fmt: skip
    return y
