"""Key routing as loops over Python integers."""

import torch

from tritonrec.kernels.murmur.reference import mix64


def owner_of(keys: torch.Tensor, world_size: int) -> torch.Tensor:
    """See `tritonrec.kernels.bucketize.owner_of`."""
    owners = [((mix64(key) >> 32) * world_size) >> 32 for key in keys.tolist()]
    return torch.tensor(owners, dtype=torch.int64, device=keys.device)


def bucketize(keys: torch.Tensor, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.bucketize.bucketize`."""
    owners = owner_of(keys, world_size)
    permutation = sorted(range(keys.numel()), key=owners.tolist().__getitem__)  # stable
    counts = torch.bincount(owners, minlength=world_size)
    return torch.tensor(permutation, dtype=torch.int64, device=keys.device), counts
