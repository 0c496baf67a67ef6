"""Grouped probing over an open-addressing table, one slot at a time.

A table of M = 2**n slots is G = M / 8 groups of eight neighbours. A key visits the groups
``home, home + step, home + 2 step, ...`` (mod G) with an odd step, so it meets every group once in G visits
(MTGRBoost, Theorem 1), and takes the first empty slot of the first group that has one.
"""

import torch

from tritonrec.kernels.murmur.reference import mix64

GROUP = 8


def probe(key: int, num_slots: int):
    """Yield the slots that `key` visits, in order, each exactly once."""
    groups = num_slots // GROUP
    hashed = mix64(key)
    group, step = hashed % groups, hashed >> 32 | 1
    for _ in range(groups):
        yield from range(group * GROUP, group * GROUP + GROUP)
        group = (group + step) % groups


def _search(slot_keys: list[int], slot_rows: list[int], key: int) -> tuple[int, int]:
    """The row of `key` or -1, and the slot where it is or would go (-1: no slot left)."""
    for slot in probe(key, len(slot_keys)):
        if slot_rows[slot] == -1:
            return -1, slot
        if slot_keys[slot] == key:
            return slot_rows[slot], slot
    return -1, -1


def hash_find(slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """See `tritonrec.kernels.hash_table.hash_find`."""
    table_keys, table_rows = slot_keys.tolist(), slot_rows.tolist()
    rows = [_search(table_keys, table_rows, key)[0] for key in keys.tolist()]
    return torch.tensor(rows, dtype=torch.int64, device=keys.device)


def hash_insert(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, next_row: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See `tritonrec.kernels.hash_table.hash_insert`; None where the table is too small."""
    table_keys, table_rows = slot_keys.tolist(), slot_rows.tolist()
    rows, inserted = [], []
    for key in keys.tolist():
        row, slot = _search(table_keys, table_rows, key)
        if slot == -1:
            return None
        inserted.append(row == -1)
        if row == -1:
            row, next_row = next_row, next_row + 1
            table_keys[slot], table_rows[slot] = key, row
        rows.append(row)
    slot_keys.copy_(torch.tensor(table_keys, dtype=torch.int64))
    slot_rows.copy_(torch.tensor(table_rows, dtype=torch.int32))
    return (
        torch.tensor(rows, dtype=torch.int64, device=keys.device),
        torch.tensor(inserted, dtype=torch.bool, device=keys.device),
    )


def hash_grow(slot_keys: torch.Tensor, slot_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.hash_table.hash_grow`."""
    table_keys, table_rows = [0] * 2 * slot_keys.numel(), [-1] * 2 * slot_keys.numel()
    for key, row in zip(slot_keys.tolist(), slot_rows.tolist(), strict=True):
        if row != -1:
            slot = next(slot for slot in probe(key, len(table_keys)) if table_rows[slot] == -1)
            table_keys[slot], table_rows[slot] = key, row
    return (
        torch.tensor(table_keys, dtype=torch.int64, device=slot_keys.device),
        torch.tensor(table_rows, dtype=torch.int32, device=slot_keys.device),
    )
