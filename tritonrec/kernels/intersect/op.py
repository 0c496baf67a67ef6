"""Common keys of two buffers: `intersect`, the dedicated kernel of dual-buffer pipelining."""

from __future__ import annotations

from typing import Literal, overload

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.intersect.register import INTERSECT, INTERSECT_PADDED

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
