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

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.sum_of_squares.register import SUM_OF_SQUARES


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
