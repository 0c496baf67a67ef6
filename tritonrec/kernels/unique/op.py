"""Dedup of embedding keys: `unique`, in order of first occurrence, without a sort, the same in every run."""

from __future__ import annotations

from typing import Literal, overload

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar, num_valid, pad

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Padded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
WithTable = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@overload
def unique(
    keys: torch.Tensor, *, padded: Literal[False] = ..., count: torch.Tensor | None = ..., impl: Impl = ...
) -> Triple: ...
@overload
def unique(
    keys: torch.Tensor,
    *,
    padded: Literal[True],
    table: Literal[False] = ...,
    count: torch.Tensor | None = ...,
    impl: Impl = ...,
) -> Padded: ...
@overload
def unique(
    keys: torch.Tensor,
    *,
    padded: Literal[True],
    table: Literal[True],
    count: torch.Tensor | None = ...,
    impl: Impl = ...,
) -> WithTable: ...
def unique(
    keys: torch.Tensor,
    *,
    padded: bool = False,
    table: bool = False,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> Triple | Padded | WithTable:
    """Distinct keys in order of first occurrence, where each key went, and how often it occurred.

    Args:
        keys: (K,) int64, any of the 2**64 values; K < 2**31.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
        padded: results as long as the keys, and their number U as a tensor: no host waits for U.
        table: the scratch table comes last, from which `intersect` finds these keys without one of its own.
        count: () int64, number of valid leading keys; the others are ignored (`kernels.padding`).

    Returns:
        ``unique`` (U,), ``inverse`` (K,) and ``counts`` (U,), all int64. Over the valid keys
        ``unique[inverse] == keys`` and ``counts.sum()`` is their number; ``unique`` is in order of first
        occurrence. Behind `count` the inverse is -1. With `padded` ``unique`` and ``counts`` are (K,) with
        zeros from U on, and ``num_unique`` () int64 comes fourth. With `table` ``table`` (S,) int32 comes
        fifth, whose slots hold positions in ``unique``, or -1. Slots depend on the process and the schedule,
        and on the CPU there are none (S = 0).
    Raises:
        ValueError: keys or a count that do not fit; `table` without `padded`.

    Example: keys ``[7, 3, 7, 7, 3]`` give unique ``[7, 3]``, inverse ``[0, 1, 0, 0, 1]``, counts ``[3, 2]``;
    padded ``[7, 3, 0, 0, 0]``, ``[0, 1, 0, 0, 1]``, ``[3, 2, 0, 0, 0]`` and ``2``.

    This is the dedup before the key exchange, and again at the owner (MTGRBoost, two-stage ID dedup).
    """
    if not table:
        return (UNIQUE_PADDED if padded else UNIQUE)(keys, count, impl=impl)
    if not padded:
        raise ValueError("unique gives its table with padded=True")
    return UNIQUE_TABLE(keys, count, impl=impl)


# Reference: dedup as a loop over a dict.


def unique_reference(keys, count, padded, table=False) -> tuple[torch.Tensor, ...]:
    """See `unique`."""
    position_of: dict[int, int] = {}
    inverse: list[int] = []
    counts: list[int] = []
    for key in keys[: num_valid(count, keys.numel())].tolist():
        # A dict keeps the order of first insertion: positions are in order of first occurrence.
        position = position_of.setdefault(key, len(position_of))
        if position == len(counts):
            counts.append(0)
        counts[position] += 1
        inverse.append(position)
    order, inverse_, counts_ = (
        torch.tensor(values, dtype=torch.int64, device=keys.device)
        for values in (list(position_of), inverse, counts)
    )
    return pad_unique(order, inverse_, counts_, keys.numel(), padded, table)


def pad_unique(
    order: torch.Tensor,
    inverse: torch.Tensor,
    counts: torch.Tensor,
    size: int,
    padded: bool,
    table: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Results over the valid keys as results over all `size` keys; a `table` without slots."""
    inverse = pad(inverse, size, -1)
    if not padded:
        return order, inverse, counts
    slots = (order.new_empty(0, dtype=torch.int32),) * table
    return pad(order, size, 0), inverse, pad(counts, size, 0), order.new_full((), order.numel()), *slots


def _check(keys, count) -> None:
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(f"keys must be (K,) int64, got shape {tuple(keys.shape)} {keys.dtype}")
    if keys.numel() >= 1 << 31:
        raise ValueError(f"unique takes fewer than 2**31 keys, got {keys.numel()}")
    check_scalar("count", count)


def _fake(keys):
    size = torch.library.get_ctx().new_dynamic_size()
    return keys.new_empty(size), torch.empty_like(keys), keys.new_empty(size)


def _fake_padded(keys):
    return (*(torch.empty_like(keys) for _ in range(3)), keys.new_empty(()))


def _fake_table(keys):
    slots = torch.library.get_ctx().new_dynamic_size()
    return *_fake_padded(keys), keys.new_empty(slots, dtype=torch.int32)


UNIQUE = Op(
    "unique(Tensor keys, Tensor? count) -> (Tensor, Tensor, Tensor)",
    reference=unique_reference, cpu="numba_unique:unique", triton="triton_unique:unique",
    check=_check, fake=_fake, padded=False,
)  # fmt: skip
UNIQUE_PADDED = Op(
    "unique_padded(Tensor keys, Tensor? count) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=unique_reference, cpu="numba_unique:unique", triton="triton_unique:unique",
    check=_check, fake=_fake_padded, padded=True,
)  # fmt: skip
UNIQUE_TABLE = Op(
    "unique_table(Tensor keys, Tensor? count) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=unique_reference, cpu="numba_unique:unique", triton="triton_unique:unique",
    check=_check, fake=_fake_table, padded=True, table=True,
)  # fmt: skip
