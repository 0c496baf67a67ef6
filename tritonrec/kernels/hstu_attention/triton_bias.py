# mypy: ignore-errors
"""The relative bias of HSTU attention in Triton, computed pair by pair from timestamps and two tables.

`bias` are (pos_ptr, base, sign, most, ts_ptr, last, row_times_ptr, times_ptr, factor), see `bias_of`; a None
compiles its part away. Buckets are exact: a difference of two int64 times is read as the uint64 it is, and
its highest bit found by a conversion that cannot round up.
"""

import triton
import triton.language as tl


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
        return tl.load(times_ptr + begin + row, mask=row < length, other=0)
    else:
        return row


@triton.jit
def position_of(row, column, bias):
    """Entry of the table of positions."""
    _, base, sign, most, _, _, _, _, _ = bias
    return tl.minimum(tl.maximum(base + sign * (column - row), 0), most)


@triton.jit
def bucket_of(row_time, column_time, bias):
    """Entry of the table of times."""
    _, _, _, _, _, last, _, _, _ = bias
    return tl.minimum(log2_of_difference(row_time, column_time), last)


@triton.jit
def add_bias(x, row, column, row_time, column_time, bias):
    """x + factor * bias for places and times of two shapes that broadcast."""
    pos_ptr, _, _, _, ts_ptr, _, _, _, factor = bias
    if pos_ptr is not None:
        x += factor * tl.load(pos_ptr + position_of(row, column, bias))
    if ts_ptr is not None:
        x += factor * tl.load(ts_ptr + bucket_of(row_time, column_time, bias))
    return x


@triton.jit
def load_scales(scales_ptr, origin, row, length, hidden):
    """The scales of queries, 0 for rows without a query; 1 where one number serves all."""
    if scales_ptr is not None:
        return tl.load(scales_ptr + origin + row, mask=(row >= hidden) & (row < length), other=0.0)
    else:
        return tl.full(row.shape, 1.0, tl.float32)
