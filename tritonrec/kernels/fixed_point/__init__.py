"""Sums that come out the same in any order: values rounded once to multiples of 2**-bits, added as int64.

Integer addition is associative, so partial sums may be formed by any micro-batch, rank or atomic and joined
in any order. The default grid of 2**-36 reaches from 1.5e-11 to 1.3e8 in a sum. What cannot be summed
exactly, a value that is not finite or too large and a sum that leaves int64, is an `ExactSumError`.

All implementations agree in every bit.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from tritonrec.kernels.arguments import not_a_tensor
from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.fixed_point import reference
from tritonrec.kernels.overlap import check_no_overlap
from tritonrec.kernels.padding import check_scalar, check_status, record
from tritonrec.kernels.registration import custom_op

FRACTION_BITS = 36

__all__ = [
    "FRACTION_BITS",
    "ExactSumError",
    "check_bits",
    "check_summed",
    "from_fixed_point",
    "to_fixed_point",
]


class ExactSumError(ArithmeticError):
    """A value or a sum that has no exact place on the grid.

    Attributes: `name` of the tensor, `index` of the offending element in it, and its `value`, None where the
    error was put off (`check_summed`).
    """

    def __init__(
        self, name: str, index: tuple[int, ...], value: float | int | None, bits: int, into: str = ""
    ):
        self.name, self.index, self.value = name, index, value
        where = f"{name}[{', '.join(map(str, index))}]"
        if value is None:
            what = f"or a sum it is added to is not finite or has no place on the grid of 2**-{bits}"
            super().__init__(f"{where} {what}")
            return
        where += f" = {value!r}"
        if isinstance(value, float) and not math.isfinite(value):
            what = "is not finite and has no exact sum"
        elif into:
            what = f"added to {into} leaves the range of int64 on the grid of 2**-{bits}: use fewer bits"
        else:
            what = f"reaches 2**{62 - bits}, the end of the grid of 2**-{bits}: use fewer bits"
        super().__init__(f"{where} {what}")


def check_bits(bits: int) -> None:
    if not 0 <= bits <= 62:
        raise ValueError(f"bits must lie in [0, 62], got {bits}")


def check_summed(
    status: torch.Tensor, shape: tuple[int, ...], bits: int = FRACTION_BITS, name: str = "tensor"
) -> None:
    """Raise the ExactSumError that an op wrote into `status`; waits for the device.

    Args:
        status: () int64, as those ops left it. shape: of their `values`. bits, name: as given to them.
    Raises:
        ExactSumError: a value could not be added; the results of that call and what came of them are void.
        ValueError: `status` is not () int64, or holds no position of `shape`.
    """
    check_status(status, math.prod(shape))
    code = int(status)
    if code:
        index = tuple(int(i) for i in np.unravel_index(code - 1, shape))
        raise ExactSumError(name, index, None, bits)


def to_fixed_point(
    values: torch.Tensor,
    bits: int = FRACTION_BITS,
    name: str = "tensor",
    impl: Impl = "auto",
    *,
    status: torch.Tensor | None = None,
) -> torch.Tensor:
    """round-half-even(values * 2**bits) as int64.

    Args:
        values: float32, any shape. bits: 0 to 62. name: what an error calls the tensor.
        status: () int64, mutated: takes 1 + the flat position of the first value without a place, for
            `check_summed`, where otherwise the host would wait to raise ExactSumError (`kernels.padding`).
    Returns:
        int64 of the same shape, |.| < 2**62.
    Raises:
        ExactSumError: a value is not finite, or |value * 2**bits| >= 2**62.
        ValueError: another dtype, or bits out of range.
    """
    _check_values(values, bits, status)
    if status is not None:
        return _to_fixed_point_status(values, bits, name, impl, status)
    return _to_fixed_point(values, bits, name, impl)


def _check_values(values: torch.Tensor, bits: int, status: torch.Tensor | None = None) -> None:
    if not isinstance(values, torch.Tensor):
        raise not_a_tensor("values", values)
    if values.dtype != torch.float32:
        raise ValueError(f"values must be float32, got {values.dtype}")
    check_bits(bits)
    check_scalar("status", status, values)


def _launch_to_fixed_point(
    values: torch.Tensor, bits: int, name: str, impl: str, status: torch.Tensor | None = None
) -> torch.Tensor:
    chosen = implementation(impl, values)  # type: ignore[arg-type]
    if status is not None:
        check_no_overlap({"status": status}, {"values": values})
    values = values.detach().contiguous()
    grid = torch.empty(values.shape, dtype=torch.int64, device=values.device)
    if values.numel() == 0:
        return grid
    if chosen == "reference":
        filled, bad = reference.to_fixed_point(values, bits)
        grid = filled.to(values.device)
    elif chosen == "cpu":
        from tritonrec.kernels.fixed_point import numba_fixed_point

        bad = numba_fixed_point.to_fixed_point(
            values.view(-1).numpy(), 2.0**bits, np.float32(2.0 ** (62 - bits)), grid.view(-1).numpy()
        )
    else:
        from tritonrec.kernels.fixed_point import triton_fixed_point

        code = triton_fixed_point.to_fixed_point(values, bits, grid)
        if status is not None:
            record(status, code)
            return grid
        bad = int(code) - 1
    if bad >= 0 and status is not None:
        record(status, bad + 1)
    elif bad >= 0:
        index = tuple(int(i) for i in np.unravel_index(bad, tuple(values.shape)))
        raise ExactSumError(name, index, values[index].item(), bits)
    return grid


@custom_op("tritonrec::to_fixed_point", mutates_args=())
def _to_fixed_point(values: torch.Tensor, bits: int, name: str, impl: str) -> torch.Tensor:
    _check_values(values, bits)
    return _launch_to_fixed_point(values, bits, name, impl)


# An op of its own: one that mutates an argument, if only at times, costs half as much again on small tensors.
@custom_op("tritonrec::to_fixed_point_status", mutates_args=("status",))
def _to_fixed_point_status(
    values: torch.Tensor, bits: int, name: str, impl: str, status: torch.Tensor
) -> torch.Tensor:
    _check_values(values, bits, status)
    return _launch_to_fixed_point(values, bits, name, impl, status)


@_to_fixed_point.register_fake
@_to_fixed_point_status.register_fake
def _(values, bits, name, impl, status=None):
    return torch.empty(values.shape, dtype=torch.int64, device=values.device)


def from_fixed_point(
    sums: torch.Tensor, divisor: float = 1.0, bits: int = FRACTION_BITS, impl: Impl = "auto"
) -> torch.Tensor:
    """float64(sums) * 2**-bits / divisor, computed in float64 and rounded to float32 at the end.

    Args:
        sums: int64, any shape. divisor: finite, not zero. bits: those of `to_fixed_point`.
    Returns:
        float32 of the same shape.
    Raises:
        ValueError: another dtype, a divisor that is zero or not finite, or bits out of range.
    """
    _check_sums(sums, divisor, bits)
    return _from_fixed_point(sums, divisor, bits, impl)


def _check_sums(sums: torch.Tensor, divisor: float, bits: int) -> None:
    if not isinstance(sums, torch.Tensor):
        raise not_a_tensor("sums", sums)
    if sums.dtype != torch.int64:
        raise ValueError(f"sums must be int64, got {sums.dtype}")
    if divisor == 0 or not math.isfinite(divisor):
        raise ValueError(f"divisor must be finite and not zero, got {divisor}")
    check_bits(bits)


@custom_op("tritonrec::from_fixed_point", mutates_args=())
def _from_fixed_point(sums: torch.Tensor, divisor: float, bits: int, impl: str) -> torch.Tensor:
    _check_sums(sums, divisor, bits)
    chosen = implementation(impl, sums)  # type: ignore[arg-type]
    if chosen == "reference":
        return reference.from_fixed_point(sums, divisor, bits).to(sums.device)
    sums = sums.contiguous()
    values = torch.empty(sums.shape, dtype=torch.float32, device=sums.device)
    if sums.numel() == 0:
        return values
    if chosen == "cpu":
        from tritonrec.kernels.fixed_point import numba_fixed_point

        numba_fixed_point.from_fixed_point(
            sums.view(-1).numpy(), 2.0**-bits, float(divisor), values.view(-1).numpy()
        )
    else:
        from tritonrec.kernels.fixed_point import triton_fixed_point

        triton_fixed_point.from_fixed_point(sums, divisor, bits, values)
    return values


@_from_fixed_point.register_fake
def _(sums, divisor, bits, impl):
    return torch.empty(sums.shape, dtype=torch.float32, device=sums.device)
