"""Key routing: `owner_of` names the rank that owns a key, `bucketize` groups keys by owner."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import not_a_tensor
from tritonrec.kernels.bucketize import reference
from tritonrec.kernels.dispatch import Impl, implementation, in_plain_eager
from tritonrec.kernels.padding import check_scalar, num_valid
from tritonrec.kernels.registration import custom_op

Pair = tuple[torch.Tensor, torch.Tensor]


def owner_of(keys: torch.Tensor, world_size: int, impl: Impl = "auto") -> torch.Tensor:
    """The rank that owns each key: ``(high 32 bits of murmur(key)) * world_size >> 32``.

    Args:
        keys: (K,) int64, any of the 2**64 values.
        world_size: number of ranks, 1 <= world_size < 2**31.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        (K,) int64 in [0, world_size). The multiply-shift maps the hash to ranks evenly without a division
        (Lemire 2019, "Fast random integer generation in an interval", section 3).
    """
    _validate(keys, world_size)
    if type(world_size) is int and in_plain_eager(keys):
        return launch_owner_of(keys, world_size, impl)
    return torch.ops.tritonrec.owner_of(keys, world_size, impl)


def bucketize(
    keys: torch.Tensor, world_size: int, impl: Impl = "auto", *, count: torch.Tensor | None = None
) -> Pair:
    """Group keys by owner, stable inside a bucket.

    Args:
        keys: (K,) int64, any of the 2**64 values.
        world_size: number of ranks, 1 <= world_size < 2**31.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
        count: () int64, the keys that hold; the others have no owner (`kernels.padding`).

    Returns:
        ``permutation`` (K,) int64 such that ``keys[permutation]`` lists rank 0's keys first, then rank 1's,
        each in their original order, and ``counts`` (world_size,) int64, the split sizes of the key
        all-to-all. Positions behind `count` stay where they are.
    """
    _validate(keys, world_size, count)
    if type(world_size) is int and in_plain_eager(keys, count):
        return launch(keys, world_size, impl, count)
    return torch.ops.tritonrec.bucketize(keys, world_size, impl, count)


def _validate(keys: torch.Tensor, world_size: int, count: torch.Tensor | None = None) -> None:
    if not isinstance(keys, torch.Tensor):
        raise not_a_tensor("keys", keys)
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(f"keys must be (K,) int64, got shape {tuple(keys.shape)} {keys.dtype}")
    if not 1 <= world_size < 1 << 31:
        raise ValueError(f"world_size must be in [1, 2**31), got {world_size}")
    check_scalar("count", count, keys)


def launch_owner_of(keys: torch.Tensor, world_size: int, impl: str = "auto") -> torch.Tensor:
    """`owner_of` without validation and without the dispatcher, for callers inside the package."""
    chosen = implementation(impl, keys)  # type: ignore[arg-type]
    if chosen == "cpu":
        from tritonrec.kernels.bucketize import numba_bucketize

        owners = torch.empty(keys.numel(), dtype=torch.int64)
        numba_bucketize.owner_of(keys.contiguous().numpy().view("uint64"), world_size, owners.numpy())
        return owners
    if chosen == "triton":
        from tritonrec.kernels.bucketize import triton_bucketize

        return triton_bucketize.owner_of(keys, world_size)
    return reference.owner_of(keys, world_size)


def launch(keys: torch.Tensor, world_size: int, impl: str, count: torch.Tensor | None = None) -> Pair:
    """`bucketize` without validation and without the dispatcher, for callers inside the package."""
    chosen = implementation(impl, keys)  # type: ignore[arg-type]
    if chosen == "triton":
        from tritonrec.kernels.bucketize import triton_bucketize

        return triton_bucketize.bucketize(keys, world_size, count)
    if count is not None:
        first = num_valid(count, keys.numel())
        permutation, counts = launch(keys[:first], world_size, impl)
        return torch.cat([permutation, torch.arange(first, keys.numel(), device=keys.device)]), counts
    if chosen == "cpu":
        from tritonrec.kernels.bucketize import numba_bucketize

        owners = launch_owner_of(keys, world_size, impl)
        counts = torch.empty(world_size, dtype=torch.int64)
        permutation = torch.empty(keys.numel(), dtype=torch.int64)
        numba_bucketize.bucketize(owners.numpy(), counts.numpy(), permutation.numpy())
        return permutation, counts
    return reference.bucketize(keys, world_size)


@custom_op("tritonrec::owner_of", mutates_args=())
def _owner_of_op(keys: torch.Tensor, world_size: int, impl: str) -> torch.Tensor:
    _validate(keys, world_size)
    return launch_owner_of(keys, world_size, impl)


@_owner_of_op.register_fake
def _owner_of_fake(keys: torch.Tensor, world_size: int, impl: str) -> torch.Tensor:
    return torch.empty_like(keys)


@custom_op("tritonrec::bucketize", mutates_args=())
def _bucketize_op(
    keys: torch.Tensor, world_size: int, impl: str, count: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    _validate(keys, world_size, count)
    return launch(keys, world_size, impl, count)


@_bucketize_op.register_fake
def _bucketize_fake(
    keys: torch.Tensor, world_size: int, impl: str, count: torch.Tensor | None = None
) -> Pair:
    return torch.empty_like(keys), keys.new_empty(world_size)
