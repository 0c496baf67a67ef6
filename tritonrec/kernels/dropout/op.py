"""Dropout whose mask is a function of (seed, sample, position, column), never of the batch.

    y[t, d] = x[t, d] * kept[t, d] / (1 - p),   dx[t, d] = dy[t, d] * kept[t, d] / (1 - p)

Dimensions: L rows, D columns. The words are those of `norm_mul_dropout`: column d survives if word d % 4 of
Philox block d // 4 is at least floor(p * 2**32). All implementations agree in every bit, and nothing but the
seed is stored for backward.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.autocast import LOW
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.norm_mul_dropout.op import mask
from tritonrec.kernels.op import Op
from tritonrec.kernels.philox.device_seed import Seed
from tritonrec.kernels.philox.reference import DROPOUT


def dropout(
    x: torch.Tensor,
    p: float,
    seed: Seed,
    sample_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Zero elements with probability p and divide the others by 1 - p.

    Args:
        x: (L, D) float32, bf16 or fp16. p: in [0, 1). seed: int64; where a graph is recorded, one that
            the kernel loads (`kernels.philox.device_seed`).
        sample_ids, positions: (L,) int64 of each row; positions count by their low 32 bits.
    Returns:
        (L, D) of x's dtype, contiguous. Differentiable in x.
    Raises:
        ValueError: shapes, dtypes or p that do not fit.
    """
    return DROPOUT_ROWS(x, p, seed, sample_ids, positions, impl=impl)


# Reference: dropout by a mask that is spelled out.


def dropout_reference(x, p, seed, sample_ids, positions) -> torch.Tensor:
    """See `dropout`."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    return x * mask(seed, DROPOUT, sample_ids, positions, x.shape[1], int(p * 2**32), 1 / (1 - p))


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
    reference=dropout_reference, cpu="numba_dropout:dropout", triton="triton_dropout:dropout",
    check=_check, fake=lambda x: x.new_empty(x.shape), save=_save, backward=_backward,
    widens=True,
)  # fmt: skip
