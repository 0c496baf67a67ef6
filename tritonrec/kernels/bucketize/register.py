"""Registration of `owner_of` and `bucketize`."""

from __future__ import annotations

import torch

from tritonrec.kernels.bucketize import reference
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar


def _check(keys, world_size, count=None) -> None:
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(f"keys must be (K,) int64, got shape {tuple(keys.shape)} {keys.dtype}")
    if not 1 <= world_size < 1 << 31:
        raise ValueError(f"world_size must be in [1, 2**31), got {world_size}")
    check_scalar("count", count)


def _fake_bucketize(keys, world_size):
    return torch.empty_like(keys), keys.new_empty(world_size)


OWNER_OF = Op(
    "owner_of(Tensor keys, int world_size) -> Tensor",
    reference=reference.owner_of, cpu="numba_bucketize:owner_of", triton="triton_bucketize:owner_of",
    check=_check, fake=lambda keys: torch.empty_like(keys),
)  # fmt: skip
BUCKETIZE = Op(
    "bucketize(Tensor keys, int world_size, Tensor? count) -> (Tensor, Tensor)",
    reference=reference.bucketize, cpu="numba_bucketize:bucketize", triton="triton_bucketize:bucketize",
    check=_check, fake=_fake_bucketize,
)  # fmt: skip
