# mypy: ignore-errors
"""Grouped probing on an accelerator: find, number the missing keys by a prefix sum, then claim their slots.

The missing keys are distinct, and their rows are known before any slot is touched. So a claim is one
compare-and-swap of a row over -1 or -2; no key is compared, no lane waits for another, and rows do not
depend on who wins which slot. The key is written after the claim and read only by later kernels.
"""

import torch
import triton
import triton.language as tl

from tritonrec.kernels.hash_table.errors import report_refused
from tritonrec.kernels.murmur.triton_murmur import mix64
from tritonrec.kernels.races import declared
from tritonrec.kernels.triton_jit import jit_kernel
from tritonrec.kernels.triton_padding import num_valid

# A lane loads a group of 8 slots, so 128 keys make tiles of 1,024 elements.
BLOCK, NUM_WARPS = 128, 4


# a row that another program assigns or frees is no row of this program's keys
@declared(races=("slot_rows_ptr",))
@jit_kernel
def _find_kernel(
    slot_keys_ptr, slot_rows_ptr, keys_ptr, rows_ptr, missing_ptr, num_keys, count_ptr,
    num_groups, ERASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The row of every key, -1 behind the count; then its slot may be freed.

    With `missing`, the keys before the count that have none are noted there.

    Erasing keys side by side does not depend on the schedule: a group with an empty slot keeps it, and one
    without gets only tombstones. No search is misled meanwhile, since paths stay as they are.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_valid(num_keys, count_ptr)
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    hashed = mix64(key)
    group = hashed & (num_groups - 1)
    # An odd step has no factor in common with a power of two, so a path meets every group.
    # The home has the low half of the hash and the step the high half: keys of one home part ways.
    # The mask takes off the sign that the arithmetic shift has spread.
    step = ((hashed >> 32) | 1) & (num_groups - 1)
    lanes = tl.arange(0, 8)
    found = tl.full((BLOCK,), -1, tl.int32)
    pending = inside
    visit = tl.full((), 0, tl.int64)
    # the bound ends a search in a table without an empty slot
    while (tl.max(pending.to(tl.int32), axis=0) > 0) & (visit < num_groups):
        # A tile of (keys, 8 slots): each key looks at its group, 64 bytes of keys, in one visit.
        slots = group[:, None] * 8 + lanes[None, :]
        slot_row = tl.load(slot_rows_ptr + slots, mask=pending[:, None], other=-1)
        slot_key = tl.load(slot_keys_ptr + slots, mask=pending[:, None], other=0)
        # at most one occupied slot holds the key, and a free slot's row is negative whatever its key says
        holds = (slot_key == key[:, None]) & (slot_row >= 0)
        match = tl.max(tl.where(holds, slot_row, -1), axis=1)
        ends_here = tl.max((slot_row == -1).to(tl.int32), axis=1) > 0
        # A key is done where it is found, or where its group has an empty slot: it would have been put there.
        hit = pending & (match >= 0)
        found = tl.where(hit, match, found)
        if ERASE:
            slot = group * 8 + tl.max(tl.where(holds, lanes[None, :], 0), axis=1)
            # Empty where searches end at this group anyhow; else a tombstone, over which they go on.
            tl.store(slot_rows_ptr + slot, tl.where(ends_here, -1, -2), mask=hit)
        pending = pending & (match < 0) & (ends_here == 0)
        group = (group + step) & (num_groups - 1)
        visit += 1
    tl.store(rows_ptr + offsets, found.to(tl.int64), mask=offsets < num_keys)
    if missing_ptr is not None:
        tl.store(missing_ptr + offsets, inside & (found < 0), mask=offsets < num_keys)


@jit_kernel
def _number_kernel(
    rows_ptr, wanted_ptr, numbers_ptr, free_rows_ptr, next_row_ptr, occupied_ptr, outcome_ptr, first_row,
    num_free, num_keys, num_slots, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows for the wanted keys by their numbers, the sums of `wanted`: the free rows first, then new ones.

    All are wanted, or none, where they do not fit: into the slots, or into int32 as rows. `outcome` is (rows
    taken behind the free ones, keys that do not fit, keys that are inserted).
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_keys
    # The last running sum: how many are wanted. Every program loads
    # it and decides alike, so all keys get rows or none does.
    new = tl.load(numbers_ptr + num_keys - 1).to(tl.int64)
    taken = tl.maximum(new - num_free, 0)
    if next_row_ptr is not None:
        start = tl.load(next_row_ptr)
    else:
        start = tl.cast(first_row, tl.int64)
    # a slot holds its row as int32, so rows end at 2**31
    fits = (tl.load(occupied_ptr) + new <= num_slots) & (taken + start <= 1 << 31)
    number = tl.load(numbers_ptr + offsets, mask=inside, other=1).to(tl.int64)
    # numbers count from 1, and the first of them take the free rows
    row = number + start - num_free - 1
    # a block, since the interpreter takes a block and a scalar bool for integers
    all_fit = number * 0 < fits.to(tl.int64)
    wanted = (tl.load(wanted_ptr + offsets, mask=inside, other=0) != 0) & all_fit
    if free_rows_ptr is not None:
        reuses = wanted & (number <= num_free)
        row = tl.where(reuses, tl.load(free_rows_ptr + number - 1, mask=reuses, other=0).to(tl.int64), row)
    found = tl.load(rows_ptr + offsets, mask=inside, other=0)
    tl.store(rows_ptr + offsets, tl.where(wanted, row, found), mask=inside)
    tl.store(wanted_ptr + offsets, wanted, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(outcome_ptr, tl.where(fits, taken, 0))
        tl.store(outcome_ptr + 1, tl.where(fits, 0, new))
        tl.store(outcome_ptr + 2, tl.where(fits, new, 0))


# the slot of a key depends on who claims first, its row does not
@declared(races=("slot_rows_ptr",), varies=("slot_keys_ptr", "slot_rows_ptr"))
@jit_kernel
def _claim_kernel(
    slot_keys_ptr, slot_rows_ptr, keys_ptr, rows_ptr, wanted_ptr, outcome_ptr, next_row_ptr, used_ptr,
    status_ptr, num_keys, num_groups, BLOCK: tl.constexpr,
):  # fmt: skip
    """Give every wanted key the first free slot on its path; the table has room for all of them.

    With an `outcome` of `_number_kernel` the counters are moved on that are given.
    """
    if outcome_ptr is not None:  # noqa: SIM102 (known when Triton compiles, and the other one is not)
        if tl.program_id(0) == 0:
            taken, refused = tl.load(outcome_ptr), tl.load(outcome_ptr + 1)
            inserted = tl.load(outcome_ptr + 2)
            next_row = taken if next_row_ptr is None else tl.load(next_row_ptr) + taken
            used = inserted if used_ptr is None else tl.load(used_ptr) + inserted
            status = refused if status_ptr is None else tl.load(status_ptr)
            # every thread loads the counters, and none may load one that another has changed
            tl.debug_barrier()
            if next_row_ptr is not None:
                tl.store(next_row_ptr, next_row)
            if used_ptr is not None:
                tl.store(used_ptr, used)
            if status_ptr is not None:
                tl.store(status_ptr, tl.where(status == 0, refused, status))
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_keys
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    row = tl.load(rows_ptr + offsets, mask=inside, other=0).to(tl.int32)
    hashed = mix64(key)
    group = hashed & (num_groups - 1)
    step = ((hashed >> 32) | 1) & (num_groups - 1)
    lanes = tl.arange(0, 8)
    # `lane`: the first slot of the group that the key has not lost yet.
    lane = tl.full((BLOCK,), 0, tl.int32)
    pending = tl.load(wanted_ptr + offsets, mask=inside, other=0).to(tl.int1)
    visit = tl.full((), 0, tl.int64)
    # a visit passes a slot or leaves a group, and no group is left twice before all have been seen
    visits = tl.full((), 9, tl.int64) * num_groups
    while (tl.max(pending.to(tl.int32), axis=0) > 0) & (visit < visits):
        slots = group[:, None] * 8 + lanes[None, :]
        # idle lanes read 0, the row of a taken slot, so none of their slots is free
        slot_row = tl.load(slot_rows_ptr + slots, mask=pending[:, None], other=0)
        # slots only fill: one that reads as taken is taken, one that reads as free is asked again below
        free = (slot_row < 0) & (lanes[None, :] >= lane[:, None])
        lane = tl.min(tl.where(free, lanes[None, :], 8), axis=1)
        trying = pending & (lane < 8)
        # lane is 8 where nothing is free, and the minimum keeps the address inside the group
        slot = group * 8 + tl.minimum(lane, 7)
        # The row of slot `lane` as loaded, -1 or -2: what the swap expects there.
        seen = tl.max(tl.where(lanes[None, :] == lane[:, None], slot_row, -3), axis=1)
        # compare-and-swap takes no mask: no slot holds -3, so an idle lane swaps nothing
        # relaxed: no program reads another's key in this kernel, so the swap orders no other access
        previous = tl.atomic_cas(slot_rows_ptr + slot, tl.where(trying, seen, -3), row, sem="relaxed")
        won = trying & (previous == seen)
        tl.store(slot_keys_ptr + slot, key, mask=won)
        pending = pending & (won == 0)
        # a lost slot stays taken, so the next attempt begins behind it
        leave = lane >= 7
        group = tl.where(leave, (group + step) & (num_groups - 1), group)
        lane = tl.where(leave, 0, lane + 1)
        visit += 1


def _launch_find(slot_keys, slot_rows, keys, count, erase=False, missing=None):
    keys = keys.contiguous()
    rows = torch.empty_like(keys)
    if keys.numel():
        grid = (triton.cdiv(keys.numel(), BLOCK),)
        num_groups = slot_keys.numel() // 8
        _find_kernel[grid](
            slot_keys, slot_rows, keys, rows, missing, keys.numel(), count, num_groups, ERASE=erase,
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return rows


def hash_find(slot_keys, slot_rows, keys, count) -> torch.Tensor:
    """See `tritonrec.ops.hash_find`."""
    return _launch_find(slot_keys, slot_rows, keys, count)


def hash_erase(slot_keys, slot_rows, keys, count, used) -> torch.Tensor:
    """See `tritonrec.ops.hash_erase`."""
    rows = _launch_find(slot_keys, slot_rows, keys, count, erase=True)
    if used is not None:
        used -= (rows >= 0).sum()
    return rows


def _claim(
    slot_keys, slot_rows, keys, rows, wanted, outcome=None, next_row=None, used=None, status=None
) -> None:
    if keys.numel():
        grid = (triton.cdiv(keys.numel(), BLOCK),)
        num_groups = slot_keys.numel() // 8
        counters = outcome, next_row, used, status
        config = {"BLOCK": BLOCK, "num_warps": NUM_WARPS}
        _claim_kernel[grid](
            slot_keys, slot_rows, keys, rows, wanted, *counters, keys.numel(), num_groups, **config
        )


def hash_insert(
    slot_keys, slot_rows, keys, first_row, free_rows, count, next_row, status, used
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.ops.hash_insert`.

    With `status` nothing is read back: whether the new keys fit is decided on the device, for all or none,
    and keys that do not fit are not wanted.
    """
    keys = keys.contiguous()
    # Three launches: find all keys, number the missing ones,
    # claim slots for them. Nothing is read back in between.
    wanted = torch.empty(keys.shape, dtype=torch.bool, device=keys.device)
    rows = _launch_find(slot_keys, slot_rows, keys, count, missing=wanted)
    if keys.numel() == 0:
        return rows, wanted
    free_rows = None if free_rows is None else free_rows[: keys.numel()].contiguous()
    free = 0 if free_rows is None else free_rows.numel()
    # numbered by a prefix sum before any slot is touched, so rows do not depend on who wins which slot
    numbers = torch.cumsum(wanted, 0, dtype=torch.int32)
    occupied = (slot_rows >= 0).sum() if used is None else used
    outcome = keys.new_empty(3)
    _number_kernel[(triton.cdiv(keys.numel(), BLOCK),)](
        rows, wanted, numbers, free_rows if free else None, next_row, occupied, outcome, first_row, free,
        keys.numel(), slot_rows.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    _claim(slot_keys, slot_rows, keys, rows, wanted, outcome, next_row, used, status)
    if status is None:
        start = first_row if next_row is None else next_row
        report_refused(slot_rows, keys, free, start, outcome[1], None)
    return rows, wanted


def hash_grow(slot_keys: torch.Tensor, slot_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.ops.hash_grow`."""
    new_keys = slot_keys.new_zeros(2 * slot_keys.numel())
    new_rows = slot_rows.new_full((2 * slot_rows.numel(),), -1)
    # every occupied slot of the old table claims one of the new table, which has room for all
    _claim(new_keys, new_rows, slot_keys, slot_rows, slot_rows >= 0)
    return new_keys, new_rows
