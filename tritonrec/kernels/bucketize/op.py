"""Key routing: `owner_of` names the rank that owns a key, `bucketize` groups keys by owner.

`counting_sort` groups by buckets that are known: ``bucketize(keys, n)`` is
``counting_sort(owner_of(keys, n), n)`` in one pass over the keys.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.murmur.reference import mix64
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar, first_valid
from tritonrec.kernels.row_layout import check_rows


def owner_of(keys: torch.Tensor, world_size: int, *, impl: Impl = "auto") -> torch.Tensor:
    """The rank that owns each key: ``(high 32 bits of murmur(key)) * world_size >> 32``.

    Args:
        keys: (K,) int64, any of the 2**64 values.
        world_size: number of ranks, 1 <= world_size < 2**31.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        (K,) int64 in [0, world_size). The multiply-shift maps the hash to ranks evenly without a division
        (Lemire 2019, "Fast random integer generation in an interval", section 3).
    """
    return OWNER_OF(keys, world_size, impl=impl)


def bucketize(
    keys: torch.Tensor, world_size: int, *, count: torch.Tensor | None = None, impl: Impl = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group keys by owner, stable inside a bucket.

    Args:
        keys: (K,) int64, any of the 2**64 values.
        world_size: number of ranks, 1 <= world_size < 2**31.
        count: () int64, the number of valid keys; the others have no owner (`kernels.padding`).
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        ``permutation`` (K,) int64 such that ``keys[permutation]`` lists rank 0's keys first, then rank 1's,
        each in their original order, and ``counts`` (world_size,) int64, the split sizes of the key
        all-to-all. Positions behind `count` stay where they are.
    """
    return BUCKETIZE(keys, world_size, count, impl=impl)


def counting_sort(
    buckets: torch.Tensor, num_buckets: int, *, count: torch.Tensor | None = None, impl: Impl = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group elements by bucket, stable inside a bucket.

    Args:
        buckets: (K,) int64 in [0, num_buckets).
        num_buckets: 1 <= num_buckets < 2**31. Beyond 64 an accelerator sorts with `torch.sort`.
        count: () int64, the number of valid elements; the others have no bucket (`kernels.padding`).
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        ``permutation`` (K,) int64, the positions of bucket 0 first, then of bucket 1, each in their original
        order, and ``counts`` (num_buckets,) int64. Positions behind `count` stay where they are.

    Raises:
        IndexError: a bucket is outside (on an accelerator: an asynchronous device assertion).
    """
    return COUNTING_SORT(buckets, num_buckets, count, impl=impl)


# Reference: key routing as loops over Python integers.


def owner_of_reference(keys: torch.Tensor, world_size: int) -> torch.Tensor:
    """See `owner_of`."""
    owners = [((mix64(key) >> 32) * world_size) >> 32 for key in keys.tolist()]
    return torch.tensor(owners, dtype=torch.int64, device=keys.device)


def bucketize_reference(keys, world_size, count) -> tuple[torch.Tensor, torch.Tensor]:
    """See `bucketize`."""
    return counting_sort_reference(owner_of_reference(keys, world_size), world_size, count)


def counting_sort_reference(buckets, num_buckets, count) -> tuple[torch.Tensor, torch.Tensor]:
    """See `counting_sort`."""
    valid = first_valid(buckets, count)
    permutation = sorted(range(valid.numel()), key=valid.tolist().__getitem__)  # stable
    permutation += range(valid.numel(), buckets.numel())
    counts = torch.bincount(valid, minlength=num_buckets)
    return torch.tensor(permutation, dtype=torch.int64, device=buckets.device), counts


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
    reference=owner_of_reference, cpu="numba_bucketize:owner_of", triton="triton_bucketize:owner_of",
    check=_check, fake=lambda keys: torch.empty_like(keys),
)  # fmt: skip
BUCKETIZE = Op(
    "bucketize(Tensor keys, int world_size, Tensor? count) -> (Tensor, Tensor)",
    reference=bucketize_reference, cpu="numba_bucketize:bucketize", triton="triton_bucketize:bucketize",
    check=_check, fake=_fake_bucketize,
)  # fmt: skip
COUNTING_SORT = Op(
    "counting_sort(Tensor buckets, int num_buckets, Tensor? count) -> (Tensor, Tensor)",
    reference=counting_sort_reference, cpu="numba_bucketize:counting_sort",
    triton="triton_bucketize:counting_sort",
    check=_check_buckets, check_memory=_check_inside, fake=_fake_sort,
)  # fmt: skip
