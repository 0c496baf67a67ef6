"""The implementations of the hash table behind one function each, and their registration."""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import implementation, on_host
from tritonrec.kernels.hash_table import reference
from tritonrec.kernels.hash_table.checks import check_assign, check_insert, check_lookup, check_table
from tritonrec.kernels.overlap import check_no_overlap
from tritonrec.kernels.padding import num_valid, pad, padding, record
from tritonrec.kernels.registration import custom_op

Pair = tuple[torch.Tensor, torch.Tensor]


class HashTableFullError(RuntimeError):
    """The new keys do not fit into the free slots; the table is unchanged."""


def _check_range(name: str, rows: torch.Tensor, count: torch.Tensor | None = None) -> None:
    """Refuse row numbers outside [0, 2**31); on an accelerator the check is queued, and nothing waits."""
    if not on_host(rows):
        inside = (rows >= 0) & (rows < 1 << 31)
        if count is not None:
            inside |= padding(rows.numel(), count)
        torch._assert_async(inside.all(), f"{name} must be in [0, 2**31)")
        return
    rows = _first(rows, count)
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < 1 << 31:
        raise ValueError(f"{name} must be in [0, 2**31), got {int(rows.min())} to {int(rows.max())}")


def _check_next_row(next_row: int | torch.Tensor) -> None:
    """Refuse a first row outside [0, 2**31), or a counter outside [0, 2**31], where all rows are taken."""
    if isinstance(next_row, torch.Tensor) and not on_host(next_row):
        inside = (next_row >= 0) & (next_row <= 1 << 31)
        torch._assert_async(inside, "next_row must be in [0, 2**31]")
    elif isinstance(next_row, torch.Tensor):
        if not 0 <= int(next_row) <= 1 << 31:
            raise ValueError(f"next_row must be in [0, 2**31], got {int(next_row)}")
    elif not 0 <= next_row < 1 << 31:
        raise ValueError(f"next_row must be in [0, 2**31), got {next_row}")


def launch_insert(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    next_row: int | torch.Tensor,
    free_rows: torch.Tensor | None,
    impl: str,
    count: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> Pair:
    """`hash_insert` without validation of shapes and the dispatcher, for callers inside the package."""
    chosen = implementation(impl, slot_keys)  # type: ignore[arg-type]
    written: dict[str, torch.Tensor | None] = {
        "slot_keys": slot_keys, "slot_rows": slot_rows, "status": status,
        "next_row": next_row if isinstance(next_row, torch.Tensor) else None,
    }  # fmt: skip
    check_no_overlap(written, {"keys": keys, "free_rows": free_rows, "count": count})
    size = keys.numel()
    _check_next_row(next_row)
    if free_rows is None:
        free_rows = keys.new_empty(0)
    else:
        free_rows = free_rows[:size].long()
        _check_range("free_rows", free_rows)
    used: int | torch.Tensor
    refused: int | torch.Tensor
    if chosen == "triton":
        from tritonrec.kernels.hash_table import triton_hash_table

        rows, inserted, used, refused = triton_hash_table.hash_insert(
            slot_keys, slot_rows, keys, next_row, free_rows, count
        )
    else:
        rows, inserted, refused = _insert_on_host(
            slot_keys, slot_rows, _first(keys, count), int(next_row), free_rows, chosen
        )
        rows, inserted = pad(rows, size, -1), pad(inserted, size, False)
        used = max(int(inserted.sum()) - free_rows.numel(), 0) if isinstance(next_row, torch.Tensor) else 0
    if status is not None:
        record(status, refused)
    elif int(refused):
        raise _refusal(slot_rows, size, int(refused), int(next_row), free_rows.numel())
    if isinstance(next_row, torch.Tensor):
        next_row += used
    return rows, inserted


def _insert_on_host(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    next_row: int,
    free_rows: torch.Tensor,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows, `inserted`, and how many new keys were refused, all or none."""
    on_host = _insert_cpu if impl == "cpu" else reference.hash_insert
    most = next_row + keys.numel() - free_rows.numel()
    # only new keys take rows, so they are counted before a refusal
    if most > 1 << 31:
        most = next_row + _new(slot_keys, slot_rows, keys, impl) - free_rows.numel()
    placed = on_host(slot_keys, slot_rows, keys, next_row, free_rows) if most <= 1 << 31 else None
    if placed is None:
        found = launch_find(slot_keys, slot_rows, keys, impl)
        return found, torch.zeros_like(found, dtype=torch.bool), int((found < 0).sum())
    return *placed, 0


def _insert_cpu(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    next_row: int,
    free_rows: torch.Tensor,
) -> Pair | None:
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
    return (rows, inserted) if reused >= 0 else None


def _new(slot_keys: torch.Tensor, slot_rows: torch.Tensor, keys: torch.Tensor, impl: str) -> int:
    return int((launch_find(slot_keys, slot_rows, keys, impl) < 0).sum())


def _refusal(slot_rows: torch.Tensor, keys: int, new: int, next_row: int, free: int) -> Exception:
    occupied = int((slot_rows >= 0).sum())
    if occupied + new <= slot_rows.numel():
        return ValueError(f"{new - free} new keys from row {next_row} pass the last int32 row")
    return HashTableFullError(
        f"{keys} keys do not fit into a table of {slot_rows.numel()} slots with {occupied} occupied: "
        "grow it with hash_grow first; nothing was inserted"
    )


def launch_find(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    impl: str,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    """`hash_find` without validation and without the dispatcher, for callers inside the package."""
    chosen = implementation(impl, slot_keys)  # type: ignore[arg-type]
    if chosen == "triton":
        from tritonrec.kernels.hash_table import triton_hash_table

        return triton_hash_table.hash_find(slot_keys, slot_rows, keys, count)
    size, keys = keys.numel(), _first(keys, count)
    if chosen == "cpu":
        from tritonrec.kernels.hash_table import numba_hash_table

        rows = torch.empty(keys.numel(), dtype=torch.int64)
        numba_hash_table.hash_find(_unsigned(slot_keys), slot_rows.numpy(), _unsigned(keys), rows.numpy())
    else:
        rows = reference.hash_find(slot_keys, slot_rows, keys)
    return pad(rows, size, -1)


def launch_assign(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    impl: str,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    """`hash_assign` without validation of shapes and the dispatcher, for callers inside the package."""
    read = {"slot_keys": slot_keys, "keys": keys, "rows": rows, "count": count}
    check_no_overlap({"slot_rows": slot_rows}, read)
    _check_range("rows", rows, count)
    chosen = implementation(impl, slot_keys)  # type: ignore[arg-type]
    if chosen == "triton":
        from tritonrec.kernels.hash_table import triton_hash_table

        return triton_hash_table.hash_assign(slot_keys, slot_rows, keys, rows, count)
    size, keys, rows = keys.numel(), _first(keys, count), _first(rows, count)
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
    else:
        before = reference.hash_assign(slot_keys, slot_rows, keys, rows)
    return pad(before, size, -1)


def launch_erase(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    impl: str,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    """`hash_erase` without validation and without the dispatcher, for callers inside the package."""
    check_no_overlap({"slot_rows": slot_rows}, {"slot_keys": slot_keys, "keys": keys, "count": count})
    chosen = implementation(impl, slot_keys)  # type: ignore[arg-type]
    if chosen == "triton":
        from tritonrec.kernels.hash_table import triton_hash_table

        return triton_hash_table.hash_erase(slot_keys, slot_rows, keys, count)
    size, keys = keys.numel(), _first(keys, count)
    if chosen == "cpu":
        from tritonrec.kernels.hash_table import numba_hash_table

        before = torch.empty(keys.numel(), dtype=torch.int64)
        numba_hash_table.hash_erase(_unsigned(slot_keys), slot_rows.numpy(), _unsigned(keys), before.numpy())
    else:
        before = reference.hash_erase(slot_keys, slot_rows, keys)
    return pad(before, size, -1)


def launch_grow(slot_keys: torch.Tensor, slot_rows: torch.Tensor, impl: str) -> Pair:
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


def _first(values: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    return values if count is None else values[: num_valid(count, values.numel())]


def _unsigned(keys: torch.Tensor):
    return keys.contiguous().numpy().view("uint64")


@custom_op("tritonrec::hash_insert", mutates_args=("slot_keys", "slot_rows"))
def _insert_op(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    next_row: int,
    free_rows: torch.Tensor | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_insert(slot_keys, slot_rows, keys, next_row, free_rows)
    return launch_insert(slot_keys, slot_rows, keys, next_row, free_rows, impl)


# An op of its own, since each argument that may be mutated costs time on a CPU, given or not.
@custom_op("tritonrec::hash_insert_padded", mutates_args=("slot_keys", "slot_rows", "row_counter", "status"))
def _insert_padded_op(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    next_row: int,
    free_rows: torch.Tensor | None,
    impl: str,
    count: torch.Tensor | None,
    row_counter: torch.Tensor | None,
    status: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`next_row` counts where there is no `row_counter`."""
    first_row = next_row if row_counter is None else row_counter
    check_insert(slot_keys, slot_rows, keys, first_row, free_rows, count, status)
    return launch_insert(slot_keys, slot_rows, keys, first_row, free_rows, impl, count, status)


@_insert_op.register_fake
@_insert_padded_op.register_fake
def _insert_fake(
    slot_keys, slot_rows, keys, next_row, free_rows, impl, count=None, row_counter=None, status=None
):
    return torch.empty_like(keys), torch.empty_like(keys, dtype=torch.bool)


@custom_op("tritonrec::hash_find", mutates_args=())
def _find_op(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    impl: str,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    check_lookup(slot_keys, slot_rows, keys, count)
    return launch_find(slot_keys, slot_rows, keys, impl, count)


@_find_op.register_fake
def _find_fake(slot_keys, slot_rows, keys, impl, count=None):
    return torch.empty_like(keys)


@custom_op("tritonrec::hash_assign", mutates_args=("slot_rows",))
def _assign_op(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    impl: str,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    check_assign(slot_keys, slot_rows, keys, rows, count)
    return launch_assign(slot_keys, slot_rows, keys, rows, impl, count)


@_assign_op.register_fake
def _assign_fake(slot_keys, slot_rows, keys, rows, impl, count=None):
    return torch.empty_like(keys)


@custom_op("tritonrec::hash_erase", mutates_args=("slot_rows",))
def _erase_op(
    slot_keys: torch.Tensor,
    slot_rows: torch.Tensor,
    keys: torch.Tensor,
    impl: str,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    check_lookup(slot_keys, slot_rows, keys, count)
    return launch_erase(slot_keys, slot_rows, keys, impl, count)


@_erase_op.register_fake
def _erase_fake(slot_keys, slot_rows, keys, impl, count=None):
    return torch.empty_like(keys)


@custom_op("tritonrec::hash_grow", mutates_args=())
def _grow_op(
    slot_keys: torch.Tensor, slot_rows: torch.Tensor, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    check_table(slot_keys, slot_rows)
    return launch_grow(slot_keys, slot_rows, impl)


@_grow_op.register_fake
def _grow_fake(slot_keys, slot_rows, impl):
    return slot_keys.new_empty(2 * slot_keys.shape[0]), slot_rows.new_empty(2 * slot_rows.shape[0])
