"""Registration of `intersect` and of its padded form."""

from __future__ import annotations

import torch

from tritonrec.kernels.intersect import reference
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar


def _check(left, right, left_count, right_count, table) -> None:
    for name, keys in (("left", left), ("right", right)):
        if keys.dtype != torch.int64 or keys.dim() != 1:
            raise ValueError(f"{name} must be 1-D int64, got shape {tuple(keys.shape)} {keys.dtype}")
    if left.numel() >= 1 << 31 or right.numel() >= 1 << 31:
        raise ValueError(f"intersect takes fewer than 2**31 keys, got {left.numel()} and {right.numel()}")
    check_scalar("left_count", left_count)
    check_scalar("right_count", right_count)
    if table is not None and (table.dtype != torch.int32 or table.dim() != 1):
        raise ValueError(f"table must be (S,) int32, got shape {tuple(table.shape)} {table.dtype}")


def _check_memory(table) -> None:
    if table is not None and table.numel() & (table.numel() - 1):
        raise ValueError(f"the slots of a table are a power of two, or none: got {table.numel()}")


def _fake(left):
    size = torch.library.get_ctx().new_dynamic_size()
    return left.new_empty(size), left.new_empty(size)


def _fake_padded(left, right):
    length = torch.sym_min(left.shape[0], right.shape[0])
    return left.new_empty(length), left.new_empty(length), left.new_empty(())


INTERSECT = Op(
    "intersect(Tensor left, Tensor right, Tensor? left_count, Tensor? right_count, Tensor? table) "
    "-> (Tensor, Tensor)",
    reference=reference.intersect, cpu="numba_intersect:intersect", triton="triton_intersect:intersect",
    check=_check, check_memory=_check_memory, fake=_fake, padded=False,
)  # fmt: skip
INTERSECT_PADDED = Op(
    "intersect_padded(Tensor left, Tensor right, Tensor? left_count, Tensor? right_count, Tensor? table) "
    "-> (Tensor, Tensor, Tensor)",
    reference=reference.intersect, cpu="numba_intersect:intersect", triton="triton_intersect:intersect",
    check=_check, check_memory=_check_memory, fake=_fake_padded, padded=True,
)  # fmt: skip
