"""The gate of the HSTU layer, fused: layer norm, product with u, dropout.

    n = (x - mean(x)) / sqrt(var(x) + eps),   y = u * (n * weight + bias) * kept / (1 - p)

Dimensions: L tokens, D columns. Sums run along a row only, so a row's bits do not depend on the batch.
Whether a column is kept is a function of (seed, sample, position, column), drawn from Philox with the tag
`DROPOUT`; all implementations keep the same columns, and nothing but the seed is stored for backward::

    counter   sample id (two words), DROPOUT | column // 4, position        key   seed
    column d survives if word d % 4 >= floor(p * 2**32)

Source of the layer: Zhai et al., "Actions speak louder than words", ICML 2024, equation 3.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.norm_mul_dropout.register import NORM_MUL_DROPOUT


def norm_mul_dropout(
    x: torch.Tensor,
    u: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-6,
    dropout: float = 0.0,
    seed: int = 0,
    sample_ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    training: bool = True,
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """u * layer_norm(x), with dropout keyed by what it is for.

    Args:
        x: (L, D) float32, bf16 or fp16. u: (L, D) of x's dtype or None, which stands for ones (a plain layer
            norm). Rows contiguous.
        weight, bias: (D,), float32 or of x's dtype. eps: added to the variance.
        dropout: probability p that an element is zeroed, 0 <= p < 1; only while `training`.
        seed: int64. sample_ids, positions: (L,) int64 per token, of which positions count by their low
            32 bits; needed where there is dropout.
    Returns:
        (L, D) of x's dtype. Differentiable in x, u, weight and bias.
    Raises:
        ValueError: shapes, dtypes or p that do not fit.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
    p = dropout if training else 0.0
    if not p:
        sample_ids = positions = None
    return NORM_MUL_DROPOUT(x, u, weight, bias, eps, p, seed, sample_ids, positions, impl=impl)[0]
