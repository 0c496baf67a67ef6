"""Registration of `unique` and of its padded forms."""

from __future__ import annotations

import torch

from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar
from tritonrec.kernels.unique import reference


def _check(keys, count) -> None:
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(f"keys must be (K,) int64, got shape {tuple(keys.shape)} {keys.dtype}")
    if keys.numel() >= 1 << 31:
        raise ValueError(f"unique takes fewer than 2**31 keys, got {keys.numel()}")
    check_scalar("count", count)


def _fake(keys):
    size = torch.library.get_ctx().new_dynamic_size()
    return keys.new_empty(size), torch.empty_like(keys), keys.new_empty(size)


def _fake_padded(keys):
    return (*(torch.empty_like(keys) for _ in range(3)), keys.new_empty(()))


def _fake_table(keys):
    slots = torch.library.get_ctx().new_dynamic_size()
    return *_fake_padded(keys), keys.new_empty(slots, dtype=torch.int32)


UNIQUE = Op(
    "unique(Tensor keys, Tensor? count) -> (Tensor, Tensor, Tensor)",
    reference=reference.unique, cpu="numba_unique:unique", triton="triton_unique:unique",
    check=_check, fake=_fake, padded=False,
)  # fmt: skip
UNIQUE_PADDED = Op(
    "unique_padded(Tensor keys, Tensor? count) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.unique, cpu="numba_unique:unique", triton="triton_unique:unique",
    check=_check, fake=_fake_padded, padded=True,
)  # fmt: skip
UNIQUE_TABLE = Op(
    "unique_table(Tensor keys, Tensor? count) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=reference.unique, cpu="numba_unique:unique", triton="triton_unique:unique",
    check=_check, fake=_fake_table, padded=True, table=True,
)  # fmt: skip
