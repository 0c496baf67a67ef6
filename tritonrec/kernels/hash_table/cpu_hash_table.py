"""The ops on a hash table by the kernels of `numba_hash_table`, which take arrays."""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.hash_table import numba_hash_table as kernels
from tritonrec.kernels.hash_table.op import insert_on_host
from tritonrec.kernels.padding import first_valid, pad

Pair = tuple[torch.Tensor, torch.Tensor]


def _unsigned(keys: torch.Tensor) -> np.ndarray:
    return keys.contiguous().numpy().view("uint64")


def hash_find(slot_keys, slot_rows, keys, count) -> torch.Tensor:
    """See `tritonrec.ops.hash_find`."""
    valid = first_valid(keys, count)
    rows = torch.empty(valid.numel(), dtype=torch.int64, device="cpu")
    kernels.hash_find(_unsigned(slot_keys), slot_rows.numpy(), _unsigned(valid), rows.numpy())
    return pad(rows, keys.numel(), -1)


def hash_insert(slot_keys, slot_rows, keys, first_row, free_rows, count, next_row, status, used) -> Pair:
    """See `tritonrec.ops.hash_insert`."""
    arguments = keys, first_row, free_rows, count, next_row, status, used
    return insert_on_host(_insert, hash_find, slot_keys, slot_rows, *arguments)


def _insert(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    first_row: int,
    free_rows: torch.Tensor,
) -> Pair | None:
    rows = torch.empty(keys.numel(), dtype=torch.int64, device="cpu")
    inserted = torch.empty(keys.numel(), dtype=torch.bool, device="cpu")
    table, free = (_unsigned(slot_keys), slot_rows.numpy()), free_rows.contiguous().numpy()
    reused = kernels.hash_insert(*table, _unsigned(keys), first_row, free, rows.numpy(), inserted.numpy())
    return (rows, inserted) if reused >= 0 else None


def hash_erase(slot_keys, slot_rows, keys, count, used) -> torch.Tensor:
    """See `tritonrec.ops.hash_erase`."""
    valid = first_valid(keys, count)
    before = torch.empty(valid.numel(), dtype=torch.int64, device="cpu")
    kernels.hash_erase(_unsigned(slot_keys), slot_rows.numpy(), _unsigned(valid), before.numpy())
    if used is not None:
        used -= int((before >= 0).sum())
    return pad(before, keys.numel(), -1)


def hash_grow(slot_keys: torch.Tensor, slot_rows: torch.Tensor) -> Pair:
    """See `tritonrec.ops.hash_grow`."""
    new_keys = slot_keys.new_zeros(2 * slot_keys.numel())
    new_rows = slot_rows.new_full((2 * slot_rows.numel(),), -1)
    kernels.hash_grow(_unsigned(slot_keys), slot_rows.numpy(), _unsigned(new_keys), new_rows.numpy())
    return new_keys, new_rows
