"""Fixed point: values rounded once to multiples of 2**-fraction_bits, whose int64 sums have no order.

Integer addition is associative, so partial sums may be formed by any micro-batch, rank or atomic and joined
in any order. The default of 36 fraction bits reaches from 1.5e-11 to 1.3e8 in a sum. A value that is not
finite or too large, and a sum that leaves int64, is an `ExactSumError`, never a rounded or wrapped sum.

All implementations agree in every bit.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch

from tritonrec.kernels.autocast import FLOAT32
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.fixed_point.errors import (
    FRACTION_BITS,
    ExactSumError,
    check_fraction_bits,
    report_value,
)
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar, check_status


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


# Reference: fixed point in Python's unbounded integers and exact fractions.


def round_to_fixed_point(value: float, fraction_bits: int) -> int | None:
    """round-half-even(value * 2**fraction_bits), or None where it is not finite or reaches 2**62."""
    if not math.isfinite(value):
        return None
    # Python rounds a Fraction half to even, as IEEE does, without an intermediate rounding.
    scaled = Fraction(value) * 2**fraction_bits
    return round(scaled) if abs(scaled) < 2**62 else None


def to_fixed_point_reference(values, fraction_bits, name, status=None) -> torch.Tensor:
    """See `to_fixed_point`."""
    rounded = [round_to_fixed_point(value, fraction_bits) for value in values.flatten().tolist()]
    code = rounded.index(None) + 1 if None in rounded else 0
    report_value(code, status, name, values, fraction_bits)
    return torch.tensor([term or 0 for term in rounded], dtype=torch.int64, device=values.device).view(
        values.shape
    )


def from_fixed_point_reference(sums: torch.Tensor, divisor: float, fraction_bits: int) -> torch.Tensor:
    """See `from_fixed_point`."""
    values = [
        float(np.float32(float(total) * 2.0**-fraction_bits / divisor)) for total in sums.flatten().tolist()
    ]
    return torch.tensor(values, dtype=torch.float32, device=sums.device).view(sums.shape)


def _check_values(values, fraction_bits, status=None) -> None:
    if values.dtype != torch.float32:
        raise ValueError(f"values must be float32, got {values.dtype}")
    check_fraction_bits(fraction_bits)
    check_scalar("status", status)


def _check_sums(sums, divisor, fraction_bits) -> None:
    if sums.dtype != torch.int64:
        raise ValueError(f"sums must be int64, got {sums.dtype}")
    if divisor == 0 or not math.isfinite(divisor):
        raise ValueError(f"divisor must be finite and not zero, got {divisor}")
    check_fraction_bits(fraction_bits)


def _fake(values):
    return torch.empty(values.shape, dtype=torch.int64, device=values.device)


def _fake_quotient(sums):
    return torch.empty(sums.shape, dtype=torch.float32, device=sums.device)


TO_FIXED_POINT = Op(
    "to_fixed_point(Tensor values, int fraction_bits, str name) -> Tensor",
    reference=to_fixed_point_reference, cpu="numba_fixed_point:to_fixed_point",
    triton="triton_fixed_point:to_fixed_point",
    check=_check_values, fake=_fake, autocast={"values": FLOAT32},
)  # fmt: skip
# An op of its own: one that mutates an argument, if only at times, costs half as much again on small tensors.
TO_FIXED_POINT_STATUS = Op(
    "to_fixed_point_status(Tensor values, int fraction_bits, str name, Tensor(a!) status) -> Tensor",
    reference=to_fixed_point_reference, cpu="numba_fixed_point:to_fixed_point",
    triton="triton_fixed_point:to_fixed_point",
    check=_check_values, fake=_fake, autocast={"values": FLOAT32},
)  # fmt: skip
FROM_FIXED_POINT = Op(
    "from_fixed_point(Tensor sums, float divisor, int fraction_bits) -> Tensor",
    reference=from_fixed_point_reference, cpu="numba_fixed_point:from_fixed_point",
    triton="triton_fixed_point:from_fixed_point",
    check=_check_sums, fake=_fake_quotient,
)  # fmt: skip
