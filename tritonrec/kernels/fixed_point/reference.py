"""Fixed point in Python's unbounded integers and exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from tritonrec.kernels.fixed_point.errors import report_value


def round_to_fixed_point(value: float, fraction_bits: int) -> int | None:
    """round-half-even(value * 2**fraction_bits), or None where it is not finite or reaches 2**62."""
    if not math.isfinite(value):
        return None
    scaled = Fraction(value) * 2**fraction_bits
    return round(scaled) if abs(scaled) < 2**62 else None


def to_fixed_point(
    values: torch.Tensor, fraction_bits: int, name: str, status: torch.Tensor | None = None
) -> torch.Tensor:
    """See `tritonrec.kernels.fixed_point.to_fixed_point`."""
    rounded = [round_to_fixed_point(value, fraction_bits) for value in values.flatten().tolist()]
    code = rounded.index(None) + 1 if None in rounded else 0
    report_value(code, status, name, values, fraction_bits)
    return torch.tensor([term or 0 for term in rounded], dtype=torch.int64, device=values.device).view(
        values.shape
    )


def from_fixed_point(sums: torch.Tensor, divisor: float, fraction_bits: int) -> torch.Tensor:
    """See `tritonrec.kernels.fixed_point.from_fixed_point`."""
    values = [
        float(np.float32(float(total) * 2.0**-fraction_bits / divisor)) for total in sums.flatten().tolist()
    ]
    return torch.tensor(values, dtype=torch.float32, device=sums.device).view(sums.shape)
