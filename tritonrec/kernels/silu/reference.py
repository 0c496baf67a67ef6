"""SiLU and its slope, elementwise."""

from __future__ import annotations

import torch


def forward(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sigmoid = 1 / (1 + torch.exp(-x))
    return dy * (sigmoid * (1 + x * (1 - sigmoid)))
