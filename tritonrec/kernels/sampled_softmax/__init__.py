"""Sampled-softmax cross entropy of each token: its label against K sampled items.

    z_0 = <hidden, positive> / temperature,   z_k = <hidden, negative_k> / temperature
    loss = log(sum over k of exp(z_k)) - z_0

A negative that happens to be the label is left out of the sum (`valid`). Sums run along one token in a fixed
order: losses and gradients do not depend, bit for bit, on what else is in the batch.

Dimensions: L tokens, K negatives per token, D features. Source of the loss: Zhai et al., "Actions speak
louder than words", ICML 2024, section 4.1.
"""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.arguments import check_shape, check_tensors
from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.sampled_softmax import reference
from tritonrec.kernels.workers import over_ranges

__all__ = ["sampled_softmax", "softmax_backward", "softmax_forward"]


def sampled_softmax(
    hidden: torch.Tensor,
    positive: torch.Tensor,
    negatives: torch.Tensor,
    valid: torch.Tensor,
    temperature: float = 1.0,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Cross entropy of each token's label among its sampled items.

    Args:
        hidden: (L, D) float32. positive: (L, D), the label's row. negatives: (L, K, D).
        valid: (L, K) bool, False leaves a negative out.
        temperature: divides the scores, > 0.
    Returns:
        (L,) float32, >= 0. Differentiable in hidden, positive and negatives.
    Raises:
        ValueError: shapes, dtypes or a temperature that do not fit.
    """
    _check(hidden, positive, negatives, valid)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return _sampled_softmax(hidden, positive, negatives, valid, 1 / temperature, impl)


def _check(
    hidden: torch.Tensor, positive: torch.Tensor, negatives: torch.Tensor, valid: torch.Tensor
) -> None:
    check_tensors(hidden=hidden, positive=positive, negatives=negatives, valid=valid)
    if (
        hidden.dim() != 2
        or positive.shape != hidden.shape
        or negatives.dim() != 3
        or negatives.shape[0] != hidden.shape[0]
        or negatives.shape[2] != hidden.shape[1]
        or valid.shape != negatives.shape[:2]
    ):
        raise ValueError(
            f"hidden and positive must be (L, D), negatives (L, K, D) and valid (L, K), got "
            f"{tuple(hidden.shape)}, {tuple(positive.shape)}, {tuple(negatives.shape)}, {tuple(valid.shape)}"
        )
    if (
        any(tensor.dtype != torch.float32 for tensor in (hidden, positive, negatives))
        or valid.dtype != torch.bool
    ):
        raise ValueError(
            f"hidden, positive and negatives must be float32 and valid bool, got "
            f"{hidden.dtype}, {positive.dtype}, {negatives.dtype}, {valid.dtype}"
        )


def softmax_forward(
    hidden: torch.Tensor,
    positive: torch.Tensor,
    negatives: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
    impl: str,
) -> torch.Tensor:
    """`sampled_softmax` without the checks and the dispatcher, scale = 1 / temperature: for hot callers."""
    chosen = implementation(impl, hidden)  # type: ignore[arg-type]
    if chosen == "reference":
        return reference.forward(hidden, positive, negatives, valid, scale)
    hidden, positive, negatives, valid = (t.contiguous() for t in (hidden, positive, negatives, valid))
    losses = hidden.new_empty(len(hidden))
    if losses.numel() == 0:
        return losses
    if chosen == "triton":
        from tritonrec.kernels.sampled_softmax import triton_softmax

        triton_softmax.forward(hidden, positive, negatives, valid, scale, losses)
        return losses
    from tritonrec.kernels.sampled_softmax import numba_softmax

    h, p, n, v = (tensor.view(-1).numpy() for tensor in (hidden, positive, negatives, valid))
    dim, count = map(np.uintp, (negatives.shape[2], negatives.shape[1]))

    def run(start: int, stop: int) -> None:
        numba_softmax.forward(
            h, p, n, v, np.float32(scale), losses.numpy(), np.uintp(start), np.uintp(stop), dim, count
        )

    over_ranges(run, len(hidden), 4.0 * negatives.numel())
    return losses


def softmax_backward(
    dloss: torch.Tensor,
    hidden: torch.Tensor,
    positive: torch.Tensor,
    negatives: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dhidden, dpositive, dnegatives, each contiguous."""
    chosen = implementation(impl, hidden)  # type: ignore[arg-type]
    if chosen == "reference":
        return reference.backward(dloss, hidden, positive, negatives, valid, scale)
    hidden, positive, negatives, valid = (t.contiguous() for t in (hidden, positive, negatives, valid))
    dloss = dloss.contiguous()
    dhidden, dpositive, dnegatives = map(torch.empty_like, (hidden, positive, negatives))
    if hidden.numel() == 0:
        return dhidden, dpositive, dnegatives
    if chosen == "triton":
        from tritonrec.kernels.sampled_softmax import triton_softmax

        triton_softmax.backward(
            dloss, hidden, positive, negatives, valid, scale, dhidden, dpositive, dnegatives
        )
        return dhidden, dpositive, dnegatives
    from tritonrec.kernels.sampled_softmax import numba_softmax

    h, p, n, v = (tensor.view(-1).numpy() for tensor in (hidden, positive, negatives, valid))
    dh, dp, dn = (tensor.view(-1).numpy() for tensor in (dhidden, dpositive, dnegatives))
    dim, count = map(np.uintp, (negatives.shape[2], negatives.shape[1]))

    def run(start: int, stop: int) -> None:
        numba_softmax.backward(
            dloss.numpy(), h, p, n, v, np.float32(scale), dh, dp, dn,
            np.uintp(start), np.uintp(stop), dim, count,
        )  # fmt: skip

    over_ranges(run, len(hidden), 8.0 * negatives.numel())
    return dhidden, dpositive, dnegatives


@custom_op("tritonrec::sampled_softmax", mutates_args=())
def _sampled_softmax(
    hidden: torch.Tensor,
    positive: torch.Tensor,
    negatives: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
    impl: str,
) -> torch.Tensor:
    _check(hidden, positive, negatives, valid)
    return softmax_forward(hidden.detach(), positive.detach(), negatives.detach(), valid, scale, impl)


@_sampled_softmax.register_fake
def _(hidden, positive, negatives, valid, scale, impl):
    return hidden.new_empty(hidden.shape[0])


@custom_op("tritonrec::sampled_softmax_backward", mutates_args=())
def _sampled_softmax_backward(
    dloss: torch.Tensor,
    hidden: torch.Tensor,
    positive: torch.Tensor,
    negatives: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(hidden, positive, negatives, valid)
    check_tensors(hidden=hidden, dloss=dloss)
    check_shape("dloss", dloss, hidden.shape[:1], hidden.dtype)
    dloss, hidden, positive, negatives = (t.detach() for t in (dloss, hidden, positive, negatives))
    return softmax_backward(dloss, hidden, positive, negatives, valid, scale, impl)


@_sampled_softmax_backward.register_fake
def _(dloss, hidden, positive, negatives, valid, scale, impl):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (hidden, positive, negatives))


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dloss):
    gradients = _sampled_softmax_backward(dloss, *ctx.saved_tensors, ctx.scale, ctx.impl)
    return (*gradients, None, None, None)


_sampled_softmax.register_autograd(_backward, setup_context=_save)
