"""Dedup of embedding keys: `unique`, in order of first occurrence, without a sort, the same in every run."""

from __future__ import annotations

from typing import Literal, overload

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.unique.register import UNIQUE, UNIQUE_PADDED, UNIQUE_TABLE

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
