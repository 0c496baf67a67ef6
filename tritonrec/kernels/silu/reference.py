"""SiLU and its slope, elementwise."""

from __future__ import annotations

import torch


def silu(x: torch.Tensor) -> torch.Tensor:
    """See `tritonrec.kernels.silu.op.silu`."""
    x = x.contiguous()
    return x / (1 + torch.exp(-x))


def silu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dx, contiguous."""
    dy, x = dy.contiguous(), x.contiguous()
    sigmoid = 1 / (1 + torch.exp(-x))
    return dy * (sigmoid * (1 + x * (1 - sigmoid)))
