"""Promise: additions that a bound leaves unchecked are right up to the bound; beyond it each is checked."""

from unittest import mock

import pytest
import torch
from impls import TRITON, on
from speeds import slow_except, slow_on_triton
from test_exact_gradients import norm_arguments

from tritonrec.kernels import dispatch
from tritonrec.kernels.fixed_point.errors import ExactSumError
from tritonrec.kernels.fixed_point.op import to_fixed_point
from tritonrec.kernels.linear.op import linear_weight_grad
from tritonrec.kernels.norm_mul_dropout.op import (
    NORM_MUL_DROPOUT_BACKWARD_EXACT,
    NORM_MUL_DROPOUT_BACKWARD_INTO,
)
from tritonrec.kernels.packed_rows.op import add_packed_rows, pack_rows
from tritonrec.kernels.rows.op import ProductTerms, segment_sum

IMPLS = ["cpu", TRITON]
BITS, PART = 36, 128
LEAST, MOST = -(2**63), 2**63 - 1
ROWS = 1, PART - 1, PART, PART + 1, 3 * PART + 2


def folded(start, terms):
    """(the sum, None), or (None, the first term with which it leaves int64)."""
    for place, term in enumerate(terms):
        start += term
        if not LEAST <= start <= MOST:
            return None, place
    return start, None


def alternating(size):
    """+size, -size, ...: a sum that leaves int64 and comes back is an error too."""
    return lambda rows: [size if row % 2 == 0 else -size for row in range(rows)]


def constant(size):
    return lambda rows: [size] * rows


TERMS = {  # the sum before, and the terms
    "the most that is not checked": (2**62 - 1, constant(2**55 - 1)),
    "the least that is not checked": (-(2**62), constant(-(2**55))),
    "a bit more": (2**62 - 1, constant(2**56 - 1)),
    "a bit less": (-(2**62), constant(-(2**56))),
    "a bit more in 24 bits": (2**62 - 1, constant(2**55 + 2**32)),
    "a bit less in 24 bits": (-(2**62), constant(-(2**55) - 2**32)),
    "too much before the last": (2**62 - 1, lambda rows: [2**62] * (rows - 1) + [1]),
    "one term more than fits": (2**62, constant(2**55)),
    "one term less than fits": (-(2**62), constant(-(2**55) - 1)),
    "at the end": (MOST, constant(1)),
    "at the beginning": (LEAST, constant(-1)),
    "nothing at the end": (MOST, constant(0)),
    "there and back": (MOST, alternating(1)),
    "there and back from the beginning": (LEAST, alternating(-1)),
    "up to the end": (0, lambda rows: [MOST, *[0] * (rows - 1)]),
    "down to the beginning": (0, lambda rows: [*[0] * (rows - 1), LEAST]),
    "from one end to the other": (LEAST, lambda rows: [MOST, *[0] * (rows - 2), MOST][:rows]),
}


def by_rows(impl, terms, out, _dim):
    segments = on(impl, torch.zeros(len(terms), dtype=torch.int64))
    segment_sum(on(impl, terms), segments, 1, consistency="batch", out=out[1:2], impl=impl)


def by_key(impl, terms, out, _dim):
    """Among rows of other keys."""
    among = torch.cat([torch.zeros(2, terms.shape[1], dtype=terms.dtype), terms])
    segments = torch.cat([torch.tensor([2, 0]), torch.ones(len(terms), dtype=torch.int64)])
    segment_sum(on(impl, among), on(impl, segments), 3, consistency="batch", out=out, impl=impl)


def by_few_keys(impl, terms, out, _dim):
    """Of more segments than rows, where there are few."""
    segments = torch.ones(len(terms), dtype=torch.int64)
    segment_sum(on(impl, terms), on(impl, segments), 3, consistency="batch", out=out, impl=impl)


def by_packed_rows(impl, terms, out, _dim):
    packed = pack_rows(on(impl, terms), on(impl, torch.arange(len(terms))), impl=impl)
    add_packed_rows(out, on(impl, torch.ones(len(terms), dtype=torch.int64)), *packed, impl=impl)


EVERY = [
    (add, name, rows)
    for add in (by_rows, by_key, by_few_keys, by_packed_rows)
    for name in TERMS
    for rows in ROWS
    # parts are added apart: what one takes away another may not see
    if (rows <= PART or "back" not in name) and (add is not by_few_keys or rows == 1)
]
QUICK = [each for each in EVERY if each[2] == 1 or (each[2] == PART and "a bit" in each[1])]


@pytest.mark.parametrize(("add", "name", "rows"), slow_except(QUICK, EVERY))
def test_terms(add, name, rows, exact_impl, monkeypatch):
    impl = exact_impl
    if impl == "triton" and add is by_key:  # sums are many, so that a kernel of its own looks at them
        monkeypatch.setattr("tritonrec.kernels.rows.triton_unsorted_sum.LOOKED", 2)
    start, make = TERMS[name]
    terms, dim = make(rows), 3
    values = torch.zeros(rows, dim, dtype=torch.int64)
    values[:, 1] = torch.tensor(terms)
    out = on(impl, torch.zeros(3, dim, dtype=torch.int64))
    out[1, 1] = start
    total, first = folded(start, terms)
    if first is None:
        add(impl, values, out, dim)
        assert out.tolist() == [[0] * dim, [0, total, 0], [0] * dim]
        return
    with pytest.raises(ExactSumError) as raised:
        add(impl, values, out, dim)
    row, column = raised.value.index
    row, before = (row - 2, 1) if add is by_key else (row, 0)  # in order of keys one row comes before
    # Where rows are sorted, Triton may name the first row of any part: a key's first PART rows are one, parts
    # of all occurrences, as far as they are not in it, the others.
    sorts = add is by_packed_rows or not dispatch.has_int64_atomics(out)
    parts = rows > PART and impl == "triton" and sorts
    assert column == 1 and (row == first or (parts and (row in (0, PART) or (row + before) % PART == 0)))


# in units of 2**-36: both sides of where one sum rounds, halves, and the end of fixed point
SIZES = [
    2**51 - 2**27,
    2**51,
    2**51 + 2**28,
    2**52,
    2**61,
    2**62 - 2**38,
    0.5,
    1.5,
    2.5,
    0.75,
    2**-100,
    1e5 + 0.5,
]


@pytest.mark.parametrize("rows", slow_except([3], [1, 3, *ROWS[1:]]))
def test_values_are_rounded_on_both_sides_of_the_bound(rows, exact_impl):
    """Each size in a call of its own, so that what is beyond the bound does not have the others checked."""
    impl = exact_impl
    for size in SIZES:
        values = torch.zeros(rows, 2)
        values[:, 0], values[:, 1] = size * 2.0**-BITS, -size * 2.0**-BITS
        values[1::2] *= -1
        zeros, expected = torch.zeros(rows, dtype=torch.int64), to_fixed_point(values).sum(0)
        got = segment_sum(on(impl, values), on(impl, zeros), 1, consistency="batch", impl=impl)
        assert got.cpu().tolist() == [expected.tolist()], size
        if rows % 2:
            assert expected.tolist() == [round(size), -round(size)]
        products = on(impl, torch.zeros(1, 2, dtype=torch.int64))
        factors = torch.full((rows, 1), -0.25)
        ProductTerms(on(impl, values * -4), on(impl, factors), on(impl, zeros), 1, impl).add_to(
            products, BITS, "x"
        )
        assert torch.equal(products, got)


SUMS = [
    (MOST, 1, 1, 0),
    (MOST, 0.5, 5, None),  # rounds to zero
    (MOST, 0.75, 5, 0),
    (LEAST, -1, 1, 0),
    (LEAST, -0.75, PART, 0),
    (2**62 - 1, 2**51, PART, None),
    (2**62, 2**55, PART - 1, None),
    (2**62, 2**55, PART, PART - 1),
    (-(2**62), -(2**55), PART, None),
    (-(2**62) - 1, -(2**55), PART, PART - 1),
    (0, float("nan"), 3, 0),
    (0, 2**62, 3, 0),
    (MOST, -float("inf"), 3, 0),
]


@pytest.mark.parametrize(
    ("start", "value", "rows", "first"), slow_except([each for each in SUMS if each[2] < 10], SUMS)
)
def test_sums_of_values(start, value, rows, first, exact_impl):
    impl = exact_impl
    values = on(impl, torch.full((rows, 5), value * 2.0**-BITS))
    segments = on(impl, torch.zeros(rows, dtype=torch.int64))
    out = on(impl, torch.full((1, 5), start))
    if first is None:
        segment_sum(values, segments, 1, consistency="batch", out=out, impl=impl)
        assert out.tolist() == [[start + rows * round(value)] * 5]
        return
    with pytest.raises(ExactSumError) as raised:
        segment_sum(values, segments, 1, consistency="batch", out=out, impl=impl)
    assert raised.value.index == (first, 0)


GRADIENTS = [  # the sums before, each term, and the rows; in units
    (0, 2**51 - 2**27), (0, -(2**51)), (0, 2**51 + 2**28), (0, -(2**52)), (0, 0.5), (0, 2.5), (0, -1.5),
    (2**62 - 1, 2**50), (2**62, 2**50), (-(2**62), -(2**50)), (-(2**62) - 1, 2**50), (MOST, 1), (MOST, 0.5),
    (LEAST, -1), (LEAST, 1), (MOST, -1), (0, 2**61), (2**62, 2**60), (0, 2**62), (0, float("nan")),
]  # fmt: skip


WEIGHT = "gradient of weight by sample"


def added(start, term, rows):
    """`folded`, of a term that may have no place."""
    if not abs(term) < 2**62:
        return None, 0
    return folded(start, [round(term)] * rows)


@pytest.mark.parametrize("rows", slow_except([1, 9], [1, 8, 9, 33]))
@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_a_norm(impl, rows):
    """Of weight and bias, where the normalised row is ones."""
    for start, term in GRADIENTS:
        dy, x = torch.full((rows, 2), term * 2.0**-BITS), torch.ones(rows, 2)
        ones, means, rstds = torch.ones(2), torch.zeros(rows), torch.ones(rows)
        sums = [on(impl, torch.full((2,), start)) for _ in range(2)]
        given = [on(impl, dy), on(impl, x), None, on(impl, ones), on(impl, ones), 0.0, 0, None, None]
        given += [on(impl, means), on(impl, rstds), BITS, ["scale", "shift"]]
        expected, first = added(start, term, rows)
        if first is not None:
            with pytest.raises(ExactSumError, match=r"gradient of scale\[\d+, 0\]"):
                NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*sums, None, *given, impl=impl)
            continue
        NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*sums, None, *given, impl=impl)
        assert [each.tolist() for each in sums] == [[expected] * 2] * 2, (start, term)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_a_norm_with_large_terms_of_the_bias_alone(impl, rows):
    for term in (2**51 + 2**28, -(2**52), 2**58):
        dy, x = torch.full((rows, 2), term * 2.0**-BITS), torch.full((rows, 2), 2.0**-20)
        ones, means, rstds = torch.ones(2), torch.zeros(rows), torch.ones(rows)
        sums = [on(impl, torch.zeros(2, dtype=torch.int64)) for _ in range(2)]
        given = [on(impl, dy), on(impl, x), None, on(impl, ones), on(impl, ones), 0.0, 0, None, None]
        given += [on(impl, means), on(impl, rstds), BITS, ["scale", "shift"]]
        NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*sums, None, *given, impl=impl)
        assert [each.tolist() for each in sums] == [[rows * term // 2**20] * 2, [rows * term] * 2]


def gradients_of_a_linear_layer(impl, start, term, samples, bias=True, weight_start=None):
    """Sums of weight and bias of samples of one token each, or the name and index of an error."""
    dy, x = torch.full((samples, 3), term * 2.0**-BITS), torch.ones(samples, 2)
    weight = on(impl, torch.full((3, 2), start if weight_start is None else weight_start))
    sums = on(impl, torch.full((3,), start))
    options = {"bias_accumulator": sums, "bias_name": "bias"} if bias else {}
    try:
        linear_weight_grad(
            weight, on(impl, dy), on(impl, x), on(impl, torch.arange(samples + 1)), BITS, impl=impl, **options
        )
    except ExactSumError as error:
        return error.name, error.index
    return weight.unique().tolist(), sums.unique().tolist()


@pytest.mark.parametrize("gate", [(False, 0.0), (True, 0.4)])
@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_beyond_the_bound_are_those_of_the_terms(impl, gate):
    """Rows walked a second time: with gate and dropout, of one large term of the weight or of the bias."""
    for large in ("gradients", "rows"):
        dy, x, *rest = norm_arguments(impl, 21, 4, *gate)
        dy, x = dy.clone(), x.clone()
        if large == "gradients":
            dy[15:] *= 2.0**18
        else:
            x[3:9] *= 2.0**20  # terms of the weight alone
        into = torch.empty_like(x) if gate[0] else torch.empty_like(x[:0])
        given = dy, x, *rest
        _, *terms = NORM_MUL_DROPOUT_BACKWARD_INTO.launch(into, *given, impl=impl)
        sums = [on(impl, torch.arange(4) - 2**40) for _ in range(2)]
        before = [each.cpu().clone() for each in sums]
        du = torch.empty_like(x) if gate[0] else None
        NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*sums, du, *given, BITS, ["scale", "shift"], impl=impl)
        for total, start, each in zip(sums, before, terms, strict=True):
            assert torch.equal(total.cpu(), start + to_fixed_point(each.cpu()).sum(0))
        assert terms[0].abs().max() > 2**15


@pytest.mark.parametrize(("impl", "samples"), slow_on_triton(IMPLS, [1, 2, 32, 33], [1]))
def test_gradients_of_a_linear_layer(impl, samples):
    for start, term in GRADIENTS:
        total, first = added(start, term, samples)
        expected = (WEIGHT, (first, 0, 0)) if total is None else ([total], [total])
        assert gradients_of_a_linear_layer(impl, start, term, samples) == expected, (start, term)


@pytest.mark.parametrize("samples", [1, 33])
@pytest.mark.parametrize("impl", IMPLS)
def test_the_bias_of_a_linear_layer_alone(impl, samples):
    """Small terms, and sums before that are far from 0 of the bias alone."""
    for start, term in [(MOST, 1), (LEAST, -1), (MOST - samples, 1), (2**62, 2**50), (MOST, -1)]:
        total, first = added(start, term, samples)
        expected = ("gradient of bias", (first, 0)) if total is None else ([samples * term], [total])
        found = gradients_of_a_linear_layer(impl, start, term, samples, weight_start=0)
        assert found == expected, (start, term)


def bound(bits, count):
    from tritonrec.kernels.fixed_point.triton_fixed_point import near

    return near(bits, count) * 2.0**bits


@pytest.mark.parametrize("bits", [0, 36, 62])
def test_the_bound_is_the_largest_power_of_two_that_is_safe(bits):
    for count in (1, 2, 3, 127, 2**11 - 1, 2**11, 2**11 + 1, 2**12, 2**12 + 1, 10**6, 2**31):
        largest = int(bound(bits, count))
        assert largest == bound(bits, count) and largest & (largest - 1) == 0
        assert largest <= 2**51 and count * largest <= 2**62
        assert largest == 2**51 or 2 * count * largest > 2**62


@pytest.mark.interpreter
def test_the_bound_of_a_linear_layer_falls_with_its_samples():
    """What a launch is given, for the samples that a program adds up."""
    from tritonrec.kernels.linear import triton_linear

    given = []

    def near(bits, count):
        given.append(count)
        return 2.0**-40

    with mock.patch.object(triton_linear, "near", near):
        gradients_of_a_linear_layer("triton", 0, 1, 33)
        gradients_of_a_linear_layer("triton", 0, 1, 5, bias=False)
    assert given == [33, 5]


@pytest.mark.slow
@pytest.mark.parametrize(("term", "fits"), [(2**50, True), (2**51 - 2**27, False), (-(2**51), False)])
@pytest.mark.parametrize("impl", IMPLS)
def test_the_bound_falls_with_the_samples_of_a_program(impl, term, fits, monkeypatch):
    """4,096 samples in one program: half of the bound of 2,048."""
    if impl == "triton":
        from tritonrec.kernels.linear import triton_linear

        monkeypatch.setattr(triton_linear, "TOKENS_OF_SHARE", 2**20)
    start = 2**62 - 1 if term > 0 else -(2**62)
    got = gradients_of_a_linear_layer(impl, start, term, 2**12, bias=False)
    total, first = added(start, term, 2**12)
    assert fits == (first is None)
    assert got == (([total], [start]) if fits else (WEIGHT, (first, 0, 0)))
