"""SiLU whose value at an element depends on that element alone.

    y = x / (1 + exp(-x)),   dx = dy * s * (1 + x * (1 - s)) with s = 1 / (1 + exp(-x))

`torch.nn.functional.silu` on a CPU computes the last elements of an array by another path than the rest, so
the same number may give two results; a sample's activations would depend on its place in the batch.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import LOW
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.op import Op


def silu(x: torch.Tensor, *, impl: Impl = "auto") -> torch.Tensor:
    """x / (1 + exp(-x)) of a tensor of any shape; contiguous result of its dtype, differentiable.

    In float32 inside; x may be float32, bf16 or fp16.

    Raises:
        ValueError: another dtype.
    """
    return SILU(x, impl=impl)


# Reference: SiLU and its slope, elementwise.


def silu_reference(x: torch.Tensor) -> torch.Tensor:
    """See `silu`."""
    x = x.contiguous()
    return x / (1 + torch.exp(-x))


def silu_backward_reference(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dx, contiguous."""
    dy, x = dy.contiguous(), x.contiguous()
    sigmoid = 1 / (1 + torch.exp(-x))
    return dy * (sigmoid * (1 + x * (1 - sigmoid)))


def _check(x) -> None:
    if x.dtype not in (torch.float32, *LOW):
        raise ValueError(f"x must be float32, bfloat16 or float16, got {x.dtype}")


def _check_backward(dy, x) -> None:
    check_shape("dy", dy, x.shape, x.dtype)


def _save(ctx, inputs, output):
    x, ctx.impl = inputs
    ctx.save_for_backward(x)


def _backward(ctx, dy):
    return SILU_BACKWARD(dy, *ctx.saved_tensors, impl=ctx.impl)


SILU = Op(
    "silu(Tensor x) -> Tensor",
    reference=silu_reference, cpu="numba_silu:silu", triton="triton_silu:silu",
    check=_check, fake=lambda x: x.new_empty(x.shape), save=_save, backward=_backward,
    widens=True,
)  # fmt: skip
SILU_BACKWARD = Op(
    "silu_backward(Tensor dy, Tensor x) -> Tensor",
    reference=silu_backward_reference, cpu="numba_silu:silu_backward", triton="triton_silu:silu_backward",
    check=(_check, _check_backward), fake=lambda x: x.new_empty(x.shape), widens=True,
)  # fmt: skip
