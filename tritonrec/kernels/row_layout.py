"""What kernels over rows share: the check of row numbers, and a flat view whose inner loop is contiguous."""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.arguments import not_a_tensor
from tritonrec.kernels.dispatch import on_host
from tritonrec.kernels.padding import num_valid, padding


def check_rows(name: str, rows: torch.Tensor, limit: int, count: torch.Tensor | None = None) -> None:
    """Refuse row numbers outside [0, limit) among the first `count`: IndexError naming the first one.

    On an accelerator the check is queued on the device (`torch._assert_async`), and nothing waits for it.
    """
    if not on_host(rows):
        inside = (rows >= 0) & (rows < limit)
        if count is not None:
            inside |= padding(rows.numel(), count)
        torch._assert_async(inside.all(), f"{name} holds a row number outside [0, {limit})")
        return
    from tritonrec.kernels.numba_row_layout import first_outside

    if count is not None:
        rows = rows[: num_valid(count, rows.numel())]
    position = first_outside(rows.contiguous().numpy(), np.uint64(limit))
    if position >= 0:
        raise IndexError(f"{name}[{position}] = {int(rows[position])} is outside [0, {limit})")


def check_matrix(name: str, tensor: torch.Tensor, dtype: torch.dtype, in_place: bool = False) -> None:
    """Refuse anything but a matrix of `dtype`; one that is written in place needs contiguous rows as well."""
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor(name, tensor)
    if tensor.dim() != 2 or tensor.dtype != dtype:
        raise ValueError(f"{name} must be 2-D {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
    if in_place and not _has_contiguous_rows(tensor):
        raise ValueError(f"{name} is written in place and must have contiguous rows, got {tensor.stride()}")


def _has_contiguous_rows(matrix: torch.Tensor) -> bool:
    return matrix.numel() == 0 or matrix.shape[1] == 1 or matrix.stride(1) == 1


def contiguous_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself where a row is contiguous, whatever the row stride; otherwise a copy."""
    return matrix if _has_contiguous_rows(matrix) else matrix.contiguous()


def flat(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as a flat array, a view where it is contiguous."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.contiguous().numpy().reshape(-1)


def flat_int64(tensor: torch.Tensor) -> np.ndarray:
    """`flat` of whole numbers, widened: for another dtype a kernel would be compiled once more."""
    return flat(tensor.to(torch.int64))


def flat_rows(matrix: torch.Tensor) -> tuple[np.ndarray, np.uintp]:
    """A CPU matrix with contiguous rows as a flat array and a row stride: row r starts at r * stride.

    numba vectorises over a flat array whatever the row stride, and over a strided 2-D array not at all.
    """
    matrix = matrix.detach() if matrix.requires_grad else matrix
    rows, columns = matrix.shape
    if matrix.is_contiguous():
        return matrix.numpy().reshape(-1), np.uintp(columns)
    stride = matrix.stride(0)
    length = (rows - 1) * stride + columns if rows and columns else 0
    return matrix.as_strided((length,), (1,)).numpy(), np.uintp(stride)
