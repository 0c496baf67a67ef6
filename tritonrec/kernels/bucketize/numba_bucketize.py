# mypy: ignore-errors
"""Key routing: owners in a loop that vectorises, then a stable counting sort by owner."""

import numpy as np
import torch

from tritonrec.kernels.murmur.numba_murmur import mix64
from tritonrec.kernels.padding import first_valid

from ..caches import njit

_HALF = np.uint64(32)


def owner_of(keys: torch.Tensor, world_size: int) -> torch.Tensor:
    """See `tritonrec.ops.owner_of`."""
    owners = torch.empty(keys.numel(), dtype=torch.int64, device="cpu")
    _owners(keys.contiguous().numpy().view("uint64"), world_size, owners.numpy())
    return owners


def bucketize(keys, world_size, count) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.ops.bucketize`."""
    owners = owner_of(first_valid(keys, count), world_size)
    return _sorted(owners, world_size, keys.numel())


def counting_sort(buckets, num_buckets, count) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.ops.counting_sort`."""
    return _sorted(first_valid(buckets, count).contiguous(), num_buckets, buckets.numel())


def _sorted(buckets, num_buckets, size):
    """The sort of the first of `size` positions, which have a bucket; the others stay where they are."""
    counts = torch.empty(num_buckets, dtype=torch.int64, device="cpu")
    permutation = torch.empty(size, dtype=torch.int64, device="cpu")
    _sort(buckets.numpy(), counts.numpy(), permutation.numpy())
    return permutation, counts


@njit(cache=True, nogil=True)
def _owners(keys, world_size, owners):
    """``owners[i]`` = the rank that owns ``keys[i]``; the product of two 32-bit numbers cannot wrap."""
    world = np.uint64(world_size)
    for i in range(len(keys)):
        owners[i] = np.int64(((mix64(keys[i]) >> _HALF) * world) >> _HALF)


@njit(cache=True, nogil=True)
def _sort(buckets, counts, permutation):
    """Stable counting sort of the positions by bucket; positions without a bucket stay where they are."""
    counts[:] = 0
    for i in range(len(buckets)):
        counts[buckets[i]] += 1
    # cursor[b] = where the next position of bucket b goes: the sum of the counts before it, at first.
    cursor = np.empty(len(counts), np.int64)
    total = 0
    for bucket in range(len(counts)):
        cursor[bucket] = total
        total += counts[bucket]
    for i in range(len(buckets)):
        bucket = buckets[i]
        permutation[cursor[bucket]] = i
        cursor[bucket] += 1
    for i in range(len(buckets), len(permutation)):
        permutation[i] = i
