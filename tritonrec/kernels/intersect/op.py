"""Common keys of two buffers: `intersect`, the dedicated kernel of dual-buffer pipelining."""

from __future__ import annotations

from typing import Literal, overload

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar, first_valid, pad

Pair = tuple[torch.Tensor, torch.Tensor]
Padded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@overload
def intersect(
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    padded: Literal[False] = ...,
    left_count: torch.Tensor | None = ...,
    right_count: torch.Tensor | None = ...,
    table: torch.Tensor | None = ...,
    impl: Impl = ...,
) -> Pair: ...
@overload
def intersect(
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    padded: Literal[True],
    left_count: torch.Tensor | None = ...,
    right_count: torch.Tensor | None = ...,
    table: torch.Tensor | None = ...,
    impl: Impl = ...,
) -> Padded: ...
def intersect(
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    padded: bool = False,
    left_count: torch.Tensor | None = None,
    right_count: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> Pair | Padded:
    """Positions of the keys that are in both buffers, in order of the left position.

    Args:
        left: (A,) int64, distinct keys; A < 2**31.
        right: (B,) int64, distinct keys on the same device; B < 2**31.
        padded: results as long as the shorter buffer, and their number C as a tensor: no host waits for C.
        left_count, right_count: () int64, the number of valid keys of each buffer (`kernels.padding`).
        table: (S,) int32, what ``unique(..., table=True)`` gave with `right`, which saves building one. A
            table of other keys finds wrong matches or none, and reads no other memory.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        ``left_positions`` (C,) ascending and ``right_positions`` (C,), int64, with
        ``left[left_positions] == right[right_positions]``. With `padded` both are (min(A, B),) with -1
        from C on, and ``num_common`` () int64 comes third.

    Example: left ``[5, 9, 2]``, right ``[2, 5, 4]`` give ``[0, 2]`` and ``[1, 0]``.

    Distinctness is not checked: keys come from `unique`. With repeated keys the matches are unspecified.
    This is K(t) ∩ K(t+1) of dual-buffer synchronization (NestPipe, dual-buffer pipelining).
    """
    return (INTERSECT_PADDED if padded else INTERSECT)(left, right, left_count, right_count, table, impl=impl)


# Reference: common keys of two buffers as a loop over a dict.


def intersect_reference(left, right, left_count, right_count, _table, padded) -> tuple[torch.Tensor, ...]:
    """See `intersect`."""
    valid = first_valid(right, right_count).tolist()
    position_in_right = {key: position for position, key in enumerate(valid)}
    left_positions, right_positions = [], []
    for position, key in enumerate(first_valid(left, left_count).tolist()):
        if key in position_in_right:
            left_positions.append(position)
            right_positions.append(position_in_right[key])
    here, there = (
        torch.tensor(positions, dtype=torch.int64, device=left.device)
        for positions in (left_positions, right_positions)
    )
    return pad_common(here, there, min(left.numel(), right.numel()), padded)


def pad_common(
    left_positions: torch.Tensor, right_positions: torch.Tensor, size: int, padded: bool
) -> tuple[torch.Tensor, ...]:
    """The results of `intersect`; where keys of `left` are there twice, there may be more than `size`."""
    if not padded:
        return left_positions, right_positions
    found = (pad(positions[:size], size, -1) for positions in (left_positions, right_positions))
    return *found, left_positions.new_full((), min(left_positions.numel(), size))


def _check(left, right, left_count, right_count, table) -> None:
    for name, keys in (("left", left), ("right", right)):
        if keys.dtype != torch.int64 or keys.dim() != 1:
            raise ValueError(f"{name} must be 1-D int64, got shape {tuple(keys.shape)} {keys.dtype}")
    if left.numel() >= 1 << 31 or right.numel() >= 1 << 31:
        raise ValueError(f"intersect takes fewer than 2**31 keys, got {left.numel()} and {right.numel()}")
    check_scalar("left_count", left_count)
    check_scalar("right_count", right_count)
    if table is not None and (table.dtype != torch.int32 or table.dim() != 1):
        raise ValueError(f"table must be (S,) int32, got shape {tuple(table.shape)} {table.dtype}")


def _check_memory(table) -> None:
    if table is not None and table.numel() & (table.numel() - 1):
        raise ValueError(f"the slots of a table are a power of two, or none: got {table.numel()}")


def _fake(left):
    size = torch.library.get_ctx().new_dynamic_size()
    return left.new_empty(size), left.new_empty(size)


def _fake_padded(left, right):
    length = torch.sym_min(left.shape[0], right.shape[0])
    return left.new_empty(length), left.new_empty(length), left.new_empty(())


INTERSECT = Op(
    "intersect(Tensor left, Tensor right, Tensor? left_count, Tensor? right_count, Tensor? table) "
    "-> (Tensor, Tensor)",
    reference=intersect_reference, cpu="numba_intersect:intersect", triton="triton_intersect:intersect",
    check=_check, check_memory=_check_memory, fake=_fake, padded=False,
)  # fmt: skip
INTERSECT_PADDED = Op(
    "intersect_padded(Tensor left, Tensor right, Tensor? left_count, Tensor? right_count, Tensor? table) "
    "-> (Tensor, Tensor, Tensor)",
    reference=intersect_reference, cpu="numba_intersect:intersect", triton="triton_intersect:intersect",
    check=_check, check_memory=_check_memory, fake=_fake_padded, padded=True,
)  # fmt: skip
