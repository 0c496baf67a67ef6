"""Sampled-softmax cross entropy of each token: its label against K sampled items.

    z_0 = <hidden, positive> / temperature,   z_k = <hidden, negative_k> / temperature
    loss = log(sum over k of exp(z_k)) - z_0

A negative that happens to be the label is left out of the sum (`valid`). Sums run along one token in a fixed
order: losses and gradients do not depend, bit for bit, on what else is in the batch.

With `rows` the negatives are rows of a matrix, read where they lie: no (L, K, D) tensor exists, neither of
negatives nor of their gradients. Three tokens, two negatives each::

    rows       4  0        negatives of token 0 = negatives[4], negatives[0]
               0  2
               4  4        a row may occur many times; its gradient is the sum over all places

Dimensions: L tokens, K negatives per token, D features, R rows. Source of the loss: Zhai et al., "Actions
speak louder than words", ICML 2024, section 4.1.
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
    rows: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Cross entropy of each token's label among its sampled items.

    Args:
        hidden: (L, D) float32. positive: (L, D), the label's row. negatives: (L, K, D), with `rows` (R, D).
        valid: (L, K) bool, False leaves a negative out.
        temperature: divides the scores, > 0.
        rows: (L, K) int64 in [0, R), the row of each negative.
    Returns:
        (L,) float32, >= 0, with the bits of ``negatives[rows]`` given as negatives. Differentiable in hidden,
        positive and negatives; with `rows` the gradient of a row of negatives is the float32 sum over its
        places in their order, as of `gather_rows`.
    Raises:
        IndexError: a row is outside [0, R) (on an accelerator: an asynchronous device assertion).
        ValueError: shapes, dtypes or a temperature that do not fit.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return SAMPLED_SOFTMAX(hidden, positive, negatives, valid, 1 / temperature, rows, impl=impl)
