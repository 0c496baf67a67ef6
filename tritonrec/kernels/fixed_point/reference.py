"""The grid in Python's unbounded integers and exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch


def round_to_fixed_point(value: float, bits: int) -> int | None:
    """round-half-even(value * 2**bits), or None where it is not finite or reaches 2**62."""
    if not math.isfinite(value):
        return None
    scaled = Fraction(value) * 2**bits
    return round(scaled) if abs(scaled) < 2**62 else None


def to_fixed_point(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, int]:
    """The grid values, and the flat position of the first value without one (-1 where all have one)."""
    grid = torch.empty(values.numel(), dtype=torch.int64)
    for i, value in enumerate(values.flatten().tolist()):
        rounded = round_to_fixed_point(value, bits)
        if rounded is None:
            return grid, i
        grid[i] = rounded
    return grid.view(values.shape), -1


def from_fixed_point(sums: torch.Tensor, divisor: float, bits: int) -> torch.Tensor:
    values = [float(np.float32(float(total) * 2.0**-bits / divisor)) for total in sums.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float32).view(sums.shape)
