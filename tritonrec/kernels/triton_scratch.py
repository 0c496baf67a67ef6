# mypy: ignore-errors
"""A short-lived table from key to one of its positions, built by all programs at once.

A slot holds the *position* of a key, not the key: -1 is then a safe mark of emptiness for any 64-bit key,
and a program that loses a slot reads the winner's key from the input, which nobody writes, so there is no
moment at which a slot is claimed but its key is not yet visible. Equal keys share one slot, and in the end
the smallest of their positions holds it, whoever claimed it; different keys never share one. Which slot
depends on the schedule and on the process (`kernels.murmur.SECRET`).
"""

import torch
import triton
import triton.language as tl

from tritonrec.kernels import murmur
from tritonrec.kernels.murmur.triton_murmur import mix64
from tritonrec.kernels.races import declared
from tritonrec.kernels.triton_jit import jit_kernel
from tritonrec.kernels.triton_padding import num_valid

BLOCK, NUM_WARPS = 256, 4


# any of equal keys may hold a slot until all have, and which slots neighbours get depends on who comes first
@declared(races=("holders_ptr",), varies=("holders_ptr", "slots_ptr"))
@jit_kernel
def _build_kernel(
    keys_ptr, holders_ptr, slots_ptr, num_keys, count_ptr, num_slots, secret, BLOCK: tl.constexpr
):
    """``slots[k]`` = the slot of key k, whose holder is the smallest position of an equal key."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_valid(num_keys, count_ptr)
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    # fewer than 2**31 keys, so a position takes half the memory traffic of a key
    position = offsets.to(tl.int32)
    slot = mix64(key ^ secret) & (num_slots - 1)
    pending = inside
    settled = position
    visit = tl.full((), 0, tl.int64)
    # at most half the slots are ever taken, so a key settles before it has seen all of them
    while (tl.max(pending.to(tl.int32), axis=0) > 0) & (visit < num_slots):
        # a slot never changes its key, so only what looks empty needs the atomic
        holder = tl.load(holders_ptr + slot, mask=pending, other=0)
        open_slot = pending & (holder == -1)
        if tl.max(open_slot.to(tl.int32), axis=0) > 0:
            # compare-and-swap takes no mask: no slot holds -2, so an idle lane swaps nothing
            # relaxed: the position is all that is handed over, and the keys that it points to nobody writes
            previous = tl.atomic_cas(holders_ptr + slot, tl.where(open_slot, -1, -2), position, sem="relaxed")
            # a lost swap returns the winner, whose key may be the same
            holder = tl.where(open_slot, tl.where(previous == -1, position, previous), holder)
        holder_key = tl.load(keys_ptr + holder, mask=pending, other=0)
        settled = tl.where(pending, holder, settled)
        pending = pending & (holder_key != key)
        # Another key has this slot, for good: linear probing.
        slot = tl.where(pending, (slot + 1) & (num_slots - 1), slot)
        visit += 1
    # the holder only falls: no atomic where the one that was read, even a stale one, is as low
    # relaxed: a minimum is the same in any order, and only the next kernel relies on it
    tl.atomic_min(holders_ptr + slot, position, mask=inside & (position < settled), sem="relaxed")
    tl.store(slots_ptr + offsets, slot, mask=inside)


@jit_kernel
def _lookup_kernel(
    keys_ptr, table_keys_ptr, holders_ptr, found_ptr, num_keys, num_table_keys, count_ptr, num_slots, secret,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``found[k]`` = the position in the table's keys of the first that equals key k, or -1."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_valid(num_keys, count_ptr)
    key = tl.load(keys_ptr + offsets, mask=inside, other=0)
    slot = mix64(key ^ secret) & (num_slots - 1)
    found = tl.full((BLOCK,), -1, tl.int64)
    pending = inside
    visit = tl.full((), 0, tl.int64)
    while (tl.max(pending.to(tl.int32), axis=0) > 0) & (visit < num_slots):
        holder = tl.load(holders_ptr + slot, mask=pending, other=-1)
        # a caller may have given the table: it leads nowhere outside of its keys
        occupied = pending & (holder >= 0) & (holder < num_table_keys)
        holder_key = tl.load(table_keys_ptr + holder, mask=occupied, other=0)
        hit = occupied & (holder_key == key)
        found = tl.where(hit, holder.to(tl.int64), found)
        # no key ever leaves the table, so an empty slot ends a search
        pending = occupied & (holder_key != key)
        slot = (slot + 1) & (num_slots - 1)
        visit += 1
    tl.store(found_ptr + offsets, found, mask=offsets < num_keys)


def build(keys: torch.Tensor, count: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``holders`` (S,) int32, the table, and ``slots`` (K,) int64, the slot of each of the K >= 1 keys.

    A slot's holder is the position of the first of equal keys. Keys behind `count` are not in the table, and
    their slots are not written.
    """
    # at most half of the slots are taken, which keeps searches short
    num_slots = triton.next_power_of_2(2 * keys.numel())
    holders = torch.full((num_slots,), -1, dtype=torch.int32, device=keys.device)
    slots = torch.empty_like(keys)
    grid, config = (triton.cdiv(keys.numel(), BLOCK),), {"BLOCK": BLOCK, "num_warps": NUM_WARPS}
    _build_kernel[grid](keys, holders, slots, keys.numel(), count, num_slots, murmur.SECRET, **config)
    return holders, slots


def lookup(
    keys: torch.Tensor, table_keys: torch.Tensor, holders: torch.Tensor, count: torch.Tensor | None = None
) -> torch.Tensor:
    """Position in `table_keys` of each of the K >= 1 `keys`; -1: it is not there, or lies behind `count`."""
    found = torch.empty_like(keys)
    grid, config = (triton.cdiv(keys.numel(), BLOCK),), {"BLOCK": BLOCK, "num_warps": NUM_WARPS}
    sizes = keys.numel(), table_keys.numel(), count, holders.numel()
    _lookup_kernel[grid](keys, table_keys, holders, found, *sizes, murmur.SECRET, **config)
    return found
