# mypy: ignore-errors
"""Dot products of pairs in Triton: a program owns a sample, and walks 16 to 64 vectors by 16 or 32 columns.

Tiles are chosen by V and D alone, and a sample's sums add blocks of columns, or of vectors, in ascending
order, so its bits do not depend on its batch.

    forward    rows i, columns j <= i      sum over columns of D      the triangle below the diagonal
    backward   rows i, a block of D        sum over all vectors j     dy of (i, j) is read at the pair's place

Dimensions: B samples, V vectors, D columns, P = V (V - 1) / 2 pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels.linear.triton_linear import INTERPRETED, MOST_PROGRAMS, multiply_add
from tritonrec.kernels.triton_jit import jit_kernel


@triton.jit
def load_vectors(x_ptr, sample, vector, column, count, dim):
    """(rows, columns) of a sample's vectors; 0 behind the end, the identity of the sums."""
    return tl.load(
        x_ptr + (sample * count + vector)[:, None] * dim + column[None, :],
        mask=(vector < count)[:, None] & (column < dim)[None, :],
        other=0.0,
    )


@jit_kernel
def forward_kernel(
    x_ptr, out_ptr, samples, count, dim,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out (B, P) from x (B, V, D)."""
    zero = tl.full((), 0, tl.int64)  # an int64 bound makes a loop's variable int64, and all indices from it
    pairs = (zero + count) * (zero + count - 1) // 2
    for sample in range(tl.program_id(0).to(tl.int64), samples, tl.num_programs(0)):
        for first in range(zero, count, BLOCK_V):
            row = first + tl.arange(0, BLOCK_V)
            for other in range(zero, first + 1, BLOCK_V):
                column = other + tl.arange(0, BLOCK_V)
                total = tl.zeros((BLOCK_V, BLOCK_V), tl.float32)
                for start in range(zero, dim, BLOCK_D):
                    term = start + tl.arange(0, BLOCK_D)
                    left = load_vectors(x_ptr, sample, row, term, count, dim)
                    right = load_vectors(x_ptr, sample, column, term, count, dim)
                    total = multiply_add(left, tl.trans(right), total, "ieee", INTERPRETED)
                tl.store(
                    out_ptr + sample * pairs + (row * (row - 1) // 2)[:, None] + column[None, :],
                    total.to(out_ptr.dtype.element_ty),
                    mask=(column[None, :] < row[:, None]) & (row < count)[:, None],
                )


@jit_kernel
def backward_kernel(
    dy_ptr, x_ptr, dx_ptr, samples, count, dim,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """dx (B, V, D) from dy (B, P) and x (B, V, D)."""
    zero = tl.full((), 0, tl.int64)  # an int64 bound makes a loop's variable int64, and all indices from it
    pairs = (zero + count) * (zero + count - 1) // 2
    for sample in range(tl.program_id(0).to(tl.int64), samples, tl.num_programs(0)):
        for first in range(zero, count, BLOCK_V):
            row = first + tl.arange(0, BLOCK_V)
            for start in range(zero, dim, BLOCK_D):
                column = start + tl.arange(0, BLOCK_D)
                total = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
                for other in range(zero, count, BLOCK_V):
                    vector = other + tl.arange(0, BLOCK_V)
                    high = tl.maximum(row[:, None], vector[None, :])
                    low = tl.minimum(row[:, None], vector[None, :])
                    dy = tl.load(
                        dy_ptr + sample * pairs + high * (high - 1) // 2 + low,
                        mask=(low < high) & (high < count),
                        other=0.0,
                    )
                    x = load_vectors(x_ptr, sample, vector, column, count, dim)
                    total = multiply_add(dy, x, total, "ieee", INTERPRETED)
                tl.store(
                    dx_ptr + (sample * count + row)[:, None] * dim + column[None, :],
                    total.to(dx_ptr.dtype.element_ty),
                    mask=(row < count)[:, None] & (column < dim)[None, :],
                )


def dot_interaction(vectors: torch.Tensor) -> torch.Tensor:
    """See `tritonrec.kernels.dot_interaction.op.dot_interaction`."""
    samples, count, dim = vectors.shape
    out = vectors.new_zeros(samples, count * (count - 1) // 2)  # zeros where D is 0
    if out.numel() and dim:
        _launch(forward_kernel, vectors, vectors.contiguous(), out)
    return out


def dot_interaction_backward(dy: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """(B, V, D)."""
    out = torch.zeros_like(vectors, memory_format=torch.contiguous_format)
    if out.numel() and dy.numel():
        _launch(backward_kernel, vectors, dy.contiguous(), vectors.contiguous(), out)
    return out


def _launch(kernel, vectors: torch.Tensor, *tensors: torch.Tensor) -> None:
    samples, count, dim = vectors.shape
    vector, column = (
        min(max(16, triton.next_power_of_2(size)), most) for size, most in ((count, 64), (dim, 32))
    )
    kernel[(min(samples, MOST_PROGRAMS),)](
        *tensors, samples, count, dim, BLOCK_V=vector, BLOCK_D=column, INTERPRETED=INTERPRETED,
        enable_fp_fusion=False,
    )  # fmt: skip
