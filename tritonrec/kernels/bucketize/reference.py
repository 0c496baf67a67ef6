"""Key routing as loops over Python integers."""

from __future__ import annotations

import torch

from tritonrec.kernels.murmur.reference import mix64
from tritonrec.kernels.padding import first_valid


def owner_of(keys: torch.Tensor, world_size: int) -> torch.Tensor:
    """See `tritonrec.kernels.bucketize.owner_of`."""
    owners = [((mix64(key) >> 32) * world_size) >> 32 for key in keys.tolist()]
    return torch.tensor(owners, dtype=torch.int64, device=keys.device)


def bucketize(
    keys: torch.Tensor, world_size: int, count: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.bucketize.bucketize`."""
    return counting_sort(owner_of(keys, world_size), world_size, count)


def counting_sort(
    buckets: torch.Tensor, num_buckets: int, count: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.bucketize.counting_sort`."""
    valid = first_valid(buckets, count)
    permutation = sorted(range(valid.numel()), key=valid.tolist().__getitem__)  # stable
    permutation += range(valid.numel(), buckets.numel())
    counts = torch.bincount(valid, minlength=num_buckets)
    return torch.tensor(permutation, dtype=torch.int64, device=buckets.device), counts
