"""Common keys of two buffers: `intersect`, the dedicated kernel of dual-buffer pipelining."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np
import torch

from tritonrec.kernels import murmur
from tritonrec.kernels.arguments import not_a_tensor
from tritonrec.kernels.dispatch import Impl, implementation, in_plain_eager
from tritonrec.kernels.intersect.reference import intersect as _intersect_reference
from tritonrec.kernels.padding import check_scalar, num_valid, pad
from tritonrec.kernels.registration import custom_op

Pair = tuple[torch.Tensor, torch.Tensor]
Padded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@overload
def intersect(
    left: torch.Tensor,
    right: torch.Tensor,
    impl: Impl = ...,
    *,
    padded: Literal[False] = ...,
    left_count: torch.Tensor | None = ...,
    right_count: torch.Tensor | None = ...,
) -> Pair: ...
@overload
def intersect(
    left: torch.Tensor,
    right: torch.Tensor,
    impl: Impl = ...,
    *,
    padded: Literal[True],
    left_count: torch.Tensor | None = ...,
    right_count: torch.Tensor | None = ...,
) -> Padded: ...
def intersect(
    left: torch.Tensor,
    right: torch.Tensor,
    impl: Impl = "auto",
    *,
    padded: bool = False,
    left_count: torch.Tensor | None = None,
    right_count: torch.Tensor | None = None,
) -> Pair | Padded:
    """Positions of the keys that both buffers hold, in order of the left position.

    Args:
        left: (A,) int64, distinct keys; A < 2**31.
        right: (B,) int64, distinct keys on the same device; B < 2**31.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
        padded: results as long as the shorter buffer, and their number C as a tensor: no host waits for C.
        left_count, right_count: () int64, the keys of each buffer that hold (`kernels.padding`).

    Returns:
        ``left_positions`` (C,) ascending and ``right_positions`` (C,), int64, with
        ``left[left_positions] == right[right_positions]``. With `padded` both are (min(A, B),) with -1
        from C on, and ``num_common`` () int64 comes third.

    Example: left ``[5, 9, 2]``, right ``[2, 5, 4]`` give ``[0, 2]`` and ``[1, 0]``.

    Distinctness is not checked: keys come from `unique`. With repeated keys the matches are unspecified.
    This is K(t) ∩ K(t+1) of dual-buffer synchronization (NestPipe, dual-buffer pipelining).
    """
    _check(left, right, left_count, right_count)
    if in_plain_eager(left, right, left_count, right_count):
        return launch(left, right, impl, left_count, right_count, padded)  # type: ignore[return-value]
    op = torch.ops.tritonrec.intersect_padded if padded else torch.ops.tritonrec.intersect
    return op(left, right, impl, left_count, right_count)


def _check(
    left: torch.Tensor,
    right: torch.Tensor,
    left_count: torch.Tensor | None,
    right_count: torch.Tensor | None,
) -> None:
    for name, keys in (("left", left), ("right", right)):
        if not isinstance(keys, torch.Tensor):
            raise not_a_tensor(name, keys)
        if keys.dtype != torch.int64 or keys.dim() != 1:
            raise ValueError(f"{name} must be 1-D int64, got shape {tuple(keys.shape)} {keys.dtype}")
    if left.device != right.device:
        raise ValueError(f"left is on {left.device}, right on {right.device}")
    check_scalar("left_count", left_count, left)
    check_scalar("right_count", right_count, right)


def launch(
    left: torch.Tensor,
    right: torch.Tensor,
    impl: str,
    left_count: torch.Tensor | None = None,
    right_count: torch.Tensor | None = None,
    padded: bool = False,
) -> tuple[torch.Tensor, ...]:
    """`intersect` without validation and without the dispatcher, for callers inside the package."""
    if max(left.numel(), right.numel()) >= 1 << 31:
        raise ValueError(f"intersect takes fewer than 2**31 keys, got {left.numel()} and {right.numel()}")
    chosen = implementation(impl, left)  # type: ignore[arg-type]
    if chosen == "triton":
        from tritonrec.kernels.intersect import triton_intersect

        return triton_intersect.intersect(left, right, left_count, right_count, padded)
    length = min(left.numel(), right.numel())
    if left_count is not None:
        left = left[: num_valid(left_count, left.numel())]
    if right_count is not None:
        right = right[: num_valid(right_count, right.numel())]
    found = _launch_cpu(left, right) if chosen == "cpu" else _intersect_reference(left, right)
    if not padded:
        return found
    # longer, where keys of `left` are there twice
    return (
        *(pad(positions[:length], length, -1) for positions in found),
        left.new_full((), min(found[0].numel(), length)),
    )


def _launch_cpu(left: torch.Tensor, right: torch.Tensor) -> Pair:
    from tritonrec.kernels.intersect import numba_intersect

    small, large = (right, left) if right.numel() <= left.numel() else (left, right)
    matched = torch.empty(large.numel(), dtype=torch.int64)
    small_keys, large_keys = (keys.contiguous().numpy().view("uint64") for keys in (small, large))
    common = numba_intersect.match(small_keys, large_keys, matched.numpy(), np.uint64(murmur.SECRET))
    if large is not left:
        in_left = torch.empty(left.numel(), dtype=torch.int64)
        numba_intersect.invert(matched.numpy(), in_left.numpy())
        matched = in_left
        common = int((in_left >= 0).sum())  # fewer, where keys of `right` are there twice
    left_positions, right_positions = (torch.empty(common, dtype=torch.int64) for _ in range(2))
    numba_intersect.compact(matched.numpy(), left_positions.numpy(), right_positions.numpy())
    return left_positions, right_positions


@custom_op("tritonrec::intersect", mutates_args=())
def _intersect_op(
    left: torch.Tensor,
    right: torch.Tensor,
    impl: str,
    left_count: torch.Tensor | None = None,
    right_count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(left, right, left_count, right_count)
    return launch(left, right, impl, left_count, right_count)  # type: ignore[return-value]


@_intersect_op.register_fake
def _intersect_fake(left, right, impl, left_count=None, right_count=None):
    size = torch.library.get_ctx().new_dynamic_size()
    return left.new_empty(size), left.new_empty(size)


@custom_op("tritonrec::intersect_padded", mutates_args=())
def _intersect_padded_op(
    left: torch.Tensor,
    right: torch.Tensor,
    impl: str,
    left_count: torch.Tensor | None = None,
    right_count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(left, right, left_count, right_count)
    return launch(left, right, impl, left_count, right_count, padded=True)  # type: ignore[return-value]


@_intersect_padded_op.register_fake
def _intersect_padded_fake(left, right, impl, left_count=None, right_count=None):
    length = torch.sym_min(left.shape[0], right.shape[0])
    return left.new_empty(length), left.new_empty(length), left.new_empty(())
