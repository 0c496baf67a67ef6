# mypy: ignore-errors
"""Common keys of two buffers: a scratch table over the right one, probed by the left one; a prefix sum.

`unique` leaves such a table where it is wanted, and then none is built.
"""

import torch
import triton
import triton.language as tl

from tritonrec.kernels import triton_scratch
from tritonrec.kernels.triton_jit import jit_kernel

BLOCK, NUM_WARPS = 256, 4


@jit_kernel
def _list_kernel(
    matched_ptr, rank_ptr, left_ptr, right_ptr, num_common_ptr, num_keys, length, BLOCK: tl.constexpr
):
    """Match n goes to place n, -1 behind the last; ranks count from 1, and the last is their number."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # -1 is no position, so lanes behind the end list nothing
    matched = tl.load(matched_ptr + offsets, mask=offsets < num_keys, other=-1)
    place = tl.load(rank_ptr + offsets, mask=offsets < num_keys, other=0) - 1
    # only keys that are not distinct, against the contract, can make more matches than there is room for
    listed = (matched >= 0) & (place < length)
    tl.store(left_ptr + place, offsets, mask=listed)
    tl.store(right_ptr + place, matched, mask=listed)
    num_common = tl.minimum(tl.load(rank_ptr + num_keys - 1), length)
    behind = (offsets >= num_common) & (offsets < length)
    tl.store(left_ptr + offsets, tl.full((BLOCK,), -1, tl.int64), mask=behind)
    tl.store(right_ptr + offsets, tl.full((BLOCK,), -1, tl.int64), mask=behind)
    tl.store(num_common_ptr + offsets * 0, tl.zeros((BLOCK,), tl.int64) + num_common, mask=offsets == 0)


def intersect(left, right, left_count, right_count, table, padded) -> tuple[torch.Tensor, ...]:
    """See `tritonrec.ops.intersect`; the length is read back only if not `padded`."""
    if left.numel() == 0 or right.numel() == 0:
        nothing = left.new_empty(0), left.new_empty(0)
        return (*nothing, left.new_zeros(())) if padded else nothing
    left, right = left.contiguous(), right.contiguous()
    if table is None or table.numel() == 0:
        table, _ = triton_scratch.build(right, right_count)
    matched = triton_scratch.lookup(left, right, table.contiguous(), left_count)
    # the running count is each match's place, without an atomic: left positions come out ascending
    rank = torch.cumsum(matched >= 0, 0)
    length = min(left.numel(), right.numel())
    found = left.new_empty(length), left.new_empty(length), left.new_empty(())
    grid, config = (triton.cdiv(left.numel(), BLOCK),), {"BLOCK": BLOCK, "num_warps": NUM_WARPS}
    _list_kernel[grid](matched, rank, *found, left.numel(), length, **config)
    if padded:
        return found
    common = int(found[2])
    return found[0][:common].clone(), found[1][:common].clone()
