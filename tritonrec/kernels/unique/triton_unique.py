# mypy: ignore-errors
"""Dedup without sorting: equal keys meet in a slot, the smallest position wins, ranks are a prefix sum.

The minimum over a slot's positions and the counts are integers, so no order of atomics shows in the result.
"""

import torch
import triton
import triton.language as tl

from tritonrec.kernels import triton_scratch, tuned


@triton.jit
def _first_kernel(slots_ptr, first_ptr, num_keys, BLOCK: tl.constexpr):
    """``first[s]`` = the smallest position whose key lives in slot s."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_keys
    slot = tl.load(slots_ptr + offsets, mask=inside, other=0)
    position = offsets.to(tl.int32)
    # the value only falls, so a hot key's later occurrences can skip the atomic on what they read
    current = tl.load(first_ptr + slot, mask=inside, other=0)
    tl.atomic_min(first_ptr + slot, position, mask=inside & (position < current), sem="relaxed")


@triton.jit
def _emit_kernel(
    keys_ptr, representative_ptr, rank_ptr, unique_ptr, inverse_ptr, counts_ptr, num_keys, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_keys
    representative = tl.load(representative_ptr + offsets, mask=inside, other=0).to(tl.int64)
    rank = tl.load(rank_ptr + representative, mask=inside, other=1) - 1
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    tl.store(inverse_ptr + offsets, rank, mask=inside)
    tl.store(unique_ptr + rank, key, mask=inside & (representative == offsets))
    tl.atomic_add(counts_ptr + rank, tl.full((BLOCK,), 1, tl.int32), mask=inside, sem="relaxed")


def unique(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.unique.unique`."""
    count = keys.numel()
    if count == 0:
        return keys.new_empty(0), keys.new_empty(0), keys.new_empty(0)
    keys = keys.contiguous()
    holders, slots = triton_scratch.build(keys)
    first = torch.full_like(holders, count)
    config = tuned.config("unique", "any", keys.device)
    grid = (triton.cdiv(count, config["BLOCK"]),)
    _first_kernel[grid](slots, first, count, **config)
    representative = first[slots]
    # ranks count from 1 at the first key, and their last one is the number of distinct keys
    rank = torch.cumsum(representative == torch.arange(count, device=keys.device), 0)
    distinct = int(rank[-1])
    order, inverse = keys.new_empty(distinct), torch.empty_like(keys)
    counts = torch.zeros(distinct, dtype=torch.int32, device=keys.device)
    _emit_kernel[grid](keys, representative, rank, order, inverse, counts, count, **config)
    return order, inverse, counts.to(torch.int64)
