# mypy: ignore-errors
"""Dropout in Triton: a program holds COLUMNS elements of one row at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels.norm_mul_dropout.triton_norm import draw_kept
from tritonrec.kernels.philox.device_seed import in_kernel
from tritonrec.kernels.philox.reference import DROPOUT
from tritonrec.kernels.triton_jit import jit_kernel

MOST_PROGRAMS = 65535  # a launch may have no more along an axis
MOST_COLUMNS = 1024


@jit_kernel
def drop_kernel(
    x_ptr, samples_ptr, positions_ptr, y_ptr, x_row, x_column, seed, seed_ptr, tag, threshold, factor, rows,
    dim,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """y = x * kept, where kept is `factor` or 0."""
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    start = tl.program_id(0).to(tl.int64)  # an int64 bound makes the loop's variable int64
    for row in range(start, rows, tl.num_programs(0)):
        sample, position = tl.load(samples_ptr + row), tl.load(positions_ptr + row)
        for first in range(tl.full((), 0, tl.int64), dim, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            x = tl.load(x_ptr + row * x_row + column * x_column, mask=column < dim, other=0.0).to(tl.float32)
            # Philox blocks have four columns each
            kept = draw_kept(seed, tag + first // 4, sample, position, threshold, factor, COLUMNS)
            y = (x * kept).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + row * dim + column, y, mask=column < dim)


def dropout(x, p, seed, sample_ids, positions) -> torch.Tensor:
    """See `tritonrec.kernels.dropout.op.dropout`."""
    y = x.new_empty(x.shape)
    if y.numel():
        rows, dim = x.shape
        columns = min(max(4, triton.next_power_of_2(dim)), MOST_COLUMNS)
        drop_kernel[(min(rows, MOST_PROGRAMS),)](
            x, sample_ids.contiguous(), positions.contiguous(), y, *x.stride(), *in_kernel(seed, p), DROPOUT,
            int(p * 2**32), 1 / (1 - p), rows, dim, COLUMNS=columns, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y
