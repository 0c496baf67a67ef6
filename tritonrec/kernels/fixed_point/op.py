"""Fixed point: values rounded once to multiples of 2**-fraction_bits, whose int64 sums have no order.

Integer addition is associative, so partial sums may be formed by any micro-batch, rank or atomic and joined
in any order. The default of 36 fraction bits reaches from 1.5e-11 to 1.3e8 in a sum. A value that is not
finite or too large, and a sum that leaves int64, is an `ExactSumError`, never a rounded or wrapped sum.

All implementations agree in every bit.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.fixed_point.errors import FRACTION_BITS, ExactSumError
from tritonrec.kernels.fixed_point.register import FROM_FIXED_POINT, TO_FIXED_POINT, TO_FIXED_POINT_STATUS
from tritonrec.kernels.padding import check_status


def check_summed(
    status: torch.Tensor, shape: tuple[int, ...], fraction_bits: int = FRACTION_BITS, name: str = "tensor"
) -> None:
    """Raise the ExactSumError that an op wrote into `status`; waits for the device.

    Args:
        status: () int64, as those ops left it. shape: of their `values`.
        fraction_bits, name: as given to them.
    Raises:
        ExactSumError: a value could not be added; the results of that call and what came of them are void.
        ValueError: `status` is not () int64, or holds no position of `shape`.
    """
    check_status(status, math.prod(shape))
    code = int(status)
    if code:
        index = tuple(int(i) for i in np.unravel_index(code - 1, shape))
        raise ExactSumError(name, index, None, fraction_bits)


def to_fixed_point(
    values: torch.Tensor,
    fraction_bits: int = FRACTION_BITS,
    name: str = "tensor",
    *,
    status: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """round-half-even(values * 2**fraction_bits) as int64.

    Args:
        values: float32, any shape. fraction_bits: 0 to 62. name: what an error calls the tensor.
        status: () int64, mutated: takes 1 + the flat position of the first value without a fixed-point
            number, for `check_summed`; without it the host waits to raise ExactSumError (`kernels.padding`).
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
    Returns:
        int64 of the same shape, |.| < 2**62.
    Raises:
        ExactSumError: a value is not finite, or |value * 2**fraction_bits| >= 2**62.
        ValueError: another dtype, or fraction bits out of range.
    """
    if status is None:
        return TO_FIXED_POINT(values, fraction_bits, name, impl=impl)
    return TO_FIXED_POINT_STATUS(values, fraction_bits, name, status, impl=impl)


def from_fixed_point(
    sums: torch.Tensor,
    divisor: float = 1.0,
    fraction_bits: int = FRACTION_BITS,
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """float64(sums) * 2**-fraction_bits / divisor, computed in float64 and rounded to float32 at the end.

    Args:
        sums: int64, any shape. divisor: finite, not zero. fraction_bits: those of `to_fixed_point`.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
    Returns:
        float32 of the same shape.
    Raises:
        ValueError: another dtype, a divisor that is zero or not finite, or fraction bits out of range.
    """
    return FROM_FIXED_POINT(sums, divisor, fraction_bits, impl=impl)
