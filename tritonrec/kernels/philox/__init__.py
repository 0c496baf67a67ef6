"""Random numbers that are a function of what they are for, never of when they are drawn.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
section 5.3) maps a 128-bit counter and a 64-bit key to four 32-bit words. Counter and key carry the
identity of the number, so arrival order, rank, micro-batch and restart cannot change it::

    words of         c0, c1         c2                         c3        key
    initial_rows     embedding key  INITIAL_ROWS | column//4   table     seed
    random_indices   sample id      RANDOM_INDICES | j//4      position  derive_seed(seed, stream, step)

The four high bits of c2 tag the use, so two uses under one seed never share a word. Other kernels draw
through the same functions: `numba_philox.philox4x32` and `triton_philox.philox4x32`, with `DROPOUT`.

All implementations agree in every bit: integers, one exact conversion and one float32 product.
"""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.arguments import check_tensors, not_a_tensor
from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.philox import reference
from tritonrec.kernels.philox.reference import halves, philox4x32
from tritonrec.kernels.registration import custom_op

INITIAL_ROWS = 0 << 28
RANDOM_INDICES = 1 << 28
DROPOUT = 2 << 28

__all__ = ["DROPOUT", "INITIAL_ROWS", "RANDOM_INDICES", "derive_seed", "initial_rows", "random_indices"]


def derive_seed(seed: int, stream: int, step: int) -> int:
    """A 64-bit signed seed for one stream and step: the first two words of philox((step, stream), seed).

    Raises:
        ValueError: a number that is no int64.
    """
    for name, number in (("seed", seed), ("stream", stream), ("step", step)):
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"{name} must lie in [-2**63, 2**63), got {number}")
    w0, w1, _, _ = philox4x32((*halves(step), *halves(stream)), halves(seed))
    word = w1 << 32 | w0
    return word - (1 << 64) if word >> 63 else word


def initial_rows(
    seed: int, table: int, keys: torch.Tensor, dim: int, scale: float, impl: Impl = "auto"
) -> torch.Tensor:
    """Initial embedding rows, uniform in [-scale, scale): a pure function of (seed, table, key, column).

    Args:
        seed: int64. table: which table, 0 <= table < 2**32.
        keys: (K,) int64, every bit pattern legal, repeats allowed.
        dim: columns D, 0 <= D < 2**30. scale: finite and >= 0, rounded to float32.
    Returns:
        (K, D) float32: ((word >> 8) - 2**23) * 2**-23, which is exact, times scale, rounded once.
    Raises:
        ValueError: an argument of another shape, dtype or range.
    """
    _check_initial_rows(table, keys, dim, scale)
    return _initial_rows(seed, table, keys, dim, scale, impl)


def _check_initial_rows(table: int, keys: torch.Tensor, dim: int, scale: float) -> None:
    if not isinstance(keys, torch.Tensor):
        raise not_a_tensor("keys", keys)
    if keys.dim() != 1 or keys.dtype != torch.int64:
        raise ValueError(f"keys must be (K,) int64, got {tuple(keys.shape)} {keys.dtype}")
    if not 0 <= table < 2**32:
        raise ValueError(f"table must lie in [0, 2**32), got {table}")
    if not 0 <= dim < 2**30:
        raise ValueError(f"dim must lie in [0, 2**30), got {dim}")
    if not 0 <= scale < 3e38:
        raise ValueError(f"scale must be finite and not negative, got {scale}")


@custom_op("tritonrec::initial_rows", mutates_args=())
def _initial_rows(
    seed: int, table: int, keys: torch.Tensor, dim: int, scale: float, impl: str
) -> torch.Tensor:
    _check_initial_rows(table, keys, dim, scale)
    chosen = implementation(impl, keys)  # type: ignore[arg-type]
    if chosen == "reference":
        return reference.initial_rows(halves(seed), table, INITIAL_ROWS, keys.cpu(), dim, scale).to(
            keys.device
        )
    rows = torch.empty(keys.numel(), dim, dtype=torch.float32, device=keys.device)
    if rows.numel() == 0:
        return rows
    keys = keys.contiguous()
    if chosen == "cpu":
        from tritonrec.kernels.philox import numba_philox

        k0, k1 = halves(seed)
        numba_philox.initial_rows(
            np.uint32(k0),
            np.uint32(k1),
            np.uint32(table),
            np.int64(INITIAL_ROWS),
            keys.numpy(),
            np.float32(scale),
            rows.numpy(),
        )
    else:
        from tritonrec.kernels.philox import triton_philox

        triton_philox.initial_rows(seed, table, INITIAL_ROWS, keys, scale, rows)
    return rows


@_initial_rows.register_fake
def _(seed, table, keys, dim, scale, impl):
    return keys.new_empty(keys.shape[0], dim, dtype=torch.float32)


def random_indices(
    seed: int,
    stream: int,
    step: int,
    sample_ids: torch.Tensor,
    positions: torch.Tensor,
    count: int,
    upper: int,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Random integers in [0, upper), `count` per row: a pure function of all arguments, row by row.

    A word is mapped by the high half of word * upper, so an index is drawn with a probability that differs
    from 1 / upper by less than 2**-32: relative bias below upper / 2**32 (2.4e-4 for a million items).

    Args:
        seed, stream, step: int64; they derive the Philox key (`derive_seed`).
        sample_ids: (T,) int64. positions: (T,) int64, of which the low 32 bits count.
        count: columns N, 0 <= N < 2**30. upper: 1 <= upper <= 2**32.
    Returns:
        (T, N) int64.
    Raises:
        ValueError: an argument of another shape, dtype, device or range.
    """
    _check_random_indices(sample_ids, positions, count, upper)
    return _random_indices(seed, stream, step, sample_ids, positions, count, upper, impl)


def _check_random_indices(sample_ids: torch.Tensor, positions: torch.Tensor, count: int, upper: int) -> None:
    check_tensors(sample_ids=sample_ids, positions=positions)
    for name, tensor in (("sample_ids", sample_ids), ("positions", positions)):
        if tensor.dim() != 1 or tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be (T,) int64, got {tuple(tensor.shape)} {tensor.dtype}")
    if sample_ids.shape[0] != positions.shape[0]:
        raise ValueError(f"{sample_ids.shape[0]} sample_ids but {positions.shape[0]} positions")
    if not 0 <= count < 2**30:
        raise ValueError(f"count must lie in [0, 2**30), got {count}")
    if not 1 <= upper <= 2**32:
        raise ValueError(f"upper must lie in [1, 2**32], got {upper}")


@custom_op("tritonrec::random_indices", mutates_args=())
def _random_indices(
    seed: int,
    stream: int,
    step: int,
    sample_ids: torch.Tensor,
    positions: torch.Tensor,
    count: int,
    upper: int,
    impl: str,
) -> torch.Tensor:
    _check_random_indices(sample_ids, positions, count, upper)
    chosen = implementation(impl, sample_ids)  # type: ignore[arg-type]
    derived = derive_seed(seed, stream, step)
    if chosen == "reference":
        return reference.random_indices(
            halves(derived), RANDOM_INDICES, sample_ids, positions, count, upper
        ).to(sample_ids.device)
    indices = sample_ids.new_empty(sample_ids.numel(), count)
    if indices.numel() == 0:
        return indices
    sample_ids, positions = sample_ids.contiguous(), positions.contiguous()
    if chosen == "cpu":
        from tritonrec.kernels.philox import numba_philox

        k0, k1 = halves(derived)
        numba_philox.random_indices(
            np.uint32(k0),
            np.uint32(k1),
            np.int64(RANDOM_INDICES),
            sample_ids.numpy(),
            positions.numpy(),
            np.uint64(upper),
            indices.numpy(),
        )
    else:
        from tritonrec.kernels.philox import triton_philox

        triton_philox.random_indices(derived, RANDOM_INDICES, sample_ids, positions, upper, indices)
    return indices


@_random_indices.register_fake
def _(seed, stream, step, sample_ids, positions, count, upper, impl):
    return sample_ids.new_empty(sample_ids.shape[0], count)
