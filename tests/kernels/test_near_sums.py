"""Promise: exact sums on the CPU are those of integers, wherever values leave the range in which a sum of
float64 rounds them, or totals the range in which no sum leaves int64.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.kernels.fixed_point.numba_fixed_point import CALM
from tritonrec.kernels.rows.numba_segment_sum import add_all, add_batch, add_products_batch

BITS = 20
LIMIT = np.float32(2.0 ** (62 - BITS))
EDGE = np.float32(2.0 ** (51 - BITS))  # of values that a sum rounds
below, above = (np.nextafter(EDGE, np.float32(end)) for end in (0, np.inf))
SIZES = [0.0, 2.0**-21, -3 * 2.0**-21, 0.7, below, EDGE, above, LIMIT / 2, np.nextafter(LIMIT, np.float32(0))]
BAD = [LIMIT, np.inf, np.nan]
TOTALS = [0, -5, 2**61 - 1, 2**61, 2**62 - 1, 2**62, 2**63 - 2**52, 2**63 - 1, -(2**62), -(2**63)]


def terms_of(row):
    """Of each value the integer, or None where it has none."""
    return [
        round(Fraction(float(value)) * 2**BITS) if math.isfinite(value) and abs(value) < LIMIT else None
        for value in row
    ]


def add_row(total, terms):
    """The place of the first term that cannot be added, or -1; then the total has changed."""
    sums = [None if term is None else old + term for old, term in zip(total, terms, strict=True)]
    bad = next((d for d, each in enumerate(sums) if each is None or not -(2**63) <= each < 2**63), -1)
    if bad < 0:
        total[:] = sums
    return bad


def expected(totals, rows, segments):
    """The totals after rows are added one by one, and the position of the first value that has no place."""
    totals = [list(each) for each in totals]
    for i, (row, segment) in enumerate(zip(rows, segments, strict=True)):
        bad = add_row(totals[segment], terms_of(row))
        if bad >= 0:
            return totals, i * len(row) + bad
    return totals, -1


@st.composite
def sums(draw, segments):
    dim, count = draw(st.integers(1, 11)), draw(st.integers(0, 13))
    sign = st.sampled_from([-1, 1])
    value = st.builds(lambda size, by: float(np.float32(size) * by), st.sampled_from(SIZES[:4]), sign)
    rows = [[draw(value) for _ in range(dim)] for _ in range(count)]
    odd = st.builds(lambda size, by: float(np.float32(size) * by), st.sampled_from(SIZES + BAD), sign)
    for _ in range(draw(st.integers(0, 3)) if count else 0):
        rows[draw(st.integers(0, count - 1))][draw(st.integers(0, dim - 1))] = draw(odd)
    totals = [[0] * dim for _ in range(segments)]
    for _ in range(draw(st.integers(0, 3))):
        totals[draw(st.integers(0, segments - 1))][draw(st.integers(0, dim - 1))] = draw(
            st.sampled_from(TOTALS)
        )
    return totals, rows, draw(st.lists(st.integers(0, segments - 1), min_size=count, max_size=count))


def check(call, totals, rows, segments):
    """`call` of flat arrays and the dimension against the integers."""
    out = np.array(totals, np.int64).reshape(-1)
    values = np.array(rows, np.float32).reshape(-1)
    want, bad = expected(totals, rows, segments)
    with np.errstate(invalid="ignore"):
        assert call(out, values, np.array(segments, np.int64), np.uintp(len(totals[0]))) == bad
    assert out.reshape(len(want), -1).tolist() == want


def all_rows(out, values, segments, dim):
    return add_all(out, values, dim, len(segments), dim, 2.0**BITS, LIMIT)


def batch_of_rows(out, values, segments, dim):
    none = np.empty(0, np.int64)
    return add_batch(out, dim, values, dim, segments, none, dim, 2.0**BITS, LIMIT)


def products(out, values, segments, dim):
    one = np.ones(len(segments), np.float32)
    return add_products_batch(out, dim, values, dim, one, segments, dim, np.uintp(1), 2.0**BITS, LIMIT)


@given(sums(segments=1))
def test_rows_of_one_sum(case):
    check(all_rows, *case)


@pytest.mark.parametrize("call", [batch_of_rows, products])
@given(case=sums(segments=3))
def test_rows_of_several_sums(call, case):
    check(call, *case)


@pytest.mark.parametrize("call", [all_rows, batch_of_rows, products])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("odd", [-EDGE, EDGE, below, above, LIMIT / 2, -LIMIT, np.nan, -np.inf])
def test_one_odd_value_at_each_place(call, rows, odd):
    generator = np.random.default_rng(rows)
    for place in range(rows * 9):
        values = generator.normal(size=(rows, 9)).astype(np.float32)
        values.reshape(-1)[place] = odd
        check(call, [[7] * 9], values.tolist(), [0] * rows)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("count", [CALM - 1, CALM, CALM + 1, 4 * CALM + 3])
def test_as_many_rows_as_a_look_at_the_totals_stands_for(count, sign):
    """From just below the bound each look finds less room, and the last ones none."""
    start = sign * (2**63 - 1 - (count - 1) * (int(below) * 2**BITS))
    check(all_rows, [[start, 0]], [[sign * float(below), 0.5]] * count, [0] * count)
