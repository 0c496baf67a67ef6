# mypy: ignore-errors
"""Common keys of two buffers: a scratch table over the right one, probed by the left one; a prefix sum.

`unique` leaves such a table where it is wanted, and then none is built.
"""

import torch
import triton
import triton.language as tl

from tritonrec.kernels import triton_scratch

BLOCK, NUM_WARPS = 256, 4


@triton.jit
def _list_kernel(matched_ptr, rank_ptr, left_ptr, right_ptr, num_keys, length, BLOCK: tl.constexpr):
    """The n-th match goes to place n; ranks count from 1."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # -1 is no position, so lanes behind the end list nothing
    matched = tl.load(matched_ptr + offsets, mask=offsets < num_keys, other=-1)
    place = tl.load(rank_ptr + offsets, mask=offsets < num_keys, other=0) - 1
    # only keys that are not distinct, against the contract, can make more matches than there is room for
    listed = (matched >= 0) & (place < length)
    tl.store(left_ptr + place, offsets, mask=listed)
    tl.store(right_ptr + place, matched, mask=listed)


def intersect(
    left: torch.Tensor,
    right: torch.Tensor,
    left_count: torch.Tensor | None,
    right_count: torch.Tensor | None,
    table: torch.Tensor | None,
    padded: bool,
) -> tuple[torch.Tensor, ...]:
    """See `tritonrec.kernels.intersect.intersect`; the length is read back only if not `padded`."""
    if left.numel() == 0 or right.numel() == 0:
        nothing = left.new_empty(0), left.new_empty(0)
        return (*nothing, left.new_zeros(())) if padded else nothing
    left, right = left.contiguous(), right.contiguous()
    if table is None or table.numel() == 0:
        table, _ = triton_scratch.build(right, right_count)
    matched = triton_scratch.lookup(left, right, table.contiguous(), left_count)
    # the running count is each match's place, without an atomic: left positions come out ascending
    rank = torch.cumsum(matched >= 0, 0)
    num_common = rank[-1].clone()
    length = min(left.numel(), right.numel()) if padded else int(num_common)
    left_positions, right_positions = (left.new_full((length,), -1) for _ in range(2))
    grid, config = (triton.cdiv(left.numel(), BLOCK),), {"BLOCK": BLOCK, "num_warps": NUM_WARPS}
    _list_kernel[grid](matched, rank, left_positions, right_positions, left.numel(), length, **config)
    found = left_positions, right_positions
    return (*found, num_common.clamp(max=length)) if padded else found
