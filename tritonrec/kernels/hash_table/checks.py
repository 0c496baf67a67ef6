"""Arguments that the ops on a hash table refuse, by shape, dtype, device and number: no value is read."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_tensors, not_a_tensor
from tritonrec.kernels.padding import check_scalar


def check_insert(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    next_row: int | torch.Tensor,
    free_rows: torch.Tensor | None,
    count: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> None:
    check_lookup(slot_keys, slot_rows, keys, count)
    check_scalar("status", status, slot_keys)
    if free_rows is not None:
        check_row_list("free_rows", free_rows, slot_rows)
    if isinstance(next_row, torch.Tensor):
        check_scalar("next_row", next_row, slot_keys)
    elif not 0 <= next_row < 1 << 31:
        raise ValueError(f"next_row must be in [0, 2**31), got {next_row}")


def check_assign(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    count: torch.Tensor | None,
) -> None:
    check_lookup(slot_keys, slot_rows, keys, count)
    check_row_list("rows", rows, slot_rows)
    if rows.shape != keys.shape:
        raise ValueError(f"keys and rows must be equally many, got {tuple(keys.shape)}, {tuple(rows.shape)}")


def check_table(slot_keys: torch.Tensor, slot_rows: torch.Tensor) -> None:
    check_tensors(slot_keys=slot_keys, slot_rows=slot_rows)
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


def check_lookup(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, count: torch.Tensor | None
) -> None:
    check_table(slot_keys, slot_rows)
    check_tensors(slot_keys=slot_keys, keys=keys)
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(f"keys must be (K,) int64, got shape {tuple(keys.shape)} {keys.dtype}")
    check_scalar("count", count, slot_keys)


def check_row_list(name: str, rows: torch.Tensor, slot_rows: torch.Tensor) -> None:
    if not isinstance(rows, torch.Tensor):
        raise not_a_tensor(name, rows)
    if rows.dtype not in (torch.int64, torch.int32) or rows.dim() != 1:
        raise ValueError(f"{name} must be 1-dimensional int64 or int32, got {tuple(rows.shape)} {rows.dtype}")
    if rows.device != slot_rows.device:
        raise ValueError(f"slot_rows is on {slot_rows.device}, {name} on {rows.device}")
