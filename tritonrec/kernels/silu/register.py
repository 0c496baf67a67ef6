"""Registration of `silu` and its derivative."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import LOW
from tritonrec.kernels.op import Op
from tritonrec.kernels.silu import reference


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
    reference=reference.silu, cpu="numba_silu:silu", triton="triton_silu:silu",
    check=_check, fake=lambda x: x.new_empty(x.shape), save=_save, backward=_backward,
    widens=True,
)  # fmt: skip
SILU_BACKWARD = Op(
    "silu_backward(Tensor dy, Tensor x) -> Tensor",
    reference=reference.silu_backward, cpu="numba_silu:silu_backward", triton="triton_silu:silu_backward",
    check=(_check, _check_backward), fake=lambda x: x.new_empty(x.shape), widens=True,
)  # fmt: skip
