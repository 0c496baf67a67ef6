# mypy: ignore-errors
"""Sums of squares on the CPU, in one pass over the values."""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.caches import njit
from tritonrec.kernels.padding import first_valid
from tritonrec.kernels.sum_of_squares.op import MOST
from tritonrec.kernels.workers import over_ranges

UNIT = 2.0**32
COST = 10  # operations of a value


def sum_of_squares(values: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """See `tritonrec.ops.sum_of_squares`."""
    flat = first_valid(values.detach(), count).contiguous().view(-1).numpy()

    def run(start: int, stop: int) -> tuple[int, int, int]:
        return _sum(flat, start, stop)

    limbs = np.array(over_ranges(run, flat.size, COST * flat.size), np.int64).sum(axis=0)
    limbs[0] = min(limbs[0], MOST)
    return torch.from_numpy(limbs)


@njit(cache=True, nogil=True)
def _sum(values, start, stop):
    """The limbs of ``values[start:stop]``, the first one at most 2**50."""
    high, middle, low = np.int64(0), np.int64(0), np.int64(0)
    for i in range(np.uintp(start), np.uintp(stop)):
        # Exact: 24 bits squared are 48. So are both remainders
        # below, since a limb takes off the highest bits alone.
        square = np.float64(values[i]) * np.float64(values[i])
        if square < 2.0**50:
            whole = np.int64(square)
            rest = (square - np.float64(whole)) * UNIT
            part = np.int64(rest)
            high = min(high + whole, MOST)
            middle += part
            low += np.int64(np.rint((rest - np.float64(part)) * UNIT))
        else:  # NaN, too
            high = np.int64(MOST)
    return high, middle, low
