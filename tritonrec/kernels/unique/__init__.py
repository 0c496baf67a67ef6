"""Dedup of embedding keys: `unique`, first-occurrence order, no sort, independent of the schedule."""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.unique.reference import unique as _unique_reference

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def unique(keys: torch.Tensor, impl: Impl = "auto") -> Triple:
    """Distinct keys in order of first occurrence, where each key went, and how often it occurred.

    Args:
        keys: (K,) int64, any of the 2**64 values; K < 2**31.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        ``unique`` (U,), ``inverse`` (K,) and ``counts`` (U,), all int64, with ``unique[inverse] == keys``,
        ``counts.sum() == K``, and the first occurrences of ``unique`` in `keys` ascending.

    Example: keys ``[7, 3, 7, 7, 3]`` give unique ``[7, 3]``, inverse ``[0, 1, 0, 0, 1]``, counts ``[3, 2]``.

    This is the dedup before the key exchange, and again at the owner (MTGRBoost, two-stage ID dedup).
    """
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(f"keys must be (K,) int64, got shape {tuple(keys.shape)} {keys.dtype}")
    return torch.ops.tritonrec.unique(keys, impl)


def launch(keys: torch.Tensor, impl: str = "auto") -> Triple:
    """`unique` without validation and without the dispatcher, for callers inside the package."""
    if keys.numel() >= 1 << 31:
        raise ValueError(f"unique takes fewer than 2**31 keys, got {keys.numel()}")
    chosen = implementation(impl, keys)  # type: ignore[arg-type]
    if chosen == "cpu":
        from tritonrec.kernels.unique import numba_unique

        inverse = torch.empty(keys.numel(), dtype=torch.int64)
        array = keys.contiguous().numpy().view("uint64")
        order, counts = numba_unique.unique(array, inverse.numpy())
        return torch.from_numpy(order.view("int64")), inverse, torch.from_numpy(counts)
    if chosen == "triton":
        from tritonrec.kernels.unique import triton_unique

        return triton_unique.unique(keys)
    return _unique_reference(keys)


@torch.library.custom_op("tritonrec::unique", mutates_args=())
def _unique_op(keys: torch.Tensor, impl: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return launch(keys, impl)


@_unique_op.register_fake
def _unique_fake(keys: torch.Tensor, impl: str) -> Triple:
    size = torch.library.get_ctx().new_dynamic_size()
    return keys.new_empty(size), torch.empty_like(keys), keys.new_empty(size)
