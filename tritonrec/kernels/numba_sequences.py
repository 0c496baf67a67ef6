# mypy: ignore-errors
"""What CPU kernels over jagged (L, H, D) tensors share: a head's rows transposed, and buckets of time."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .caches import njit


@njit(cache=True, nogil=True)
def transpose(source, first, stride, rows, columns, out, out_stride):
    """``out[c, r] = source[r, c]``, flat."""
    for r in range(rows):
        start = first + r * stride
        for c in range(columns):
            out[c * out_stride + r] = source[start + c]


@intrinsic
def leading_zeros(typingctx, x):
    """Zero bits above the highest one of a uint64 that is not 0."""

    def codegen(context, builder, signature, arguments):
        return builder.ctlz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.uint64), codegen


@njit(cache=True, nogil=True, inline="always")
def log2_of_difference(late, early):
    """floor(log2(max(1, late - early))) of two int64: the difference always fits uint64."""
    difference = np.uint64(late) - np.uint64(early)
    return np.int64(63) - leading_zeros(difference if late > early else np.uint64(1))
