"""Key routing: `owner_of` names the rank that owns a key, `bucketize` groups keys by owner.

`counting_sort` groups by buckets that are known: ``bucketize(keys, n)`` is
``counting_sort(owner_of(keys, n), n)`` in one pass over the keys.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.bucketize.register import BUCKETIZE, COUNTING_SORT, OWNER_OF
from tritonrec.kernels.dispatch import Impl


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
