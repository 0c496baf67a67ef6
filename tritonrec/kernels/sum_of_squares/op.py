"""Sum of squares as an integer: three int64 limbs, added in any order.

The square of a float32 has 48 significant bits, so float64 holds it exactly. It is rounded once, to a
multiple of 2**-64, and cut into three whole numbers::

    v = value * value        2.75 * 2**-32 + 3
    high = floor(v)          3                                        units of 1
    middle                   2                   below 2**32          units of 2**-32
    low                      3 * 2**30           at most 2**32        units of 2**-64, half to even

Each limb of the result is the sum of that limb over the values: sum = high + middle * 2**-32 + low * 2**-64.
Results of parts (micro-batches, ranks, parameters) add up, limb by limb, to the result of the whole.

All implementations agree in every bit, and neither order nor schedule shows in the result.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from tritonrec.kernels.autocast import FLOAT32
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar, first_valid


def sum_of_squares(
    values: torch.Tensor, count: torch.Tensor | None = None, *, impl: Impl = "auto"
) -> torch.Tensor:
    """The exact sum of ``values**2``, each square rounded to a multiple of 2**-64.

    A value that is not finite, or whose square reaches 2**50, has the limbs (2**50, 0, 0), and the result's
    first limb stops at 2**50. So a first limb of 2**50 or more, also after adding up to 4,096 results, says
    that the sum is at least 2**50 or that a value is not finite.

    Args:
        values: float32, any shape of fewer than 2**31 elements: the results of parts that have fewer
            together add up without leaving int64.
        count: () int64, the rows (entries of the first dimension) that hold; the others are not read
            (`kernels.padding`).
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
    Returns:
        (3,) int64, the limbs high, middle and low; never negative. No host waits for them.
    Raises:
        ValueError: another dtype, 2**31 elements or more, or a count of values without a dimension.
    """
    return SUM_OF_SQUARES(values, count, impl=impl)


# Reference: Squares as exact fractions, their limbs as Python's unbounded integers.

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


def sum_of_squares_reference(values: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """See `sum_of_squares`."""
    limbs = [limbs_of(value) for value in first_valid(values, count).flatten().tolist()]
    high, middle, low = (sum(each) for each in zip(*limbs, strict=True)) if limbs else (0, 0, 0)
    return torch.tensor([min(high, MOST), middle, low], dtype=torch.int64, device=values.device)


def _check(values, count) -> None:
    if values.dtype != torch.float32:
        raise ValueError(f"values must be float32, got {values.dtype}")
    # below, no limb of the sum leaves int64
    if values.numel() >= 2**31:
        raise ValueError(f"values must have fewer than 2**31 elements, got shape {tuple(values.shape)}")
    check_scalar("count", count)
    if count is not None and values.dim() == 0:
        raise ValueError("a count needs values with rows, got values of shape ()")


def _fake(values):
    return torch.empty(3, dtype=torch.int64, device=values.device)


SUM_OF_SQUARES = Op(
    "sum_of_squares(Tensor values, Tensor? count) -> Tensor",
    reference=sum_of_squares_reference, cpu="numba_sum_of_squares:sum_of_squares",
    triton="triton_sum_of_squares:sum_of_squares",
    check=_check, fake=_fake, autocast={"values": FLOAT32},
)  # fmt: skip
