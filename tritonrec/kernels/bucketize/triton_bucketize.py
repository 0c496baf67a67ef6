# mypy: ignore-errors
"""Key routing: a stable counting sort in two passes over blocks, with no atomics."""

import torch
import triton
import triton.language as tl

from tritonrec.kernels.murmur.triton_murmur import mix64
from tritonrec.kernels.triton_padding import num_valid

# A block adds world_size counts to the scan between the passes; a large block keeps the scan short.
BLOCK, NUM_WARPS = 1024, 4


@triton.jit
def _owner(key, world_size):
    # >> on int64 carries the sign, which the mask takes off again; the product of two numbers below 2**32 and
    # 2**31 stays inside int64
    return (((mix64(key) >> 32) & 0xFFFFFFFF) * world_size) >> 32


@triton.jit
def _owner_kernel(keys_ptr, owners_ptr, num_keys, world_size, BLOCK: tl.constexpr):
    # int64 before the product: the positions of 2**31 keys and more do not fit into int32
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_keys
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    tl.store(owners_ptr + offsets, _owner(key, world_size), mask=inside)


@triton.jit
def _count_kernel(keys_ptr, histogram_ptr, num_keys, count_ptr, world_size, num_blocks, BLOCK: tl.constexpr):
    """``histogram[rank, block]`` = the keys of this block that `rank` owns."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_valid(num_keys, count_ptr)
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    # -1 is no rank's number, so keys behind the count are counted nowhere
    owner = tl.where(inside, _owner(key, world_size), -1)
    for rank in range(world_size):
        count = tl.sum((owner == rank).to(tl.int64), axis=0)
        tl.store(histogram_ptr + rank * num_blocks + block, count)


@triton.jit
def _place_kernel(
    keys_ptr, starts_ptr, permutation_ptr, num_keys, count_ptr, world_size, num_blocks, BLOCK: tl.constexpr
):
    """Positions go to the start of their (rank, block) cell plus their rank inside the block.

    Those behind the count stay where they are, so the result is a permutation of all positions.
    """
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_valid(num_keys, count_ptr)
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    owner = tl.where(inside, _owner(key, world_size), -1)
    for rank in range(world_size):
        mine = owner == rank
        start = tl.load(starts_ptr + rank * num_blocks + block)
        # the running count of this rank's keys, so equal owners keep their order
        place = start + tl.cumsum(mine.to(tl.int64), axis=0) - 1
        tl.store(permutation_ptr + place, offsets, mask=mine)
    # owner is -1 behind the count and behind the buffer; the comparison leaves out the latter
    tl.store(permutation_ptr + offsets, offsets, mask=(offsets < num_keys) & (owner == -1))


def owner_of(keys: torch.Tensor, world_size: int) -> torch.Tensor:
    """See `tritonrec.kernels.bucketize.owner_of`."""
    keys = keys.contiguous()
    owners = torch.empty_like(keys)
    if keys.numel():
        grid = (triton.cdiv(keys.numel(), BLOCK),)
        _owner_kernel[grid](keys, owners, keys.numel(), world_size, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return owners


def bucketize(
    keys: torch.Tensor, world_size: int, count: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.bucketize.bucketize`."""
    keys = keys.contiguous()
    if keys.numel() == 0:
        return keys.new_empty(0), keys.new_zeros(world_size)
    num_blocks = triton.cdiv(keys.numel(), BLOCK)
    histogram = keys.new_empty((world_size, num_blocks))
    permutation = torch.empty_like(keys)
    grid, config = (num_blocks,), {"BLOCK": BLOCK, "num_warps": NUM_WARPS}
    _count_kernel[grid](keys, histogram, keys.numel(), count, world_size, num_blocks, **config)
    # rank by rank, block by block: the order of a stable sort
    starts = torch.cumsum(histogram.flatten(), 0) - histogram.flatten()
    _place_kernel[grid](keys, starts, permutation, keys.numel(), count, world_size, num_blocks, **config)
    return permutation, histogram.sum(1)
