# mypy: ignore-errors
"""SiLU in Triton, elementwise: the same operations as on the CPU, each rounded once, so the same bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels.triton_float import exp
from tritonrec.kernels.triton_jit import jit_kernel

MOST_PROGRAMS = 65535  # a launch may have no more along an axis
BLOCK = 1024


@triton.jit
def sigmoid(x):
    one = tl.full(x.shape, 1.0, tl.float32)
    return tl.div_rn(one, one + exp(-x))


@jit_kernel
def forward_kernel(x_ptr, y_ptr, length, BLOCK: tl.constexpr):
    """y = x / (1 + exp(-x))."""
    first = tl.program_id(0).to(tl.int64)  # an int64 bound makes the loop's variable int64
    # not tl.cdiv, which adds before it divides: that sum may pass 2**31
    for block in range(first, (length - 1) // BLOCK + 1, tl.num_programs(0)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + place, mask=place < length, other=0.0).to(tl.float32)
        # div_rn, since `/` may be an approximate reciprocal times x
        y = tl.div_rn(x, 1.0 + exp(-x))
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=place < length)


@jit_kernel
def backward_kernel(dy_ptr, x_ptr, dx_ptr, length, BLOCK: tl.constexpr):
    """dx = dy * s * (1 + x * (1 - s)), with s = sigmoid(x)."""
    first = tl.program_id(0).to(tl.int64)
    # not tl.cdiv, which adds before it divides: that sum may pass 2**31
    for block in range(first, (length - 1) // BLOCK + 1, tl.num_programs(0)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        # float32 inside whatever the tensors' dtype, with one rounding at the end
        x = tl.load(x_ptr + place, mask=place < length, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + place, mask=place < length, other=0.0).to(tl.float32)
        s = sigmoid(x)
        dx = dy * (s * (1.0 + x * (1.0 - s)))
        # dx may be dy: a program reads an element before it writes there, and no other one reads it
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=place < length)


def _launch(kernel, *tensors: torch.Tensor) -> None:
    length = tensors[0].numel()
    if length:
        # Without fusion a product and a sum are rounded one after the other, as on the CPU.
        programs = min(triton.cdiv(length, BLOCK), MOST_PROGRAMS)
        kernel[(programs,)](*tensors, length, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False)


def silu(x: torch.Tensor) -> torch.Tensor:
    """See `tritonrec.kernels.silu.op.silu`."""
    y = x.new_empty(x.shape)
    _launch(forward_kernel, x.contiguous(), y)
    return y


def silu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dx, contiguous."""
    dx = x.new_empty(x.shape)
    _launch(backward_kernel, dy.contiguous(), x.contiguous(), dx)
    return dx


def backward_in_place(dy: torch.Tensor, x: torch.Tensor) -> None:
    """dy becomes dx; both contiguous, of any float dtype."""
    _launch(backward_kernel, dy, x, dy)
