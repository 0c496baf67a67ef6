"""Registration of `dropout`, which is its own derivative."""

from __future__ import annotations

import torch

from tritonrec.kernels.autocast import LOW
from tritonrec.kernels.dropout import reference
from tritonrec.kernels.op import Op


def _check(x, p, sample_ids, positions) -> None:
    if x.dim() != 2 or x.dtype not in (torch.float32, *LOW):
        raise ValueError(f"x must be (L, D) float32, bfloat16 or float16, got {tuple(x.shape)} {x.dtype}")
    if not 0 <= p < 1:
        raise ValueError(f"p must lie in [0, 1), got {p}")
    for name, tensor in (("sample_ids", sample_ids), ("positions", positions)):
        if tensor.shape != x.shape[:1] or tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be ({len(x)},) int64, got {tuple(tensor.shape)} {tensor.dtype}")


def _save(ctx, inputs, output):
    _, ctx.p, ctx.seed, sample_ids, positions, ctx.impl = inputs
    ctx.save_for_backward(sample_ids, positions)


def _backward(ctx, dy):
    return DROPOUT_ROWS(dy, ctx.p, ctx.seed, *ctx.saved_tensors, impl=ctx.impl), None, None, None, None


DROPOUT_ROWS = Op(
    "dropout(Tensor x, float p, int seed, Tensor sample_ids, Tensor positions) -> Tensor",
    reference=reference.dropout, cpu="numba_dropout:dropout", triton="triton_dropout:dropout",
    check=_check, fake=lambda x: x.new_empty(x.shape), save=_save, backward=_backward,
    widens=True,
)  # fmt: skip
