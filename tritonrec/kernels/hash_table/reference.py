"""Grouped probing over an open-addressing table, one key at a time.

A table of M = 2**n slots is G = M / 8 groups of eight neighbours. A key visits the groups
``home, home + step, home + 2 step, ...`` (mod G) with an odd step, so it meets every group once in G visits
(MTGRBoost, Theorem 1), and takes the first free slot on its way.

A slot is free if it is empty or a tombstone, but a search ends only at a group with an empty slot. Erasing
therefore empties a slot where its group has an empty one already, for no path leads past such a group, and
leaves a tombstone in a group without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from tritonrec.kernels.hash_table.errors import finish_insert
from tritonrec.kernels.murmur.reference import mix64
from tritonrec.kernels.padding import first_valid, pad

GROUP = 8
EMPTY, TOMBSTONE = -1, -2


def probe(key: int, num_slots: int):
    """Yield the groups that `key` visits, each as its eight slots, in order and each exactly once."""
    groups = num_slots // GROUP
    hashed = mix64(key)
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
                place = slot
        if EMPTY in slot_rows[group.start : group.stop]:
            break
    return -1, place


def hash_find(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, count: torch.Tensor | None
) -> torch.Tensor:
    """See `tritonrec.kernels.hash_table.hash_find`."""
    table_keys, table_rows = slot_keys.tolist(), slot_rows.tolist()
    rows = [_search(table_keys, table_rows, key)[0] for key in first_valid(keys, count).tolist()]
    return _rows_of(rows, keys)


def _rows_of(rows: list[int], keys: torch.Tensor) -> torch.Tensor:
    return pad(torch.tensor(rows, dtype=torch.int64, device=keys.device), keys.numel(), -1)


def hash_insert(
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
    """See `tritonrec.kernels.hash_table.hash_insert`."""
    arguments = keys, first_row, free_rows, count, next_row, status, used
    return insert_on_host(_insert, hash_find, slot_keys, slot_rows, *arguments)


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
    valid = first_valid(keys, count)
    first = first_row if next_row is None else int(next_row)
    free = keys.new_empty(0) if free_rows is None else free_rows[: keys.numel()].long()
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
    finish_insert(slot_rows, keys, free, start, max(new - free.numel(), 0), refused, status)
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
        if slot == -1:
            return None
        inserted.append(row == -1)
        if row == -1:
            row = next(new_rows)
            table_keys[slot], table_rows[slot] = key, row
        rows.append(row)
    slot_keys.copy_(torch.tensor(table_keys, dtype=torch.int64))
    slot_rows.copy_(torch.tensor(table_rows, dtype=torch.int32))
    return (
        torch.tensor(rows, dtype=torch.int64, device=keys.device),
        torch.tensor(inserted, dtype=torch.bool, device=keys.device),
    )


def hash_assign(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    count: torch.Tensor | None,
) -> torch.Tensor:
    """See `tritonrec.kernels.hash_table.hash_assign`."""
    table_keys, table_rows = slot_keys.tolist(), slot_rows.tolist()
    before = []
    for key, new_row in zip(first_valid(keys, count).tolist(), rows.tolist(), strict=False):
        row, slot = _search(table_keys, table_rows, key)
        before.append(row)
        if row != -1:
            table_rows[slot] = new_row
    slot_rows.copy_(torch.tensor(table_rows, dtype=torch.int32))
    return _rows_of(before, keys)


def hash_erase(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    count: torch.Tensor | None,
    used: torch.Tensor | None,
) -> torch.Tensor:
    """See `tritonrec.kernels.hash_table.hash_erase`."""
    table_keys, table_rows = slot_keys.tolist(), slot_rows.tolist()
    before = []
    for key in first_valid(keys, count).tolist():
        row, slot = _search(table_keys, table_rows, key)
        before.append(row)
        if row != -1:
            start = slot - slot % GROUP
            ends_here = EMPTY in table_rows[start : start + GROUP]
            table_rows[slot] = EMPTY if ends_here else TOMBSTONE
    slot_rows.copy_(torch.tensor(table_rows, dtype=torch.int32))
    if used is not None:
        used -= sum(row != -1 for row in before)
    return _rows_of(before, keys)


def hash_grow(slot_keys: torch.Tensor, slot_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.hash_table.hash_grow`."""
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
