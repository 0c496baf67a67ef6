# mypy: ignore-errors
"""The relative bias of HSTU attention in Triton, computed pair by pair from timestamps and two tables.

A None in a `Bias` compiles its part away. Buckets are exact: a difference of two int64 times is read as the
uint64 it is, and its highest bit found by a conversion that cannot round up.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Bias(NamedTuple):
    """The tables of the bias, and where a pair finds its entries."""

    pos_ptr: torch.Tensor | None
    base: int  # a pair's entry is base + sign * (column - row), at most `most`
    sign: int
    most: int
    ts_ptr: torch.Tensor | None
    last: int  # bucket
    row_times_ptr: torch.Tensor | None
    times_ptr: torch.Tensor | None
    factor: float


@triton.jit
def log2_of_difference(late, early):
    """floor(log2(max(1, late - early))) of int64 times, as int32."""
    rest = late - early  # wraps where the difference leaves int64, and is then read as uint64
    huge = (late > early) & (rest < 0)
    rest = tl.where((late > early) & (rest > 0), rest, 1)
    rest = rest & ~(rest >> 1)  # without its second bit it stays below the next power of two when rounded
    exponent = (rest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(huge, 63, exponent)


@triton.jit
def load_times(times_ptr, begin, row, length):
    """Timestamps of rows of a sequence; the rows themselves where there are no times."""
    if times_ptr is not None:
        # 0 serves behind the end: the mask hides those pairs whatever their bucket
        return tl.load(times_ptr + begin + row, mask=row < length, other=0)
    else:
        return row


@triton.jit
def position_of(row, column, bias):
    """Entry of the table of positions."""
    return tl.minimum(tl.maximum(bias.base + bias.sign * (column - row), 0), bias.most)


@triton.jit
def bucket_of(row_time, column_time, bias):
    """Entry of the table of times."""
    return tl.minimum(log2_of_difference(row_time, column_time), bias.last)


@triton.jit
def add_bias(x, row, column, row_time, column_time, bias):
    """x + factor * bias for places and times of two shapes that broadcast."""
    # Entries are looked up for hidden pairs too: the indices are clamped, and the mask comes later.
    if bias.pos_ptr is not None:
        x += bias.factor * tl.load(bias.pos_ptr + position_of(row, column, bias))
    if bias.ts_ptr is not None:
        x += bias.factor * tl.load(bias.ts_ptr + bucket_of(row_time, column_time, bias))
    return x


@triton.jit
def load_scales(scales_ptr, origin, row, length, hidden):
    """The scales of queries, 0 for rows without a query; 1 where one number serves all."""
    if scales_ptr is not None:
        return tl.load(scales_ptr + origin + row, mask=(row >= hidden) & (row < length), other=0.0)
    else:
        return tl.full(row.shape, 1.0, tl.float32)
