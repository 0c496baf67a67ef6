# mypy: ignore-errors
"""Walks over the rows of a piece that are added up in int64, unchecked and checked.

A piece has at most 128 = 2**7 rows. So where each term is below 2**55, and the sum before below 2**62, no sum
on the way leaves int64, and no addition is checked. The walk notes what it met; where that passes the bound,
the caller walks the rows again with checks, from the same sum, and finds the position that the CPU finds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tritonrec.kernels.fixed_point.triton_fixed_point import (
    NONE,
    add_near,
    magnitude,
    round_to_fixed_point,
    without_zeros,
)

CALM_BITS = tl.constexpr(55)
"""Bits of terms of which 128 move a sum by no more than 2**62."""


AHEAD = tl.constexpr(32)
"""Rows of a float sum that are on their way from memory at once."""


@triton.jit
def load_row(
    i, values_ptr, source_ptr, factors_ptr, order_ptr, value_stride, scale, column, inside,
    GROUP: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """(values, occurrence) of row i of the sorted ones; see `segment_sum_kernel`."""
    if order_ptr is None:
        occurrence = i * scale
    else:
        occurrence = tl.load(order_ptr + i * scale)
    # occurrence -> row of `values`: by `source`; or row i itself, of sums; or the occurrence.
    if source_ptr is not None:
        row = tl.load(source_ptr + occurrence)
    else:
        row = i if UPPER else occurrence
    if factors_ptr is None:
        value = tl.load(values_ptr + row * value_stride + column, mask=inside, other=0)
    else:
        value = tl.load(values_ptr + row // GROUP * value_stride + column, mask=inside, other=0.0)
        value = tl.load(factors_ptr + row) * value
    return value, occurrence


@triton.jit
def fold_rows(
    total, begin, end, values_ptr, source_ptr, factors_ptr, order_ptr, value_stride, scale, column, inside,
    GROUP: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """The left fold of float rows: ((total + first) + second) + ..., each widened to float32."""
    grouped = begin + (tl.maximum(end - begin, 0) // AHEAD) * AHEAD
    for first in range(begin, grouped, AHEAD):
        # unrolled: additions wait for one another, and the loads of all these rows for none of them
        for ahead in tl.static_range(AHEAD):
            value, _occurrence = load_row(
                first + ahead, values_ptr, source_ptr, factors_ptr, order_ptr, value_stride, scale, column,
                inside, GROUP, UPPER,
            )  # fmt: skip
            total += value.to(tl.float32)
    for i in range(grouped, end):
        value, _occurrence = load_row(
            i, values_ptr, source_ptr, factors_ptr, order_ptr, value_stride, scale, column, inside, GROUP,
            UPPER,
        )  # fmt: skip
        total += value.to(tl.float32)
    return total


@triton.jit
def add_rows(
    total, begin, end, values_ptr, source_ptr, factors_ptr, order_ptr, value_stride, scale, column, inside,
    limit, near, ADD: tl.constexpr, GROUP: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """(total, loud): `total` is void where one is `loud`, of whose terms some may have passed the bound."""
    if ADD == "rounded":
        most = tl.zeros(column.shape, tl.int32)
    else:
        most = tl.zeros(column.shape, tl.int64)
    for i in range(begin, end):
        value, _occurrence = load_row(
            i, values_ptr, source_ptr, factors_ptr, order_ptr, value_stride, scale, column, inside, GROUP,
            UPPER,
        )  # fmt: skip
        if ADD == "rounded":
            most = tl.maximum(most, magnitude(value))
            total = add_near(total, value, limit)
        else:
            # An OR has the highest bit of the largest: enough to compare with a power of two.
            most |= bits_of_size(value)
            total += value
    if ADD == "rounded":
        # `begin` may be behind `end`, in a piece without rows.
        total = without_zeros(total, tl.maximum(end - begin, 0), limit)
        loud = most >= magnitude(near)
    else:
        loud = (most >> CALM_BITS) != 0
    return total, loud


@triton.jit
def bits_of_size(terms):
    """x or -x - 1 of int64 terms: what is below 2**b of -2**b to 2**b - 1."""
    return terms ^ (terms >> 63)


@triton.jit
def add_rows_checked(
    total, begin, end, values_ptr, source_ptr, factors_ptr, order_ptr, value_stride, scale, column, inside,
    unit, limit, dim, ADD: tl.constexpr, GROUP: tl.constexpr, UPPER: tl.constexpr,
):  # fmt: skip
    """(total, worst): the first position that has no term, or where the sum leaves int64, or NONE."""
    bad = tl.full(column.shape, NONE, tl.int64)
    for i in range(begin, end):
        value, occurrence = load_row(
            i, values_ptr, source_ptr, factors_ptr, order_ptr, value_stride, scale, column, inside, GROUP,
            UPPER,
        )  # fmt: skip
        term = value
        # True in the shape of the block: an int64 term always fits
        fits = inside | True
        if ADD == "rounded":
            term, fits = round_to_fixed_point(value, unit, limit)
        total, bad = sum_after(total, term, fits, bad, occurrence * dim + column)
    return total, tl.min(bad, axis=0)


@triton.jit
def sum_after(total, term, fits, bad, position):
    """(total + term, bad), with the positions of terms that do not fit and of sums that leave int64."""
    after = total + term
    # a wrapped sum has the sign that neither of its operands has
    fits = fits & (((total ^ after) & (term ^ after)) >= 0)
    # added all the same: the first bad position is what counts, and the caller discards the sum
    return after, tl.minimum(bad, tl.where(fits, NONE, position))
