"""The front of the HSTU layer, fused: layer norm, linear layer, SiLU.

    n = (x - mean(x)) / sqrt(var(x) + eps) * norm_weight + norm_bias,   z = n @ weight.T + bias
    y = z * s with s = 1 / (1 + exp(-z))
    dz = dy * s * (1 + z * (1 - s)),   dn = dz @ weight,   dx from dn by the norm's backward

Dimensions: L tokens, `in` and `out` features. Every row is a function of that row and the parameters, and its
bits are those of `norm_mul_dropout`, `linear` and `silu` one after another, in every implementation. What
lies between them never leaves the cache (or the tile), and backward needs x and two
numbers a row: n and z are computed again, or kept where asked for, with the same bits.

Backward takes dy in place: the buffer that held it holds dz, from which the caller makes the gradients of
weight and bias, over the batch or sample by sample (`linear_weight_grad`).

Source of the layer: Zhai et al., "Actions speak louder than words", ICML 2024, equation 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.norm_linear_silu.register import NORM_LINEAR_SILU

RECOMPUTED = ("norm", "linear")


def norm_linear_silu(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    recompute: Iterable[str] = ("norm",),
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """silu(layer_norm(x) @ weight.T + bias), row by row.

    Args:
        x: (L, in) float32, bf16 or fp16, rows contiguous (any row stride).
        norm_weight, norm_bias: (in,), of x's dtype. weight: (out, in). bias: (out,) or None. Both of x's
            dtype, or of lower precision, as autocast has them: norm in float32, product in theirs.
        eps: added to the variance.
        recompute: what backward computes again instead of keeping it: "norm", n (L, in); "linear", z
            (L, out). It changes no bit.
    Returns:
        (L, out) of the weight's dtype. Differentiable in x (row by row) and all parameters.
    Raises:
        ValueError: shapes, dtypes or names that do not fit.
    """
    again = {recompute} if isinstance(recompute, str) else set(recompute)
    if unknown := again.difference(RECOMPUTED):
        raise ValueError(f"recompute takes some of {RECOMPUTED}, got {sorted(unknown)}")
    keep = "norm" not in again, "linear" not in again
    return NORM_LINEAR_SILU(x, norm_weight, norm_bias, weight, bias, eps, *keep, impl=impl)[0]
