"""Dedup of embedding keys: `unique`, first-occurrence order, no sort, independent of the schedule."""

from __future__ import annotations

from typing import Literal, overload

import torch

from tritonrec.kernels.arguments import not_a_tensor
from tritonrec.kernels.dispatch import Impl, implementation, in_plain_eager
from tritonrec.kernels.padding import check_scalar, held, pad
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.unique.reference import unique as _unique_reference

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Padded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@overload
def unique(
    keys: torch.Tensor, impl: Impl = ..., *, padded: Literal[False] = ..., count: torch.Tensor | None = ...
) -> Triple: ...
@overload
def unique(
    keys: torch.Tensor, impl: Impl = ..., *, padded: Literal[True], count: torch.Tensor | None = ...
) -> Padded: ...
def unique(
    keys: torch.Tensor, impl: Impl = "auto", *, padded: bool = False, count: torch.Tensor | None = None
) -> Triple | Padded:
    """Distinct keys in order of first occurrence, where each key went, and how often it occurred.

    Args:
        keys: (K,) int64, any of the 2**64 values; K < 2**31.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
        padded: results as long as the keys, and their number U as a tensor: no host waits for U.
        count: () int64, the keys that hold; the others are passed over (`kernels.padding`).

    Returns:
        ``unique`` (U,), ``inverse`` (K,) and ``counts`` (U,), all int64, with ``unique[inverse] == keys``,
        ``counts.sum() == K``, and the first occurrences of ``unique`` in `keys` ascending. Behind `count`
        the inverse is -1. With `padded` ``unique`` and ``counts`` are (K,) with zeros from U on, and
        ``num_unique`` () int64 comes fourth.

    Example: keys ``[7, 3, 7, 7, 3]`` give unique ``[7, 3]``, inverse ``[0, 1, 0, 0, 1]``, counts ``[3, 2]``;
    padded ``[7, 3, 0, 0, 0]``, ``[0, 1, 0, 0, 1]``, ``[3, 2, 0, 0, 0]`` and ``2``.

    This is the dedup before the key exchange, and again at the owner (MTGRBoost, two-stage ID dedup).
    """
    _check(keys, count)
    if in_plain_eager(keys, count):
        return launch(keys, impl, count, padded)  # type: ignore[return-value]
    op = torch.ops.tritonrec.unique_padded if padded else torch.ops.tritonrec.unique
    return op(keys, impl, count)


def _check(keys: torch.Tensor, count: torch.Tensor | None) -> None:
    if not isinstance(keys, torch.Tensor):
        raise not_a_tensor("keys", keys)
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(f"keys must be (K,) int64, got shape {tuple(keys.shape)} {keys.dtype}")
    check_scalar("count", count, keys)


def launch(
    keys: torch.Tensor, impl: str, count: torch.Tensor | None = None, padded: bool = False
) -> tuple[torch.Tensor, ...]:
    """`unique` without validation and without the dispatcher, for callers inside the package."""
    if keys.numel() >= 1 << 31:
        raise ValueError(f"unique takes fewer than 2**31 keys, got {keys.numel()}")
    chosen = implementation(impl, keys)  # type: ignore[arg-type]
    if chosen == "triton":
        from tritonrec.kernels.unique import triton_unique

        return triton_unique.unique(keys, count, padded)
    size = keys.numel()
    if count is not None:
        keys = keys[: held(count, size)]
    if chosen == "cpu":
        from tritonrec.kernels.unique import numba_unique

        inverse = torch.empty(keys.numel(), dtype=torch.int64)
        array = keys.contiguous().numpy().view("uint64")
        found, times = numba_unique.unique(array, inverse.numpy())
        order, counts = torch.from_numpy(found.view("int64")), torch.from_numpy(times)
    else:
        order, inverse, counts = _unique_reference(keys)
    inverse = pad(inverse, size, -1)
    if not padded:
        return order, inverse, counts
    return pad(order, size, 0), inverse, pad(counts, size, 0), keys.new_full((), order.numel())


@custom_op("tritonrec::unique", mutates_args=())
def _unique_op(
    keys: torch.Tensor, impl: str, count: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(keys, count)
    return launch(keys, impl, count)  # type: ignore[return-value]


@_unique_op.register_fake
def _unique_fake(keys: torch.Tensor, impl: str, count: torch.Tensor | None = None) -> Triple:
    size = torch.library.get_ctx().new_dynamic_size()
    return keys.new_empty(size), torch.empty_like(keys), keys.new_empty(size)


@custom_op("tritonrec::unique_padded", mutates_args=())
def _unique_padded_op(
    keys: torch.Tensor, impl: str, count: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(keys, count)
    return launch(keys, impl, count, padded=True)  # type: ignore[return-value]


@_unique_padded_op.register_fake
def _unique_padded_fake(keys: torch.Tensor, impl: str, count: torch.Tensor | None = None) -> Padded:
    return (*(keys.new_empty(keys.shape) for _ in range(3)), keys.new_empty(()))  # type: ignore[return-value]
