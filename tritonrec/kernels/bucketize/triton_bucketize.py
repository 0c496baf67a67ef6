# mypy: ignore-errors
"""Key routing: a stable counting sort in two passes over blocks, with no atomics."""

import torch
import triton
import triton.language as tl

from tritonrec.kernels.murmur.triton_murmur import mix64
from tritonrec.kernels.padding import padding
from tritonrec.kernels.triton_jit import jit_kernel
from tritonrec.kernels.triton_padding import num_valid

# A block adds a count for each bucket to the scan between the passes; a large block keeps the scan short.
BLOCK, NUM_WARPS = 1024, 4
MOST_BUCKETS = 64
"""A program goes over all buckets; beyond this many, `counting_sort` takes `torch.sort`."""


@triton.jit
def _owner(key, world_size):
    # >> on int64 carries the sign, which the mask takes off again; the product of two numbers below 2**32 and
    # 2**31 stays inside int64
    return (((mix64(key) >> 32) & 0xFFFFFFFF) * world_size) >> 32


@jit_kernel
def _owner_kernel(keys_ptr, owners_ptr, num_keys, world_size, BLOCK: tl.constexpr):
    # int64 before the product: the positions of 2**31 keys and more do not fit into int32
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_keys
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    tl.store(owners_ptr + offsets, _owner(key, world_size), mask=inside)


@triton.jit
def _bucket(keys_ptr, offsets, num_keys, count_ptr, num_buckets, GIVEN: tl.constexpr):
    """Which keys lie before the count, and their buckets: owners, or with GIVEN the numbers themselves.

    Behind the count a bucket is -1. That is none, nor is a number outside: such a key is placed nowhere.
    """
    inside = offsets < num_valid(num_keys, count_ptr)
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    return inside, tl.where(inside, key if GIVEN else _owner(key, num_buckets), -1)


@jit_kernel
def _count_kernel(
    keys_ptr, histogram_ptr, num_keys, count_ptr, num_buckets, num_blocks,
    GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``histogram[bucket, block]`` = the keys of this block in `bucket`."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    _, found = _bucket(keys_ptr, offsets, num_keys, count_ptr, num_buckets, GIVEN)
    for bucket in range(num_buckets):
        count = tl.sum((found == bucket).to(tl.int64), axis=0)
        tl.store(histogram_ptr + tl.cast(bucket, tl.int64) * num_blocks + block, count)


@jit_kernel
def _place_kernel(
    keys_ptr, starts_ptr, permutation_ptr, num_keys, count_ptr, num_buckets, num_blocks,
    GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Positions go to the start of their (bucket, block) cell plus their rank inside the block.

    Those behind the count stay where they are, so the result is a permutation of all positions.
    """
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside, found = _bucket(keys_ptr, offsets, num_keys, count_ptr, num_buckets, GIVEN)
    for bucket in range(num_buckets):
        mine = found == bucket
        start = tl.load(starts_ptr + tl.cast(bucket, tl.int64) * num_blocks + block)
        # the running count of this bucket's keys, so equal buckets keep their order
        place = start + tl.cumsum(mine.to(tl.int64), axis=0) - 1
        tl.store(permutation_ptr + place, offsets, mask=mine)
    tl.store(permutation_ptr + offsets, offsets, mask=(offsets < num_keys) & ~inside)


def owner_of(keys: torch.Tensor, world_size: int) -> torch.Tensor:
    """See `tritonrec.ops.owner_of`."""
    keys = keys.contiguous()
    owners = torch.empty_like(keys)
    if keys.numel():
        grid = (triton.cdiv(keys.numel(), BLOCK),)
        _owner_kernel[grid](keys, owners, keys.numel(), world_size, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return owners


def bucketize(keys, world_size, count) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.ops.bucketize`."""
    return _sort(keys, world_size, count, GIVEN=False)


def counting_sort(buckets, num_buckets, count) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.ops.counting_sort`."""
    if num_buckets <= MOST_BUCKETS:
        return _sort(buckets, num_buckets, count, GIVEN=True)
    # what has no bucket comes last and is counted behind the others, so nothing is written outside
    nowhere = (buckets < 0) | (buckets >= num_buckets)
    if count is not None:
        nowhere |= padding(buckets.numel(), count)
    found = torch.where(nowhere, num_buckets, buckets)
    counts = buckets.new_zeros(num_buckets + 1).scatter_add_(0, found, torch.ones_like(found))
    return torch.sort(found, stable=True).indices, counts[:-1]


def _sort(keys, num_buckets, count, GIVEN) -> tuple[torch.Tensor, torch.Tensor]:
    keys = keys.contiguous()
    if keys.numel() == 0:
        return keys.new_empty(0), keys.new_zeros(num_buckets)
    num_blocks = triton.cdiv(keys.numel(), BLOCK)
    histogram = keys.new_empty((num_buckets, num_blocks))
    permutation = torch.empty_like(keys)
    grid, config = (num_blocks,), {"GIVEN": GIVEN, "BLOCK": BLOCK, "num_warps": NUM_WARPS}
    _count_kernel[grid](keys, histogram, keys.numel(), count, num_buckets, num_blocks, **config)
    # bucket by bucket, block by block: the order of a stable sort
    starts = torch.cumsum(histogram.flatten(), 0) - histogram.flatten()
    _place_kernel[grid](keys, starts, permutation, keys.numel(), count, num_buckets, num_blocks, **config)
    return permutation, histogram.sum(1)
