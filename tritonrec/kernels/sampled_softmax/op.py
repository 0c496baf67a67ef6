"""Sampled-softmax cross entropy of each token: its label against K sampled items.

    z_0 = <hidden, positive> / temperature,   z_k = <hidden, negative_k> / temperature
    loss = log(sum over k of exp(z_k)) - z_0

A negative that happens to be the label is left out of the sum (`valid`). Sums run along one token in a fixed
order: losses and gradients do not depend, bit for bit, on what else is in the batch.

Dimensions: L tokens, K negatives per token, D features. Source of the loss: Zhai et al., "Actions speak
louder than words", ICML 2024, section 4.1.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.sampled_softmax.register import SAMPLED_SOFTMAX


def sampled_softmax(
    hidden: torch.Tensor,
    positive: torch.Tensor,
    negatives: torch.Tensor,
    valid: torch.Tensor,
    temperature: float = 1.0,
    *,
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
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return SAMPLED_SOFTMAX(hidden, positive, negatives, valid, 1 / temperature, impl=impl)
