"""Squares as exact fractions, their limbs as Python's unbounded integers."""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from tritonrec.kernels.padding import first_valid

MOST = 2**50
"""Where the first limb stops: the square of a value that is not finite, and the largest result."""


def limbs_of(value: float) -> tuple[int, int, int]:
    """The three limbs of one square."""
    if not math.isfinite(value) or Fraction(value) ** 2 >= MOST:
        return MOST, 0, 0
    square = Fraction(value) ** 2
    high = math.floor(square)
    rest = (square - high) * 2**32
    middle = math.floor(rest)
    return high, middle, round((rest - middle) * 2**32)


def sum_of_squares(values: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """See `tritonrec.kernels.sum_of_squares.sum_of_squares`."""
    limbs = [limbs_of(value) for value in first_valid(values, count).flatten().tolist()]
    high, middle, low = (sum(each) for each in zip(*limbs, strict=True)) if limbs else (0, 0, 0)
    return torch.tensor([min(high, MOST), middle, low], dtype=torch.int64, device=values.device)
