"""Registration of the ops on a hash table."""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import on_host
from tritonrec.kernels.hash_table import reference
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar, first_valid, padding


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


def _check_row_list(name: str, rows: torch.Tensor) -> None:
    if rows.dtype not in (torch.int64, torch.int32) or rows.dim() != 1:
        raise ValueError(f"{name} must be 1-dimensional int64 or int32, got {tuple(rows.shape)} {rows.dtype}")


def _check_range(name: str, rows: torch.Tensor, count: torch.Tensor | None = None) -> None:
    """Refuse row numbers outside [0, 2**31); on an accelerator the check is queued, and nothing waits."""
    if not on_host(rows):
        inside = (rows >= 0) & (rows <= (1 << 31) - 1)  # a bound that int32 has
        if count is not None:
            inside |= padding(rows.numel(), count)
        torch._assert_async(inside.all(), f"{name} must be in [0, 2**31)")
        return
    rows = first_valid(rows, count)
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < 1 << 31:
        raise ValueError(f"{name} must be in [0, 2**31), got {int(rows.min())} to {int(rows.max())}")


def _fake_lookup(keys):
    return torch.empty_like(keys)


def _check_insert(first_row, free_rows, next_row, status, used) -> None:
    if free_rows is not None:
        _check_row_list("free_rows", free_rows)
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
        _check_range("free_rows", free_rows[: keys.numel()])
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
    reference=reference.hash_insert, cpu="cpu_hash_table:hash_insert", triton="triton_hash_table:hash_insert",
    check=(_check_table, _check_keys, _check_insert), check_memory=_check_numbers, fake=_fake_insert,
)  # fmt: skip
HASH_FIND = Op(
    "hash_find(Tensor slot_keys, Tensor slot_rows, Tensor keys, Tensor? count) -> Tensor",
    reference=reference.hash_find, cpu="cpu_hash_table:hash_find", triton="triton_hash_table:hash_find",
    check=(_check_table, _check_keys), fake=_fake_lookup,
)  # fmt: skip


def _check_rows(keys, rows) -> None:
    _check_row_list("rows", rows)
    if rows.shape != keys.shape:
        raise ValueError(f"keys and rows must be equally many, got {tuple(keys.shape)}, {tuple(rows.shape)}")


def _check_row_numbers(rows, count) -> None:
    _check_range("rows", rows, count)


HASH_ASSIGN = Op(
    "hash_assign(Tensor slot_keys, Tensor(a!) slot_rows, Tensor keys, Tensor rows, Tensor? count) -> Tensor",
    reference=reference.hash_assign, cpu="cpu_hash_table:hash_assign", triton="triton_hash_table:hash_assign",
    check=(_check_table, _check_keys, _check_rows), check_memory=_check_row_numbers, fake=_fake_lookup,
)  # fmt: skip


def _check_erase(used) -> None:
    check_scalar("used", used)


HASH_ERASE = Op(
    "hash_erase(Tensor slot_keys, Tensor(a!) slot_rows, Tensor keys, Tensor? count, Tensor(b!)? used) -> "
    "Tensor",
    reference=reference.hash_erase, cpu="cpu_hash_table:hash_erase", triton="triton_hash_table:hash_erase",
    check=(_check_table, _check_keys, _check_erase), check_memory=_check_used, fake=_fake_lookup,
)  # fmt: skip


def _fake_grow(slot_keys, slot_rows):
    return slot_keys.new_empty(2 * slot_keys.shape[0]), slot_rows.new_empty(2 * slot_rows.shape[0])


HASH_GROW = Op(
    "hash_grow(Tensor slot_keys, Tensor slot_rows) -> (Tensor, Tensor)",
    reference=reference.hash_grow, cpu="cpu_hash_table:hash_grow", triton="triton_hash_table:hash_grow",
    check=_check_table, fake=_fake_grow,
)  # fmt: skip
