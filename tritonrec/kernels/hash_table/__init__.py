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

Rows and `inserted` never depend on the schedule. Which of two new keys gets the nearer slot may, on a GPU;
nothing but the order inside `slot_keys` shows it.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.hash_table import reference

Pair = tuple[torch.Tensor, torch.Tensor]


class HashTableFullError(RuntimeError):
    """The new keys do not fit into the free slots; the table is unchanged."""


def hash_insert(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    next_row: int,
    free_rows: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> Pair:
    """Find the rows of `keys`; those not yet in the table get new rows, in the order of `keys`.

    New rows are ``free_rows[0], free_rows[1], ...`` while there are any, then ``next_row``, ``next_row + 1``
    and so on.

    Args:
        slot_keys: (M,) int64, mutated.
        slot_rows: (M,) int32, mutated.
        keys: (K,) int64, distinct (not checked: keys come from `unique`).
        next_row: the first row to hand out after the free ones; none may pass ``2**31 - 1``.
        free_rows: (F,) int64 or int32, rows to hand out first, distinct and owned by no key (not checked).
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        ``rows`` (K,) int64 and ``inserted`` (K,) bool, true where the key is new.

    Raises:
        HashTableFullError: the new keys do not fit; nothing has changed. Grow the table first.
    """
    _validate(slot_keys, slot_rows, keys)
    if not 0 <= next_row < 1 << 31:
        raise ValueError(f"next_row must be in [0, 2**31), got {next_row}")
    if free_rows is not None:
        _validate_rows("free_rows", free_rows, slot_rows)
    return torch.ops.tritonrec.hash_insert(slot_keys, slot_rows, keys, next_row, free_rows, impl)


def hash_find(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, impl: Impl = "auto"
) -> torch.Tensor:
    """The row of each key, or -1 where the key is absent.

    Args:
        slot_keys: (M,) int64.
        slot_rows: (M,) int32.
        keys: (K,) int64, repeats allowed.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        (K,) int64.
    """
    _validate(slot_keys, slot_rows, keys)
    return torch.ops.tritonrec.hash_find(slot_keys, slot_rows, keys, impl)


def hash_assign(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Give each key that is in the table a new row.

    Args:
        slot_keys: (M,) int64.
        slot_rows: (M,) int32, mutated.
        keys: (K,) int64, distinct (not checked). Absent keys stay absent.
        rows: (K,) int64 or int32, in [0, 2**31).
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        (K,) int64, the row each key had, or -1 where it is absent.
    """
    _validate(slot_keys, slot_rows, keys)
    _validate_rows("rows", rows, slot_rows)
    if rows.shape != keys.shape:
        raise ValueError(f"keys and rows must be equally many, got {tuple(keys.shape)}, {tuple(rows.shape)}")
    return torch.ops.tritonrec.hash_assign(slot_keys, slot_rows, keys, rows, impl)


def hash_erase(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, impl: Impl = "auto"
) -> torch.Tensor:
    """Take keys out of the table.

    Args:
        slot_keys: (M,) int64, left as it is.
        slot_rows: (M,) int32, mutated.
        keys: (K,) int64, distinct (not checked). Absent keys are passed over.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        (K,) int64, the row each key had, or -1 where it was absent.
    """
    _validate(slot_keys, slot_rows, keys)
    return torch.ops.tritonrec.hash_erase(slot_keys, slot_rows, keys, impl)


def hash_grow(slot_keys: torch.Tensor, slot_rows: torch.Tensor, impl: Impl = "auto") -> Pair:
    """A table of twice the slots with the same keys and rows and no tombstones; the old one is left alone.

    Args:
        slot_keys: (M,) int64.
        slot_rows: (M,) int32.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        ``slot_keys`` (2M,) int64 and ``slot_rows`` (2M,) int32.
    """
    _validate(slot_keys, slot_rows)
    return torch.ops.tritonrec.hash_grow(slot_keys, slot_rows, impl)


def _validate(slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor | None = None) -> None:
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
    if keys is not None and (keys.dtype != torch.int64 or keys.dim() != 1):
        raise ValueError(f"keys must be (K,) int64, got shape {tuple(keys.shape)} {keys.dtype}")
    for other in (slot_rows, keys):
        if other is not None and other.device != slot_keys.device:
            raise ValueError(f"slot_keys is on {slot_keys.device}, the others on {other.device}")


def _validate_rows(name: str, rows: torch.Tensor, slot_rows: torch.Tensor) -> None:
    if rows.dtype not in (torch.int64, torch.int32) or rows.dim() != 1:
        raise ValueError(f"{name} must be 1-dimensional int64 or int32, got {tuple(rows.shape)} {rows.dtype}")
    if rows.device != slot_rows.device:
        raise ValueError(f"slot_rows is on {slot_rows.device}, {name} on {rows.device}")


def _check_range(name: str, rows: torch.Tensor) -> None:
    # on an accelerator the look would stall its queue
    if rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < 1 << 31:
        raise ValueError(f"{name} must be in [0, 2**31), got {int(rows.min())} to {int(rows.max())}")


def launch_insert(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    next_row: int,
    free_rows: torch.Tensor | None = None,
    impl: str = "auto",
) -> Pair:
    """`hash_insert` without validation and without the dispatcher, for callers inside the package."""
    chosen = implementation(impl, slot_keys)  # type: ignore[arg-type]
    free_rows = keys.new_empty(0) if free_rows is None else free_rows[: keys.numel()].long()
    if next_row + keys.numel() - free_rows.numel() > 1 << 31:
        # only new keys take rows, so count them before refusing
        new = int((launch_find(slot_keys, slot_rows, keys, impl) < 0).sum()) - free_rows.numel()
        if next_row + new > 1 << 31:
            raise ValueError(f"{new} new keys from row {next_row} pass the last int32 row")
    placed: Pair | None
    if chosen == "cpu":
        from tritonrec.kernels.hash_table import numba_hash_table

        rows = torch.empty(keys.numel(), dtype=torch.int64)
        inserted = torch.empty(keys.numel(), dtype=torch.bool)
        reused = numba_hash_table.hash_insert(
            _unsigned(slot_keys),
            slot_rows.numpy(),
            _unsigned(keys),
            next_row,
            free_rows.contiguous().numpy(),
            rows.numpy(),
            inserted.numpy(),
        )
        placed = (rows, inserted) if reused >= 0 else None
    elif chosen == "triton":
        from tritonrec.kernels.hash_table import triton_hash_table

        placed = triton_hash_table.hash_insert(slot_keys, slot_rows, keys, next_row, free_rows)
    else:
        placed = reference.hash_insert(slot_keys, slot_rows, keys, next_row, free_rows)
    if placed is None:
        raise HashTableFullError(
            f"{keys.numel()} keys do not fit into a table of {slot_keys.numel()} slots with "
            f"{int((slot_rows >= 0).sum())} occupied: grow it with hash_grow first; nothing was inserted"
        )
    return placed


def launch_find(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, impl: str = "auto"
) -> torch.Tensor:
    """`hash_find` without validation and without the dispatcher, for callers inside the package."""
    chosen = implementation(impl, slot_keys)  # type: ignore[arg-type]
    if chosen == "cpu":
        from tritonrec.kernels.hash_table import numba_hash_table

        rows = torch.empty(keys.numel(), dtype=torch.int64)
        numba_hash_table.hash_find(_unsigned(slot_keys), slot_rows.numpy(), _unsigned(keys), rows.numpy())
        return rows
    if chosen == "triton":
        from tritonrec.kernels.hash_table import triton_hash_table

        return triton_hash_table.hash_find(slot_keys, slot_rows, keys)
    return reference.hash_find(slot_keys, slot_rows, keys)


def launch_assign(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    impl: str = "auto",
) -> torch.Tensor:
    """`hash_assign` without validation and without the dispatcher, for callers inside the package."""
    chosen = implementation(impl, slot_keys)  # type: ignore[arg-type]
    if chosen == "cpu":
        from tritonrec.kernels.hash_table import numba_hash_table

        before = torch.empty(keys.numel(), dtype=torch.int64)
        numba_hash_table.hash_assign(
            _unsigned(slot_keys),
            slot_rows.numpy(),
            _unsigned(keys),
            rows.long().contiguous().numpy(),
            before.numpy(),
        )
        return before
    if chosen == "triton":
        from tritonrec.kernels.hash_table import triton_hash_table

        return triton_hash_table.hash_assign(slot_keys, slot_rows, keys, rows)
    return reference.hash_assign(slot_keys, slot_rows, keys, rows)


def launch_erase(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, impl: str = "auto"
) -> torch.Tensor:
    """`hash_erase` without validation and without the dispatcher, for callers inside the package."""
    chosen = implementation(impl, slot_keys)  # type: ignore[arg-type]
    if chosen == "cpu":
        from tritonrec.kernels.hash_table import numba_hash_table

        before = torch.empty(keys.numel(), dtype=torch.int64)
        numba_hash_table.hash_erase(_unsigned(slot_keys), slot_rows.numpy(), _unsigned(keys), before.numpy())
        return before
    if chosen == "triton":
        from tritonrec.kernels.hash_table import triton_hash_table

        return triton_hash_table.hash_erase(slot_keys, slot_rows, keys)
    return reference.hash_erase(slot_keys, slot_rows, keys)


def launch_grow(slot_keys: torch.Tensor, slot_rows: torch.Tensor, impl: str = "auto") -> Pair:
    """`hash_grow` without validation and without the dispatcher, for callers inside the package."""
    chosen = implementation(impl, slot_keys)  # type: ignore[arg-type]
    if chosen == "reference":
        return reference.hash_grow(slot_keys, slot_rows)
    new_keys = slot_keys.new_zeros(2 * slot_keys.numel())
    new_rows = slot_rows.new_full((2 * slot_rows.numel(),), -1)
    if chosen == "cpu":
        from tritonrec.kernels.hash_table import numba_hash_table

        numba_hash_table.hash_grow(
            _unsigned(slot_keys), slot_rows.numpy(), _unsigned(new_keys), new_rows.numpy()
        )
    else:
        from tritonrec.kernels.hash_table import triton_hash_table

        triton_hash_table.hash_grow(slot_keys, slot_rows, new_keys, new_rows)
    return new_keys, new_rows


def _unsigned(keys: torch.Tensor):
    return keys.contiguous().numpy().view("uint64")


@torch.library.custom_op("tritonrec::hash_insert", mutates_args=("slot_keys", "slot_rows"))
def _insert_op(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    next_row: int,
    free_rows: torch.Tensor | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if free_rows is not None:
        _check_range("free_rows", free_rows[: keys.numel()])
    return launch_insert(slot_keys, slot_rows, keys, next_row, free_rows, impl)


@_insert_op.register_fake
def _insert_fake(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    next_row: int,
    free_rows: torch.Tensor | None,
    impl: str,
) -> Pair:
    return torch.empty_like(keys), torch.empty_like(keys, dtype=torch.bool)


@torch.library.custom_op("tritonrec::hash_find", mutates_args=())
def _find_op(slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, impl: str) -> torch.Tensor:
    return launch_find(slot_keys, slot_rows, keys, impl)


@_find_op.register_fake
def _find_fake(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, impl: str
) -> torch.Tensor:
    return torch.empty_like(keys)


@torch.library.custom_op("tritonrec::hash_assign", mutates_args=("slot_rows",))
def _assign_op(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, impl: str
) -> torch.Tensor:
    _check_range("rows", rows)
    return launch_assign(slot_keys, slot_rows, keys, rows, impl)


@_assign_op.register_fake
def _assign_fake(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, impl: str
) -> torch.Tensor:
    return torch.empty_like(keys)


@torch.library.custom_op("tritonrec::hash_erase", mutates_args=("slot_rows",))
def _erase_op(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, impl: str
) -> torch.Tensor:
    return launch_erase(slot_keys, slot_rows, keys, impl)


@_erase_op.register_fake
def _erase_fake(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, impl: str
) -> torch.Tensor:
    return torch.empty_like(keys)


@torch.library.custom_op("tritonrec::hash_grow", mutates_args=())
def _grow_op(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_grow(slot_keys, slot_rows, impl)


@_grow_op.register_fake
def _grow_fake(slot_keys: torch.Tensor, slot_rows: torch.Tensor, impl: str) -> Pair:
    return slot_keys.new_empty(2 * slot_keys.shape[0]), slot_rows.new_empty(2 * slot_rows.shape[0])
