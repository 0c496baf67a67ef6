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

import itertools
from collections.abc import Callable

import torch

from tritonrec.kernels.dispatch import Impl, on_host
from tritonrec.kernels.hash_table.errors import HashTableFullError, report_refused
from tritonrec.kernels.murmur.reference import mix64
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar, check_status, first_valid, pad

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


# Reference: grouped probing over an open-addressing table, one key at a time.
#
# A table of M = 2**n slots is G = M / 8 groups of eight neighbours. A key visits the groups
# ``home, home + step, home + 2 step, ...`` (mod G) with an odd step, so it meets every group once in G visits
# (MTGRBoost, Theorem 1), and takes the first free slot on its way.
#
# A slot is free if it is empty or a tombstone, but a search ends only at a group with an empty slot. Erasing
# therefore empties a slot where its group has an empty one already, for no path leads past such a group, and
# leaves a tombstone in a group without.

GROUP = 8
EMPTY, TOMBSTONE = -1, -2


def probe(key: int, num_slots: int):
    """Yield the groups that `key` visits, each as its eight slots, in order and each exactly once."""
    groups = num_slots // GROUP
    hashed = mix64(key)
    # An odd step has no factor in common with the power of two `groups`, so each group is met once.
    group, step = hashed % groups, hashed >> 32 | 1
    for _ in range(groups):
        yield range(group * GROUP, group * GROUP + GROUP)
        group = (group + step) % groups


def _search(slot_keys: list[int], slot_rows: list[int], key: int) -> tuple[int, int]:
    """The row of `key` or -1, and the slot where it is or would go (-1: no slot left)."""
    place = -1
    for group in probe(key, len(slot_keys)):
        for slot in group:
            if slot_rows[slot] >= 0 and slot_keys[slot] == key:
                return slot_rows[slot], slot
            if slot_rows[slot] < 0 and place == -1:
                # The first free slot on the way; the search goes on, since the key may lie behind a
                # tombstone.
                place = slot
        if EMPTY in slot_rows[group.start : group.stop]:
            break
    return -1, place


def hash_find_reference(slot_keys, slot_rows, keys, count) -> torch.Tensor:
    """See `hash_find`."""
    table_keys, table_rows = slot_keys.tolist(), slot_rows.tolist()
    rows = [_search(table_keys, table_rows, key)[0] for key in first_valid(keys, count).tolist()]
    return _rows_of(rows, keys)


def _rows_of(rows: list[int], keys: torch.Tensor) -> torch.Tensor:
    return pad(torch.tensor(rows, dtype=torch.int64, device=keys.device), keys.numel(), -1)


def hash_insert_reference(
    slot_keys, slot_rows, keys, first_row, free_rows, count, next_row, status, used
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hash_insert`."""
    arguments = keys, first_row, free_rows, count, next_row, status, used
    return insert_on_host(_insert, hash_find_reference, slot_keys, slot_rows, *arguments)


def insert_on_host(
    insert: Callable[..., tuple[torch.Tensor, torch.Tensor] | None],
    find: Callable[..., torch.Tensor],
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    first_row: int,
    free_rows: torch.Tensor | None,
    count: torch.Tensor | None,
    next_row: torch.Tensor | None,
    status: torch.Tensor | None,
    used: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`hash_insert` by an `insert` of valid keys that gives None where they do not fit, and by a `find`."""
    # A host knows the count: kernels get the valid keys alone, and results are padded behind them.
    valid = first_valid(keys, count)
    first = first_row if next_row is None else int(next_row)
    free = keys.new_empty(0) if free_rows is None else free_rows[: keys.numel()].long()
    # At most: as if every key were new.
    last = first + valid.numel() - free.numel()
    # only new keys take rows, so they are counted before a refusal
    if last > 1 << 31:
        last = first + int((find(slot_keys, slot_rows, valid, None) < 0).sum()) - free.numel()
    placed = insert(slot_keys, slot_rows, valid, first, free) if last <= 1 << 31 else None
    refused = 0
    if placed is None:
        found = find(slot_keys, slot_rows, valid, None)
        placed, refused = (found, torch.zeros_like(found, dtype=torch.bool)), int((found < 0).sum())
    rows, inserted = pad(placed[0], keys.numel(), -1), pad(placed[1], keys.numel(), False)
    new = int(inserted.sum())
    start = first_row if next_row is None else next_row
    report_refused(slot_rows, keys, free.numel(), start, refused, status)
    if isinstance(start, torch.Tensor):
        start += max(new - free.numel(), 0)
    if used is not None:
        used += new
    return rows, inserted


def _insert(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    first_row: int,
    free_rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    table_keys, table_rows = slot_keys.tolist(), slot_rows.tolist()
    new_rows = itertools.chain(free_rows.tolist(), itertools.count(first_row))
    rows, inserted = [], []
    for key in keys.tolist():
        row, slot = _search(table_keys, table_rows, key)
        # A key that is there has a slot: only a new one finds none. Nothing was written to the tensors yet.
        if slot == -1:
            return None
        inserted.append(row == -1)
        if row == -1:
            row = next(new_rows)
            table_keys[slot], table_rows[slot] = key, row
        rows.append(row)
    slot_keys.copy_(torch.tensor(table_keys, dtype=torch.int64, device="cpu"))
    slot_rows.copy_(torch.tensor(table_rows, dtype=torch.int32, device="cpu"))
    return (
        torch.tensor(rows, dtype=torch.int64, device=keys.device),
        torch.tensor(inserted, dtype=torch.bool, device=keys.device),
    )


def hash_erase_reference(slot_keys, slot_rows, keys, count, used) -> torch.Tensor:
    """See `hash_erase`."""
    table_keys, table_rows = slot_keys.tolist(), slot_rows.tolist()
    before = []
    for key in first_valid(keys, count).tolist():
        row, slot = _search(table_keys, table_rows, key)
        before.append(row)
        if row != -1:
            # The group's first slot.
            start = slot - slot % GROUP
            ends_here = EMPTY in table_rows[start : start + GROUP]
            table_rows[slot] = EMPTY if ends_here else TOMBSTONE
    slot_rows.copy_(torch.tensor(table_rows, dtype=torch.int32, device="cpu"))
    if used is not None:
        used -= sum(row != -1 for row in before)
    return _rows_of(before, keys)


def hash_grow_reference(slot_keys, slot_rows) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hash_grow`."""
    table_keys, table_rows = [0] * 2 * slot_keys.numel(), [EMPTY] * 2 * slot_keys.numel()
    for key, row in zip(slot_keys.tolist(), slot_rows.tolist(), strict=True):
        if row >= 0:
            # also for a key that is there twice: `_search` would find its own
            slot = next(
                slot for group in probe(key, len(table_keys)) for slot in group if table_rows[slot] < 0
            )
            table_keys[slot], table_rows[slot] = key, row
    return (
        torch.tensor(table_keys, dtype=torch.int64, device=slot_keys.device),
        torch.tensor(table_rows, dtype=torch.int32, device=slot_keys.device),
    )


def _check_table(slot_keys: torch.Tensor, slot_rows: torch.Tensor) -> None:
    size = slot_keys.shape[0] if slot_keys.dim() == 1 else -1
    if size < 8 or size & (size - 1) or slot_rows.shape != slot_keys.shape:
        raise ValueError(
            "slot_keys and slot_rows must be (M,) with M a power of two and at least 8, "
            f"got {tuple(slot_keys.shape)} and {tuple(slot_rows.shape)}"
        )
    if slot_keys.dtype != torch.int64 or slot_rows.dtype != torch.int32:
        raise ValueError(
            f"slot_keys must be int64 and slot_rows int32, got {slot_keys.dtype}, {slot_rows.dtype}"
        )
    if not (slot_keys.is_contiguous() and slot_rows.is_contiguous()):
        raise ValueError("slot_keys and slot_rows must be contiguous")


def _check_keys(keys, count) -> None:
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(f"keys must be (K,) int64, got shape {tuple(keys.shape)} {keys.dtype}")
    check_scalar("count", count)


def _check_free_rows(rows: torch.Tensor) -> None:
    """Refuse row numbers outside [0, 2**31); on an accelerator the check is queued, and nothing waits."""
    if not on_host(rows):
        inside = (rows >= 0) & (rows <= (1 << 31) - 1)  # a bound that int32 has
        torch._assert_async(inside.all(), "free_rows must be in [0, 2**31)")
    elif rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < 1 << 31:
        raise ValueError(f"free_rows must be in [0, 2**31), got {int(rows.min())} to {int(rows.max())}")


def _fake_lookup(keys):
    return torch.empty_like(keys)


def _check_insert(first_row, free_rows, next_row, status, used) -> None:
    if free_rows is not None and (free_rows.dtype not in (torch.int64, torch.int32) or free_rows.dim() != 1):
        raise ValueError(
            f"free_rows must be 1-dimensional int64 or int32, got {tuple(free_rows.shape)} {free_rows.dtype}"
        )
    if not 0 <= first_row < 1 << 31:
        raise ValueError(f"next_row must be in [0, 2**31), got {first_row}")
    check_scalar("next_row", next_row)
    check_scalar("status", status)
    check_scalar("used", used)


def _check_used(slot_rows, used) -> None:
    if used is None:
        return
    slots = slot_rows.numel()
    if not on_host(used):
        torch._assert_async((used >= 0) & (used <= slots), "used must be the number of occupied slots")
    elif not 0 <= int(used) <= slots:
        raise ValueError(f"used must be the number of occupied slots of {slots}, got {int(used)}")


def _check_numbers(slot_rows, keys, free_rows, next_row, used) -> None:
    _check_used(slot_rows, used)
    if free_rows is not None:
        _check_free_rows(free_rows[: keys.numel()])
    if next_row is None:
        return
    # 2**31 is a counter whose rows are all taken
    if not on_host(next_row):
        torch._assert_async((next_row >= 0) & (next_row <= 1 << 31), "next_row must be in [0, 2**31]")
    elif not 0 <= int(next_row) <= 1 << 31:
        raise ValueError(f"next_row must be in [0, 2**31], got {int(next_row)}")


def _fake_insert(keys):
    return torch.empty_like(keys), torch.empty_like(keys, dtype=torch.bool)


HASH_INSERT = Op(
    "hash_insert(Tensor(a!) slot_keys, Tensor(b!) slot_rows, Tensor keys, int first_row, Tensor? free_rows, "
    "Tensor? count, Tensor(c!)? next_row, Tensor(d!)? status, Tensor(e!)? used) -> (Tensor, Tensor)",
    reference=hash_insert_reference, cpu="cpu_hash_table:hash_insert", triton="triton_hash_table:hash_insert",
    check=(_check_table, _check_keys, _check_insert), check_memory=_check_numbers, fake=_fake_insert,
)  # fmt: skip
HASH_FIND = Op(
    "hash_find(Tensor slot_keys, Tensor slot_rows, Tensor keys, Tensor? count) -> Tensor",
    reference=hash_find_reference, cpu="cpu_hash_table:hash_find", triton="triton_hash_table:hash_find",
    check=(_check_table, _check_keys), fake=_fake_lookup,
)  # fmt: skip


def _check_erase(used) -> None:
    check_scalar("used", used)


HASH_ERASE = Op(
    "hash_erase(Tensor slot_keys, Tensor(a!) slot_rows, Tensor keys, Tensor? count, Tensor(b!)? used) -> "
    "Tensor",
    reference=hash_erase_reference, cpu="cpu_hash_table:hash_erase", triton="triton_hash_table:hash_erase",
    check=(_check_table, _check_keys, _check_erase), check_memory=_check_used, fake=_fake_lookup,
)  # fmt: skip


def _fake_grow(slot_keys, slot_rows):
    return slot_keys.new_empty(2 * slot_keys.shape[0]), slot_rows.new_empty(2 * slot_rows.shape[0])


HASH_GROW = Op(
    "hash_grow(Tensor slot_keys, Tensor slot_rows) -> (Tensor, Tensor)",
    reference=hash_grow_reference, cpu="cpu_hash_table:hash_grow", triton="triton_hash_table:hash_grow",
    check=_check_table, fake=_fake_grow,
)  # fmt: skip
