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
    owners = owner_of(first_valid(keys, count), world_size)
    permutation = sorted(range(owners.numel()), key=owners.tolist().__getitem__)  # stable
    permutation += range(owners.numel(), keys.numel())
    counts = torch.bincount(owners, minlength=world_size)
    return torch.tensor(permutation, dtype=torch.int64, device=keys.device), counts
