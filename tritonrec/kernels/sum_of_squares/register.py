"""Registration of `sum_of_squares`."""

from __future__ import annotations

import torch

from tritonrec.kernels.autocast import FLOAT32
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar
from tritonrec.kernels.sum_of_squares import reference


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
    reference=reference.sum_of_squares, cpu="numba_sum_of_squares:sum_of_squares",
    triton="triton_sum_of_squares:sum_of_squares",
    check=_check, fake=_fake, autocast={"values": FLOAT32},
)  # fmt: skip
