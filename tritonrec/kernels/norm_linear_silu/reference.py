"""Norm, linear layer and SiLU one after another, by the references of each."""

from __future__ import annotations

import torch

from tritonrec.kernels.linear import reference as linear
from tritonrec.kernels.norm_mul_dropout import reference as norm
from tritonrec.kernels.silu import reference as silu


def forward(
    x: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None, eps: float, normed: torch.Tensor, means: torch.Tensor, rstds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """y and z; fills normed, means and rstds."""
    norm.forward(x, None, norm_weight, norm_bias, eps, None, normed, means, rstds)
    z = linear.linear(normed, weight, bias)
    return silu.forward(z), z


def backward(
    dy: torch.Tensor, x: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor,
    weight: torch.Tensor, z: torch.Tensor, means: torch.Tensor, rstds: torch.Tensor,
    dx: torch.Tensor, dnorm_weight: torch.Tensor, dnorm_bias: torch.Tensor,
) -> None:  # fmt: skip
    """Turns dy into dz, and fills dx and each token's terms of the norm's gradients."""
    dy.copy_(silu.backward(dy, z))
    dnormed = linear.linear(dy, weight.t(), None)
    none = x[:0]
    norm.backward(
        dnormed, x, None, norm_weight, norm_bias, None, means, rstds, dx, none, dnorm_weight, dnorm_bias
    )
