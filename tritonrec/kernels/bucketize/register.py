"""Registration of `owner_of`, `bucketize` and `counting_sort`."""

from __future__ import annotations

import torch

from tritonrec.kernels.bucketize import reference
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar
from tritonrec.kernels.row_layout import check_rows


def _check(keys, world_size, count=None) -> None:
    _check_sort("keys", keys, "world_size", world_size, count)


def _check_buckets(buckets, num_buckets, count) -> None:
    _check_sort("buckets", buckets, "num_buckets", num_buckets, count)


def _check_sort(name: str, numbers: torch.Tensor, name_of_size: str, size: int, count) -> None:
    if numbers.dtype != torch.int64 or numbers.dim() != 1:
        raise ValueError(f"{name} must be (K,) int64, got shape {tuple(numbers.shape)} {numbers.dtype}")
    if not 1 <= size < 1 << 31:
        raise ValueError(f"{name_of_size} must be in [1, 2**31), got {size}")
    check_scalar("count", count)


def _check_inside(buckets, num_buckets, count) -> None:
    check_rows("buckets", buckets, num_buckets, count)


def _fake_bucketize(keys, world_size):
    return torch.empty_like(keys), keys.new_empty(world_size)


def _fake_sort(buckets, num_buckets):
    return torch.empty_like(buckets), buckets.new_empty(num_buckets)


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
COUNTING_SORT = Op(
    "counting_sort(Tensor buckets, int num_buckets, Tensor? count) -> (Tensor, Tensor)",
    reference=reference.counting_sort, cpu="numba_bucketize:counting_sort",
    triton="triton_bucketize:counting_sort",
    check=_check_buckets, check_memory=_check_inside, fake=_fake_sort,
)  # fmt: skip
