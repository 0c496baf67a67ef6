# mypy: ignore-errors
"""Key routing: owners in a loop that vectorises, then a stable counting sort by owner."""

import numpy as np

from tritonrec.kernels.murmur.numba_murmur import mix64

from ..caches import njit

_HALF = np.uint64(32)


@njit(cache=True, nogil=True)
def owner_of(keys, world_size, owners):
    """``owners[i]`` = the rank that owns ``keys[i]``; the product of two 32-bit numbers cannot wrap."""
    world = np.uint64(world_size)
    for i in range(len(keys)):
        owners[i] = np.int64(((mix64(keys[i]) >> _HALF) * world) >> _HALF)


@njit(cache=True, nogil=True)
def bucketize(owners, counts, permutation):
    """Stable counting sort of the positions by owner."""
    counts[:] = 0
    for i in range(len(owners)):
        counts[owners[i]] += 1
    cursor = np.empty(len(counts), np.int64)
    total = 0
    for rank in range(len(counts)):
        cursor[rank] = total
        total += counts[rank]
    for i in range(len(owners)):
        owner = owners[i]
        permutation[cursor[owner]] = i
        cursor[owner] += 1
