# mypy: ignore-errors
"""Dedup without sorting: equal keys meet in a slot, the smallest position wins, ranks are a prefix sum.

The minimum over a slot's positions (`kernels.triton_scratch`) and the counts are integers, so no order of
atomics shows in the result.
"""

import torch
import triton
import triton.language as tl

from tritonrec.kernels import triton_scratch
from tritonrec.kernels.triton_jit import jit_kernel
from tritonrec.kernels.triton_padding import num_valid
from tritonrec.kernels.unique.op import pad_unique

BLOCK, NUM_WARPS = 256, 4


@jit_kernel
def _mark_kernel(
    slots_ptr, holders_ptr, representative_ptr, is_first_ptr, unique_ptr, counts_ptr, num_keys, count_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first position of each key, -1 in the padding, and 1 at those positions. Zeros what comes next."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_valid(num_keys, count_ptr)
    slot = tl.load(slots_ptr + offsets, mask=inside, other=0)
    representative = tl.load(holders_ptr + slot, mask=inside, other=-1)
    tl.store(representative_ptr + offsets, representative, mask=offsets < num_keys)
    tl.store(is_first_ptr + offsets, (representative == offsets).to(tl.int32), mask=offsets < num_keys)
    # here, since a launch for each would cost more
    tl.store(unique_ptr + offsets, tl.zeros((BLOCK,), tl.int64), mask=offsets < num_keys)
    tl.store(counts_ptr + offsets, tl.zeros((BLOCK,), tl.int32), mask=offsets < num_keys)


@jit_kernel
def _emit_kernel(
    keys_ptr, representative_ptr, rank_ptr, slots_ptr, unique_ptr, inverse_ptr, counts_ptr, table_ptr,
    num_unique_ptr, num_keys, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ranks of first positions number the distinct keys; every key adds 1 to its count.

    The table of positions becomes, where one is given, the table of ranks. The last rank is their number.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    representative = tl.load(representative_ptr + offsets, mask=offsets < num_keys, other=-1).to(tl.int64)
    # behind the count representative is -1: the load gives 0, so rank and inverse are -1
    inside = representative >= 0
    rank = tl.load(rank_ptr + representative, mask=inside, other=0) - 1
    is_first = inside & (representative == offsets)
    key = tl.load(keys_ptr + offsets, mask=is_first, other=0)
    tl.store(inverse_ptr + offsets, rank.to(tl.int64), mask=offsets < num_keys)
    tl.store(unique_ptr + rank, key, mask=is_first)
    if table_ptr is not None:
        slot = tl.load(slots_ptr + offsets, mask=is_first, other=0)
        tl.store(table_ptr + slot, rank, mask=is_first)
    # relaxed: integer counts have one sum in any order, and nobody reads them before the end
    tl.atomic_add(counts_ptr + rank, tl.full((BLOCK,), 1, tl.int32), mask=inside, sem="relaxed")
    last = tl.load(rank_ptr + offsets, mask=offsets == num_keys - 1, other=0)
    tl.store(num_unique_ptr + offsets * 0, last.to(tl.int64), mask=offsets == num_keys - 1)


def unique(keys, count, padded, table=False) -> tuple[torch.Tensor, ...]:
    """See `tritonrec.ops.unique`; the length of the result is read back only if not `padded`."""
    size = keys.numel()
    if size == 0:
        found = tuple(keys.new_empty(0) for _ in range(3))
        return pad_unique(*found, 0, padded, table)
    keys = keys.contiguous()
    holders, slots = triton_scratch.build(keys, count)
    order, inverse, num_unique = torch.empty_like(keys), torch.empty_like(keys), keys.new_empty(())
    # int32 halves their traffic: fewer than 2**31 keys
    representative, is_first, counts = (
        torch.empty(size, dtype=torch.int32, device=keys.device) for _ in range(3)
    )
    grid, config = (triton.cdiv(size, BLOCK),), {"BLOCK": BLOCK, "num_warps": NUM_WARPS}
    _mark_kernel[grid](slots, holders, representative, is_first, order, counts, size, count, **config)
    # ranks count from 1 at the first key, and their last one is the number of distinct keys
    rank = torch.cumsum(is_first, 0, dtype=torch.int32)
    places = order, inverse, counts, holders if table else None, num_unique
    _emit_kernel[grid](keys, representative, rank, slots, *places, size, **config)
    if not padded:
        length = int(num_unique)
        return order[:length].clone(), inverse, counts[:length].to(torch.int64)
    found = order, inverse, counts.to(torch.int64), num_unique
    return (*found, holders) if table else found
