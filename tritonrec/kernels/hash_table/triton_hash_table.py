# mypy: ignore-errors
"""Grouped probing on an accelerator: find, number the missing keys by a prefix sum, then claim their slots.

The missing keys are distinct, and their rows are known before any slot is touched. So a claim is one
compare-and-swap of a row over -1; no key is compared, no lane waits for another, and rows do not depend on
who wins which slot. The key is written after the claim and read only by later kernels.
"""

import torch
import triton
import triton.language as tl

from tritonrec.kernels.murmur.triton_murmur import mix64

BLOCK = 128


@triton.jit
def _find_kernel(slot_keys_ptr, slot_rows_ptr, keys_ptr, rows_ptr, num_keys, num_groups, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_keys
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    hashed = mix64(key)
    group = hashed & (num_groups - 1)
    step = ((hashed >> 32) | 1) & (num_groups - 1)
    lanes = tl.arange(0, 8)
    found = tl.full((BLOCK,), -1, tl.int32)
    pending = inside
    visit = tl.full((), 0, tl.int64)
    while (tl.max(pending.to(tl.int32), axis=0) > 0) & (visit < num_groups):
        slots = group[:, None] * 8 + lanes[None, :]
        slot_row = tl.load(slot_rows_ptr + slots, mask=pending[:, None], other=-1)
        slot_key = tl.load(slot_keys_ptr + slots, mask=pending[:, None], other=0)
        # at most one occupied slot holds the key, and an empty slot's row is -1 whatever its key says
        match = tl.max(tl.where(slot_key == key[:, None], slot_row, -1), axis=1)
        lowest = tl.min(slot_row, axis=1)
        found = tl.where(pending, match, found)
        pending = pending & (match < 0) & (lowest >= 0)
        group = (group + step) & (num_groups - 1)
        visit += 1
    tl.store(rows_ptr + offsets, found.to(tl.int64), mask=inside)


@triton.jit
def _claim_kernel(
    slot_keys_ptr, slot_rows_ptr, keys_ptr, rows_ptr, wanted_ptr, num_keys, num_groups, BLOCK: tl.constexpr
):
    """Give every wanted key the first free slot on its path; the table has room for all of them."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_keys
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    row = tl.load(rows_ptr + offsets, mask=inside, other=0).to(tl.int32)
    hashed = mix64(key)
    group = hashed & (num_groups - 1)
    step = ((hashed >> 32) | 1) & (num_groups - 1)
    lanes = tl.arange(0, 8)
    lane = tl.full((BLOCK,), 0, tl.int32)
    pending = tl.load(wanted_ptr + offsets, mask=inside, other=0).to(tl.int1)
    visit = tl.full((), 0, tl.int64)
    # a visit passes a slot or leaves a group, and no group is left twice before all have been seen
    while (tl.max(pending.to(tl.int32), axis=0) > 0) & (visit < num_groups * 9):
        slots = group[:, None] * 8 + lanes[None, :]
        slot_row = tl.load(slot_rows_ptr + slots, mask=pending[:, None], other=0)
        # slots only fill: one that reads as taken is taken, one that reads as free is asked again below
        free = (slot_row < 0) & (lanes[None, :] >= lane[:, None])
        lane = tl.min(tl.where(free, lanes[None, :], 8), axis=1)
        trying = pending & (lane < 8)
        slot = group * 8 + tl.minimum(lane, 7)
        # compare-and-swap takes no mask: no slot holds -2, so an idle lane swaps nothing
        previous = tl.atomic_cas(slot_rows_ptr + slot, tl.where(trying, -1, -2), row, sem="relaxed")
        won = trying & (previous == -1)
        tl.store(slot_keys_ptr + slot, key, mask=won)
        pending = pending & (won == 0)
        leave = lane >= 7
        group = tl.where(leave, (group + step) & (num_groups - 1), group)
        lane = tl.where(leave, 0, lane + 1)
        visit += 1


def hash_find(slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """See `tritonrec.kernels.hash_table.hash_find`."""
    keys = keys.contiguous()
    rows = torch.empty_like(keys)
    if keys.numel():
        grid = (triton.cdiv(keys.numel(), BLOCK),)
        num_groups = slot_keys.numel() // 8
        _find_kernel[grid](slot_keys, slot_rows, keys, rows, keys.numel(), num_groups, BLOCK=BLOCK)
    return rows


def _claim(slot_keys, slot_rows, keys, rows, wanted) -> None:
    if keys.numel():
        grid = (triton.cdiv(keys.numel(), BLOCK),)
        num_groups = slot_keys.numel() // 8
        _claim_kernel[grid](slot_keys, slot_rows, keys, rows, wanted, keys.numel(), num_groups, BLOCK=BLOCK)


def hash_insert(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, next_row: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See `tritonrec.kernels.hash_table.hash_insert`; None where the table is too small."""
    keys = keys.contiguous()
    found = hash_find(slot_keys, slot_rows, keys)
    inserted = found < 0
    if int((slot_rows >= 0).sum() + inserted.sum()) > slot_rows.numel():
        return None
    rows = torch.where(inserted, next_row - 1 + torch.cumsum(inserted, 0), found)
    _claim(slot_keys, slot_rows, keys, rows, inserted)
    return rows, inserted


def hash_grow(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, new_keys: torch.Tensor, new_rows: torch.Tensor
) -> None:
    """Claim a slot for every occupied slot of the old table; `new_rows` are all -1."""
    _claim(new_keys, new_rows, slot_keys, slot_rows, slot_rows >= 0)
