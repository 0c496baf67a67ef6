"""The exact sum of squares: the same three integers for any order, split and implementation."""

import math
from fractions import Fraction

import pytest
import torch
from impls import IMPLS, TRITON, on

from tritonrec.kernels.sum_of_squares.op import sum_of_squares

MOST = 2**50


def some(*shape, seed=0):
    """Every exponent whose square is below 2**50, subnormals too."""
    generator = torch.Generator().manual_seed(seed)
    mantissas = torch.randn(shape, generator=generator)
    return mantissas * 2.0 ** torch.randint(-148, 21, shape, generator=generator)


def value_of(limbs):
    high, middle, low = limbs.tolist()
    return high + Fraction(middle, 2**32) + Fraction(low, 2**64)


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_the_limbs_are_the_digits_of_the_square(impl):
    for value, limbs in [
        (3.0, (9, 0, 0)),
        (-1.5, (2, 2**30, 0)),
        (2.0**-17, (0, 0, 2**30)),
        (1.0 + 2.0**-17, (1, 2**16, 2**30)),
        (2.0**-33, (0, 0, 0)),  # half of the last digit, to even
        (1.5 * 2.0**-32, (0, 0, 2)),  # 2.25
        (math.sqrt(1.5) * 2.0**-32, (0, 0, 2)),  # a little above 1.5
        (0.0, (0, 0, 0)),
        (-(2.0**-149), (0, 0, 0)),
        (2.0**25 - 2, (2**50 - 2**27 + 4, 0, 0)),
    ]:
        got = sum_of_squares(on(impl, torch.tensor([value])), impl=impl)
        square = Fraction(torch.tensor(value).item()) ** 2
        assert abs(value_of(got) - square) <= Fraction(1, 2**65)
        assert tuple(got.tolist()) == limbs


@pytest.mark.parametrize("impl", IMPLS)
def test_no_order_and_no_split_shows(impl):
    values = on(impl, some(40, 60))
    whole = sum_of_squares(values, impl=impl)
    exact = sum(Fraction(value) ** 2 for value in values.flatten().tolist())
    assert abs(value_of(whole) - exact) <= Fraction(values.numel(), 2**65)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(values.device)
    assert torch.equal(sum_of_squares(values[order], impl=impl), whole)
    parts = [sum_of_squares(part, impl=impl) for part in values.split([1, 22, 0, 17])]
    assert torch.equal(sum(parts), whole)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**25, -3e38])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_value_without_a_square_stops_the_first_limb(impl, value):
    values = some(3, 900)
    for rows in (1, 3):  # many of them do not wrap around
        values[:rows] = value
        got = sum_of_squares(on(impl, values), impl=impl).cpu()
        assert got[0] == MOST and torch.equal(got[1:], sum_of_squares(values[rows:], impl="reference")[1:])


@pytest.mark.parametrize("impl", IMPLS)
def test_squares_that_reach_the_end_together_stop_there(impl):
    edge = torch.full((1500,), 2.0**25 - 2)
    assert sum_of_squares(on(impl, edge), impl=impl).tolist() == [MOST, 0, 0]
    below = torch.full((4,), 2.0**24 - 1)
    assert sum_of_squares(on(impl, below), impl=impl).tolist() == [4 * (2**24 - 1) ** 2, 0, 0]
    assert int(sum_of_squares(on(impl, edge), impl=impl)[0]) * 4096 < 2**63


@pytest.mark.parametrize("impl", [TRITON])
def test_more_blocks_than_programs(impl, monkeypatch):
    from tritonrec.kernels.sum_of_squares import triton_sum_of_squares

    monkeypatch.setattr(triton_sum_of_squares, "PROGRAMS", 2)
    values = some(5 * 1024 + 3)
    got = sum_of_squares(on(impl, values), impl=impl).cpu()
    assert torch.equal(got, sum_of_squares(values, impl="reference"))
    monkeypatch.setattr(triton_sum_of_squares, "PROGRAMS", 1)
    many = torch.full((9 * 1024,), math.nan)
    assert sum_of_squares(on(impl, many), impl=impl).tolist() == [MOST, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sum_of_squares(torch.zeros(()), torch.tensor(1)), r"values of shape \(\)"),
        (lambda: sum_of_squares(torch.zeros(1).expand(2**31)), r"fewer than 2\*\*31 elements"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
