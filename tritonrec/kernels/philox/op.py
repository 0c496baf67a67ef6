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

from typing import overload

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.op import Op
from tritonrec.kernels.philox import reference
from tritonrec.kernels.philox.device_seed import DeviceSeed, Seed

__all__ = ["derive_seed", "initial_rows", "initial_rows_of_tables", "random_indices"]


@overload
def derive_seed(seed: int, stream: int, step: int) -> int: ...


@overload
def derive_seed(seed: DeviceSeed, stream: int, step: int) -> DeviceSeed: ...


def derive_seed(seed: Seed, stream: int, step: int) -> Seed:
    """A 64-bit signed seed for one stream and step: the first two words of philox((step, stream), seed).

    Args:
        seed: int64; where a graph is recorded, one in device memory (`kernels.philox.device_seed`).
    Raises:
        ValueError: a number that is no int64.
    """
    if isinstance(seed, DeviceSeed):
        return seed.derived(stream, step)
    if torch.compiler.is_dynamo_compiling():
        return _derive_in_graph(torch.empty(0, dtype=torch.int64, device="cpu"), seed, stream, step)
    return reference.derive_seed(seed, stream, step)


@torch.library.custom_op(
    "tritonrec::derive_seed", mutates_args=(),
    schema="(Tensor place, SymInt seed, SymInt stream, SymInt step) -> SymInt",
)  # fmt: skip
def _derive_in_graph(place: torch.Tensor, seed: int, stream: int, step: int) -> int:
    """`derive_seed` in a graph of torch.compile, to which a seed that differs from call to call is a symbol:
    those have no words of 64 bits. Inductor wants a tensor of each op, `place` (0,).
    """
    return reference.derive_seed(seed, stream, step)


@_derive_in_graph.register_fake
def _(place: torch.Tensor, seed: int, stream: int, step: int) -> int:
    # Its public door, `new_dynamic_size`, gives none below zero.
    return torch.library.get_ctx()._shape_env.create_unbacked_symint()


def initial_rows(
    seed: int, table: int, keys: torch.Tensor, dim: int, scale: float, *, impl: Impl = "auto"
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
    return INITIAL_ROWS(seed, table, keys, dim, scale, impl=impl)


def initial_rows_of_tables(
    seed: int,
    tables: torch.Tensor,
    keys: torch.Tensor,
    dims: torch.Tensor,
    scales: torch.Tensor,
    width: int,
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """`initial_rows` of several tables: row k is that of table, dim and scale k, with zeros behind it.

    Args:
        seed: int64.
        tables: (K,) int64, of which the low 32 bits count. keys: (K,) int64.
        dims: (K,) int64; all columns are drawn of one above `width`, and none of one below 0.
        scales: (K,) float32. width: columns W, 0 <= W < 2**30.
    Returns:
        (K, W) float32.
    Raises:
        ValueError: an argument of another shape, dtype, device or range.
    """
    return INITIAL_ROWS_OF_TABLES(seed, tables, keys, dims, scales, width, impl=impl)


def random_indices(
    seed: int,
    stream: int,
    step: int,
    sample_ids: torch.Tensor,
    positions: torch.Tensor,
    count: int,
    upper: int,
    *,
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
    return RANDOM_INDICES(seed, stream, step, sample_ids, positions, count, upper, impl=impl)


def _check_rows(letter: str, **given: torch.Tensor) -> None:
    """All are (letter,) int64, of as many rows as the first."""
    first, *_ = given
    for name, tensor in given.items():
        if tensor.dim() != 1 or tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be ({letter},) int64, got {tuple(tensor.shape)} {tensor.dtype}")
        if tensor.shape != given[first].shape:
            raise ValueError(f"{given[first].shape[0]} {first} but {tensor.shape[0]} {name}")


def _check_initial_rows(table, keys, dim, scale) -> None:
    _check_rows("K", keys=keys)
    if not 0 <= table < 2**32:
        raise ValueError(f"table must lie in [0, 2**32), got {table}")
    if not 0 <= dim < 2**30:
        raise ValueError(f"dim must lie in [0, 2**30), got {dim}")
    if not 0 <= scale < 3e38:
        raise ValueError(f"scale must be finite and not negative, got {scale}")


def _fake_initial_rows(keys, dim):
    return keys.new_empty(keys.shape[0], dim, dtype=torch.float32)


INITIAL_ROWS = Op(
    "initial_rows(int seed, int table, Tensor keys, int dim, float scale) -> Tensor",
    reference=reference.initial_rows, cpu="numba_philox:initial_rows", triton="triton_philox:initial_rows",
    check=_check_initial_rows, fake=_fake_initial_rows,
)  # fmt: skip


def _check_initial_rows_of_tables(tables, keys, dims, scales, width) -> None:
    if scales.dim() != 1 or scales.dtype != torch.float32:
        raise ValueError(f"scales must be (K,) float32, got {tuple(scales.shape)} {scales.dtype}")
    _check_rows("K", keys=keys, tables=tables, dims=dims)
    if scales.shape != keys.shape:
        raise ValueError(f"{keys.shape[0]} keys but {scales.shape[0]} scales")
    if not 0 <= width < 2**30:
        raise ValueError(f"width must lie in [0, 2**30), got {width}")


def _fake_initial_rows_of_tables(keys, width):
    return keys.new_empty(keys.shape[0], width, dtype=torch.float32)


INITIAL_ROWS_OF_TABLES = Op(
    "initial_rows_of_tables(int seed, Tensor tables, Tensor keys, Tensor dims, Tensor scales, int width) "
    "-> Tensor",
    reference=reference.initial_rows_of_tables, cpu="numba_philox:initial_rows_of_tables",
    triton="triton_philox:initial_rows_of_tables",
    check=_check_initial_rows_of_tables, fake=_fake_initial_rows_of_tables,
)  # fmt: skip


def _check_random_indices(sample_ids, positions, count, upper) -> None:
    _check_rows("T", sample_ids=sample_ids, positions=positions)
    if not 0 <= count < 2**30:
        raise ValueError(f"count must lie in [0, 2**30), got {count}")
    if not 1 <= upper <= 2**32:
        raise ValueError(f"upper must lie in [1, 2**32], got {upper}")


def _fake_random_indices(sample_ids, count):
    return sample_ids.new_empty(sample_ids.shape[0], count)


RANDOM_INDICES = Op(
    "random_indices(int seed, int stream, int step, Tensor sample_ids, Tensor positions, int count, "
    "int upper) -> Tensor",
    reference=reference.random_indices, cpu="numba_philox:random_indices",
    triton="triton_philox:random_indices",
    check=_check_random_indices, fake=_fake_random_indices,
)  # fmt: skip
