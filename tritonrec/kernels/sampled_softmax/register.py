"""Registration of `sampled_softmax` and its derivative."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import FLOAT32
from tritonrec.kernels.op import Op
from tritonrec.kernels.sampled_softmax import reference


def _check(hidden, positive, negatives, valid) -> None:
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


def _check_backward(dloss, hidden) -> None:
    check_shape("dloss", dloss, hidden.shape[:1], hidden.dtype)


def _fake_backward(hidden, positive, negatives):
    return tuple(each.new_empty(each.shape) for each in (hidden, positive, negatives))


def _save(ctx, inputs, output):
    *tensors, ctx.scale, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dloss):
    gradients = SAMPLED_SOFTMAX_BACKWARD(dloss, *ctx.saved_tensors, ctx.scale, impl=ctx.impl)
    return *gradients, None, None


SAMPLED_SOFTMAX = Op(
    "sampled_softmax(Tensor hidden, Tensor positive, Tensor negatives, Tensor valid, float scale) -> Tensor",
    reference=reference.sampled_softmax, cpu="numba_softmax:sampled_softmax",
    triton="triton_softmax:sampled_softmax", check=_check,
    fake=lambda hidden: hidden.new_empty(hidden.shape[0]), save=_save, backward=_backward,
    autocast=dict.fromkeys(("hidden", "positive", "negatives"), FLOAT32),
)  # fmt: skip
SAMPLED_SOFTMAX_BACKWARD = Op(
    "sampled_softmax_backward(Tensor dloss, Tensor hidden, Tensor positive, Tensor negatives, Tensor valid, "
    "float scale) -> (Tensor, Tensor, Tensor)",
    reference=reference.sampled_softmax_backward, cpu="numba_softmax:sampled_softmax_backward",
    triton="triton_softmax:sampled_softmax_backward", check=(_check, _check_backward),
    fake=_fake_backward,
)  # fmt: skip
