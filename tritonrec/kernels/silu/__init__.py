"""SiLU whose value at an element depends on that element alone.

    y = x / (1 + exp(-x)),   dx = dy * s * (1 + x * (1 - s)) with s = 1 / (1 + exp(-x))

`torch.nn.functional.silu` on a CPU computes the last elements of an array by another path than the rest, so
the same number may give two results; a sample's activations would depend on its place in the batch.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape, check_tensors, not_a_tensor
from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.silu import reference
from tritonrec.kernels.workers import over_ranges

__all__ = ["silu", "silu_backward", "silu_forward"]


def silu(x: torch.Tensor, impl: Impl = "auto") -> torch.Tensor:
    """x / (1 + exp(-x)) of a float32 tensor of any shape; contiguous result, differentiable.

    Raises:
        ValueError: another dtype.
    """
    _check(x)
    return _silu(x, impl)


def _check(x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor("x", x)
    if x.dtype != torch.float32:
        raise ValueError(f"x must be float32, got {x.dtype}")


def silu_forward(x: torch.Tensor, impl: str) -> torch.Tensor:
    """`silu` without the check and the dispatcher: the door for hot callers."""
    chosen = implementation(impl, x)  # type: ignore[arg-type]
    x = x.contiguous()
    if chosen == "reference":
        return reference.forward(x)
    y = x.new_empty(x.shape)
    if chosen == "triton":
        from tritonrec.kernels.silu import triton_silu

        triton_silu.forward(x, y)
        return y
    from tritonrec.kernels.silu import numba_silu

    arrays = x.view(-1).numpy(), y.view(-1).numpy()
    over_ranges(lambda start, stop: numba_silu.forward(*arrays, start, stop), x.numel(), 10.0 * x.numel())
    return y


def silu_backward(dy: torch.Tensor, x: torch.Tensor, impl: str) -> torch.Tensor:
    """dx, contiguous."""
    chosen = implementation(impl, x)  # type: ignore[arg-type]
    dy, x = dy.contiguous(), x.contiguous()
    if chosen == "reference":
        return reference.backward(dy, x)
    dx = x.new_empty(x.shape)
    if chosen == "triton":
        from tritonrec.kernels.silu import triton_silu

        triton_silu.backward(dy, x, dx)
        return dx
    from tritonrec.kernels.silu import numba_silu

    arrays = dy.view(-1).numpy(), x.view(-1).numpy(), dx.view(-1).numpy()
    over_ranges(lambda start, stop: numba_silu.backward(*arrays, start, stop), x.numel(), 20.0 * x.numel())
    return dx


@custom_op("tritonrec::silu", mutates_args=())
def _silu(x: torch.Tensor, impl: str) -> torch.Tensor:
    _check(x)
    return silu_forward(x.detach(), impl)


@_silu.register_fake
def _(x, impl):
    return x.new_empty(x.shape)


@custom_op("tritonrec::silu_backward", mutates_args=())
def _silu_backward(dy: torch.Tensor, x: torch.Tensor, impl: str) -> torch.Tensor:
    check_tensors(x=x, dy=dy)
    _check(x)
    check_shape("dy", dy, x.shape, x.dtype)
    return silu_backward(dy.detach(), x.detach(), impl)


@_silu_backward.register_fake
def _(dy, x, impl):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    x, ctx.impl = inputs
    ctx.save_for_backward(x)


def _backward(ctx, dy):
    return _silu_backward(dy, ctx.saved_tensors[0], ctx.impl), None


_silu.register_autograd(_backward, setup_context=_save)
