"""Registration of `to_fixed_point`, of its form that waits for no device, and of `from_fixed_point`."""

from __future__ import annotations

import math

import torch

from tritonrec.kernels.autocast import FLOAT32
from tritonrec.kernels.fixed_point import reference
from tritonrec.kernels.fixed_point.errors import check_fraction_bits
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar


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
    reference=reference.to_fixed_point, cpu="numba_fixed_point:to_fixed_point",
    triton="triton_fixed_point:to_fixed_point",
    check=_check_values, fake=_fake, autocast={"values": FLOAT32},
)  # fmt: skip
# An op of its own: one that mutates an argument, if only at times, costs half as much again on small tensors.
TO_FIXED_POINT_STATUS = Op(
    "to_fixed_point_status(Tensor values, int fraction_bits, str name, Tensor(a!) status) -> Tensor",
    reference=reference.to_fixed_point, cpu="numba_fixed_point:to_fixed_point",
    triton="triton_fixed_point:to_fixed_point",
    check=_check_values, fake=_fake, autocast={"values": FLOAT32},
)  # fmt: skip
FROM_FIXED_POINT = Op(
    "from_fixed_point(Tensor sums, float divisor, int fraction_bits) -> Tensor",
    reference=reference.from_fixed_point, cpu="numba_fixed_point:from_fixed_point",
    triton="triton_fixed_point:from_fixed_point",
    check=_check_sums, fake=_fake_quotient,
)  # fmt: skip
