"""The key structure of a dynamic embedding table: `hash_insert`, `hash_find`, `hash_grow`.

A table is two tensors, so that it grows, is copied and is saved without touching an embedding row
(MTGRBoost section 4.1, Figure 6):

    slot_keys (M,) int64   the key in each slot; anything where the slot is empty
    slot_rows (M,) int32   the row the key owns, or -1: the slot is empty

M is a power of two, at least 8. Occupancy lives in `slot_rows`, so all 2**64 keys are legal. A key's home
is a group of eight slots (one cache line of keys) given by MurmurHash3's finaliser; full groups are left
with an odd, key-dependent step, which visits every group (MTGRBoost eq. 5 and Theorem 1). Eq. 5 takes the
step from the key; we take it from the key's hash, because ids that agree modulo a power of two are common.

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
    impl: Impl = "auto",
) -> Pair:
    """Find the rows of `keys`; keys not yet in the table get ``next_row, next_row + 1, ...`` in order.

    Args:
        slot_keys: (M,) int64, mutated.
        slot_rows: (M,) int32, mutated.
        keys: (K,) int64, distinct (not checked: keys come from `unique`).
        next_row: the first row to hand out; ``next_row + number of new keys <= 2**31``.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        ``rows`` (K,) int64 and ``inserted`` (K,) bool, true where the key is new.

    Raises:
        HashTableFullError: the new keys do not fit; nothing has changed. Grow the table first.
    """
    _validate(slot_keys, slot_rows, keys)
    if not 0 <= next_row < 1 << 31:
        raise ValueError(f"next_row must be in [0, 2**31), got {next_row}")
    return torch.ops.tritonrec.hash_insert(slot_keys, slot_rows, keys, next_row, impl)


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


def hash_grow(slot_keys: torch.Tensor, slot_rows: torch.Tensor, impl: Impl = "auto") -> Pair:
    """A table of twice the slots with the same keys and the same rows; the old one is left alone.

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


def launch_insert(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, next_row: int, impl: str = "auto"
) -> Pair:
    """`hash_insert` without validation and without the dispatcher, for callers inside the package."""
    chosen = implementation(impl, slot_keys)  # type: ignore[arg-type]
    if next_row + keys.numel() > 1 << 31:
        # only new keys take rows, so count them before refusing
        new = int((launch_find(slot_keys, slot_rows, keys, impl) < 0).sum())
        if next_row + new > 1 << 31:
            raise ValueError(f"{new} new keys from row {next_row} pass the last int32 row")
    placed: Pair | None
    if chosen == "cpu":
        from tritonrec.kernels.hash_table import numba_hash_table

        rows = torch.empty(keys.numel(), dtype=torch.int64)
        inserted = torch.empty(keys.numel(), dtype=torch.bool)
        complete = numba_hash_table.hash_insert(
            _unsigned(slot_keys), slot_rows.numpy(), _unsigned(keys), next_row, rows.numpy(), inserted.numpy()
        )
        placed = (rows, inserted) if complete else None
    elif chosen == "triton":
        from tritonrec.kernels.hash_table import triton_hash_table

        placed = triton_hash_table.hash_insert(slot_keys, slot_rows, keys, next_row)
    else:
        placed = reference.hash_insert(slot_keys, slot_rows, keys, next_row)
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
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, next_row: int, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_insert(slot_keys, slot_rows, keys, next_row, impl)


@_insert_op.register_fake
def _insert_fake(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, next_row: int, impl: str
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


@torch.library.custom_op("tritonrec::hash_grow", mutates_args=())
def _grow_op(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_grow(slot_keys, slot_rows, impl)


@_grow_op.register_fake
def _grow_fake(slot_keys: torch.Tensor, slot_rows: torch.Tensor, impl: str) -> Pair:
    return slot_keys.new_empty(2 * slot_keys.shape[0]), slot_rows.new_empty(2 * slot_rows.shape[0])
