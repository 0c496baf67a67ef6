"""The key structure of a dynamic embedding table: find, insert, assign, erase, grow.

A table is two tensors, so that it grows, is copied and is saved without touching an embedding row
(MTGRBoost section 4.1, Figure 6):

    slot_keys (M,) int64   the key in each slot; anything where the slot is free
    slot_rows (M,) int32   the row the key owns; -1: the slot is empty; -2: a tombstone, freed by `hash_erase`

M is a power of two, at least 8. Occupancy lives in `slot_rows`, so all 2**64 keys are legal. A key's home
is a group of eight slots (one cache line of keys) given by MurmurHash3's finaliser; groups without an empty
slot are left with an odd, key-dependent step, which visits every group (MTGRBoost eq. 5 and Theorem 1).
Eq. 5 takes the step from the key; we take it from the key's hash, because ids that agree modulo a power of
two are common.

A search ends at a group with an empty slot. So a key may be erased without a trace from a group that has an
empty slot, which ended every search there already, and leaves a tombstone in a group that has none: a group
once full never has an empty slot again. Inserts reuse tombstones, growth drops them.

The walk of a key is known to everybody, and thousands of keys can be chosen that have one walk: each then
visits the groups of all others. Where somebody else chooses the ids, draw a random int64 once, keep it beside
the table, and give ``keys ^ secret`` to every op: a bijection, so rows are the same.

Rows and `inserted` never depend on the schedule. Which of two new keys gets the nearer slot may, on a GPU;
nothing but the order inside `slot_keys` shows it.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.hash_table.errors import HashTableFullError
from tritonrec.kernels.hash_table.register import (
    HASH_ASSIGN,
    HASH_ERASE,
    HASH_FIND,
    HASH_GROW,
    HASH_INSERT,
)
from tritonrec.kernels.padding import check_status

Pair = tuple[torch.Tensor, torch.Tensor]


def hash_insert(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    next_row: int | torch.Tensor,
    free_rows: torch.Tensor | None = None,
    *,
    count: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> Pair:
    """Find the rows of `keys`; those not yet in the table get new rows, in the order of `keys`.

    New rows are ``free_rows[0], free_rows[1], ...`` while there are any, then ``next_row``, ``next_row + 1``
    and so on.

    Args:
        slot_keys: (M,) int64, mutated.
        slot_rows: (M,) int32, mutated.
        keys: (K,) int64, distinct (not checked: keys come from `unique`).
        next_row: the first row to hand out after the free ones; none may pass ``2**31 - 1``. A () int64
            tensor moves on by the rows taken, so that no host has to know how many keys were new.
        free_rows: (F,) int64 or int32, rows to hand out first, distinct and owned by no key (not checked).
        count: () int64, the number of valid keys (`kernels.padding`).
        status: () int64, mutated: takes the number of new keys that did not fit, for `check_inserted`,
            where otherwise the host would wait to raise. The rows of those keys are then -1.
        used: () int64, mutated: the number of occupied slots (``slot_rows >= 0``), which the caller keeps
            beside the table and gives to every `hash_insert` and `hash_erase` (`hash_grow` keeps it). With it
            an accelerator reads only the slots on the keys' way; without it, all slots in every call, to
            know what fits.

    Returns:
        ``rows`` (K,) int64 and ``inserted`` (K,) bool, true where the key is new.
        Behind `count` -1 and false.

    Raises:
        HashTableFullError: the new keys do not fit; nothing has changed. Grow the table first.
        ValueError: shapes, dtypes or devices that do not fit; a row outside [0, 2**31), or `used` outside
            [0, M] (on an accelerator: an asynchronous device assertion).
    """
    first_row, counter = (0, next_row) if isinstance(next_row, torch.Tensor) else (next_row, None)
    return HASH_INSERT(
        slot_keys, slot_rows, keys, first_row, free_rows, count, counter, status, used, impl=impl
    )


def check_inserted(status: torch.Tensor, slot_rows: torch.Tensor) -> None:
    """Raise the error that `hash_insert` wrote into `status`; waits for the device.

    Args:
        status: () int64, as `hash_insert` left it. slot_rows: (M,) int32, that table.
    Raises:
        HashTableFullError: a call was refused; it changed nothing, and its new keys have no rows.
        ValueError: `status` is not () int64, or negative, which no call writes.
    """
    check_status(status)
    refused = int(status)
    if refused:
        raise HashTableFullError(
            f"{refused} new keys did not fit into a table of {slot_rows.numel()} slots, of which "
            f"{int((slot_rows >= 0).sum())} are occupied now, or passed the last int32 row; nothing was "
            "inserted: grow the table with hash_grow, clear the status and repeat that step"
        )


def hash_find(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """The row of each key, or -1 where the key is absent.

    Args:
        slot_keys: (M,) int64.
        slot_rows: (M,) int32.
        keys: (K,) int64, repeats allowed.
        count: () int64, the number of valid keys (`kernels.padding`).
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        (K,) int64; -1 behind `count`.
    """
    return HASH_FIND(slot_keys, slot_rows, keys, count, impl=impl)


def hash_assign(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Give each key that is in the table a new row.

    Args:
        slot_keys: (M,) int64.
        slot_rows: (M,) int32, mutated.
        keys: (K,) int64, distinct (not checked). Absent keys stay absent.
        rows: (K,) int64 or int32, in [0, 2**31).
        count: () int64, the number of valid keys (`kernels.padding`).
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        (K,) int64, the row each key had, or -1 where it is absent or behind `count`.
    """
    return HASH_ASSIGN(slot_keys, slot_rows, keys, rows, count, impl=impl)


def hash_erase(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    *,
    count: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Take keys out of the table.

    Args:
        slot_keys: (M,) int64, left as it is.
        slot_rows: (M,) int32, mutated.
        keys: (K,) int64, distinct (not checked). Absent keys are passed over.
        count: () int64, the number of valid keys (`kernels.padding`).
        used: () int64, mutated: the number of occupied slots, as for `hash_insert`.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        (K,) int64, the row each key had, or -1 where it was absent or behind `count`.
    """
    return HASH_ERASE(slot_keys, slot_rows, keys, count, used, impl=impl)


def hash_grow(slot_keys: torch.Tensor, slot_rows: torch.Tensor, *, impl: Impl = "auto") -> Pair:
    """A table of twice the slots with the same keys and rows and no tombstones; the old one is left alone.

    Args:
        slot_keys: (M,) int64.
        slot_rows: (M,) int32.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        ``slot_keys`` (2M,) int64 and ``slot_rows`` (2M,) int32.
    """
    return HASH_GROW(slot_keys, slot_rows, impl=impl)
