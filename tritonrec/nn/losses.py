"""Losses from logits whose value at a row depends on that row alone, bit for bit.

`torch.sigmoid` and `torch.nn.functional.softplus` compute the last elements of an array by another path than
the rest; `exp` and `log1p` do not, so everything here is made of those and of single operations.

Dimensions: L rows, T tasks.
"""

from __future__ import annotations

import torch

from ..kernels.autocast import widen


@torch.no_grad()
def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) without overflow, precise in both tails, float32 or float64; not differentiable."""
    x = widen(x)
    e = torch.exp(-x.abs())
    return torch.where(x >= 0, torch.ones_like(e), e) / (1 + e)


def binary_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropies -y log s(z) - (1 - y) log(1 - s(z)) of each row, added from the first task to the last.

    Args:
        logits: z, (L, T), float32 or of lower precision. labels: y, (L, T), any number type, in [0, 1].
    Returns:
        (L,) float32, >= 0. Differentiable in the logits.
    Raises:
        ValueError: shapes that do not fit.
    """
    if logits.dim() != 2 or labels.shape != logits.shape:
        raise ValueError(
            f"logits and labels must both be (L, T), got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    logits = widen(logits)
    return _BinaryCrossEntropy.apply(logits, labels.to(logits.dtype))


class _BinaryCrossEntropy(torch.autograd.Function):
    # Its own backward: max(z, 0) and |z| have no derivative at 0, where an untrained model's logits are.

    @staticmethod
    def forward(ctx, z, y):
        ctx.save_for_backward(z, y)
        losses = z.clamp(min=0) - z * y + torch.log1p(torch.exp(-z.abs()))
        total = z.new_zeros(len(z))
        for task in losses.unbind(1):
            total = total + task
        return total

    @staticmethod
    def backward(ctx, dy):
        z, y = ctx.saved_tensors
        return dy[:, None] * ((1 - y) * sigmoid(z) - y * sigmoid(-z)), None
