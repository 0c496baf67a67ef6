"""Registration of `sampled_softmax` and its derivative."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import FLOAT32
from tritonrec.kernels.op import Op
from tritonrec.kernels.row_layout import check_rows
from tritonrec.kernels.rows.register import ProductTerms
from tritonrec.kernels.sampled_softmax import reference


def _check(hidden, positive, negatives, valid, rows) -> None:
    apart = negatives.dim() == 3 and negatives.shape[:2] == valid.shape
    matrix = negatives.dim() == 2 and rows is not None and rows.shape == valid.shape
    if (
        hidden.dim() != 2
        or positive.shape != hidden.shape
        or valid.dim() != 2
        or valid.shape[0] != hidden.shape[0]
        or not (apart if rows is None else matrix)
        or negatives.shape[-1] != hidden.shape[1]
    ):
        expected, given = "negatives (L, K, D) and valid (L, K)", [hidden, positive, negatives, valid]
        if rows is not None:
            expected, given = "negatives (R, D), and valid and rows (L, K)", [*given, rows]
        raise ValueError(
            f"hidden and positive must be (L, D), {expected}, got "
            f"{', '.join(str(tuple(each.shape)) for each in given)}"
        )
    if (
        any(tensor.dtype != torch.float32 for tensor in (hidden, positive, negatives))
        or valid.dtype != torch.bool
    ):
        raise ValueError(
            f"hidden, positive and negatives must be float32 and valid bool, got "
            f"{hidden.dtype}, {positive.dtype}, {negatives.dtype}, {valid.dtype}"
        )
    if rows is not None and rows.dtype != torch.int64:
        raise ValueError(f"rows must be int64, got {rows.dtype}")


def _check_memory(negatives, rows) -> None:
    if rows is not None:
        check_rows("rows", rows.reshape(-1), negatives.shape[0])


def _check_backward(dloss, hidden) -> None:
    check_shape("dloss", dloss, hidden.shape[:1], hidden.dtype)


def _fake_backward(hidden, positive, negatives, valid, rows):
    shapes = hidden.shape, positive.shape, negatives.shape if rows is None else valid.shape
    return tuple(hidden.new_empty(shape) for shape in shapes)


def _save(ctx, inputs, output):
    *tensors, ctx.scale, rows, ctx.impl = inputs
    ctx.save_for_backward(*tensors, rows)


def _backward(ctx, dloss):
    *tensors, rows = ctx.saved_tensors
    *gradients, last = SAMPLED_SOFTMAX_BACKWARD(dloss, *tensors, ctx.scale, rows, impl=ctx.impl)
    if rows is not None:
        hidden, _, negatives, _ = tensors
        last = ProductTerms(hidden, last, rows, len(negatives), ctx.impl)
    return *gradients, last, None, None, None


SAMPLED_SOFTMAX = Op(
    "sampled_softmax(Tensor hidden, Tensor positive, Tensor negatives, Tensor valid, float scale, "
    "Tensor? rows) -> Tensor",
    reference=reference.sampled_softmax, cpu="numba_softmax:sampled_softmax",
    triton="triton_softmax:sampled_softmax", check=_check, check_memory=_check_memory,
    fake=lambda hidden: hidden.new_empty(hidden.shape[0]), save=_save, backward=_backward,
    autocast=dict.fromkeys(("hidden", "positive", "negatives"), FLOAT32),
)  # fmt: skip
SAMPLED_SOFTMAX_BACKWARD = Op(
    "sampled_softmax_backward(Tensor dloss, Tensor hidden, Tensor positive, Tensor negatives, Tensor valid, "
    "float scale, Tensor? rows) -> (Tensor, Tensor, Tensor)",
    reference=reference.sampled_softmax_backward, cpu="numba_softmax:sampled_softmax_backward",
    triton="triton_softmax:sampled_softmax_backward", check=(_check, _check_backward),
    check_memory=_check_memory, fake=_fake_backward,
)  # fmt: skip
