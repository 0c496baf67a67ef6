"""One rounding to a multiple of 2**-fraction_bits, half to even, the same in every bit, or an error."""

import re
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from impls import IMPLS, TRITON, on

from tritonrec.kernels.deferred import NONE
from tritonrec.kernels.fixed_point.errors import ExactSumError, late_error, report_exact_gradients, sum_error
from tritonrec.kernels.fixed_point.op import from_fixed_point, to_fixed_point
from tritonrec.kernels.fixed_point.triton_fixed_point import is_far, magnitude
from tritonrec.kernels.rows.numba_segment_sum import add_rows


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_ties_go_to_even(impl):
    ties = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.75, -0.75]) * 2.0**-36
    assert to_fixed_point(on(impl, ties), impl=impl).tolist() == [0, 2, 2, 0, -2, -2, 1, -1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 2.0**26, -(2.0**26), 3e38])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_value_without_a_number_is_named(impl, value):
    values = torch.ones(7, 300)
    values[5, 17] = value
    values[6, 1] = float("nan")
    with pytest.raises(ExactSumError, match=r"item_embedding\[5, 17\] = ") as caught:
        to_fixed_point(on(impl, values), name="item_embedding", impl=impl)
    assert caught.value.name == "item_embedding" and caught.value.index == (5, 17)
    assert repr(caught.value.value) == repr(values[5, 17].item())


@pytest.mark.smoke
@pytest.mark.parametrize("divisor", [1.0, 3.0, -7.5, 1e-3])
@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_from_fixed_point_equals_the_reference(impl, divisor):
    generator = torch.Generator().manual_seed(2)
    sums = torch.randint(-(2**63), 2**63 - 1, (300,), generator=generator) >> torch.arange(300) % 63
    sums = torch.cat([sums, torch.tensor([-(2**63), 2**63 - 1, 2**53 + 1, 0])])
    values = from_fixed_point(on(impl, sums), divisor, impl=impl).cpu()
    assert torch.equal(values, from_fixed_point(sums, divisor, impl="reference"))


@given(
    values=st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=1, max_size=20),
    bits=st.integers(0, 40),
    random=st.randoms(use_true_random=False),
)
def test_sums_do_not_depend_on_order_and_are_exact(values, bits, random):
    shuffled = random.sample(values, len(values))
    terms = to_fixed_point(torch.tensor(values), bits)
    assert terms.sum() == to_fixed_point(torch.tensor(shuffled), bits).sum()
    assert int(terms.sum()) == sum(round(Fraction(value) * 2**bits) for value in values)


@pytest.mark.parametrize("total", [2**63 - 1, 2**63 - 2**36, 2**61, -(2**61), 2**36 - 1 - 2**63, -(2**63)])
def test_a_total_without_room_is_an_error_and_one_with_room_is_not(total):
    values = torch.tensor([[1.0], [-1.0], [1.0]]) * (1 if total > 0 else -1)
    sums = torch.tensor([total])
    if abs(total) == 2**61:
        add_rows(sums, values, 36, "gradient")
        assert sums.tolist() == [total + (2**36 if total > 0 else -(2**36))]
        return
    with pytest.raises(ExactSumError):
        add_rows(sums, values, 36, "gradient")
    assert sums.tolist() == [total]


def test_an_error_says_whether_a_value_or_its_sum_is_too_large():
    for value, words in (
        (2.0**26 - 8, "added to segment 3, column 1, leaves"),
        (2.0**26, r"reaches 2\*\*26"),
    ):
        assert re.search(words, str(sum_error("x", (0, 1), value, 3, 36))), value
    assert late_error("x", 3, 36)(6).index == (1, 2)


def test_a_term_of_an_exact_gradient_is_named_by_its_place():
    bad = torch.tensor([NONE, 7, 9])
    with pytest.raises(ExactSumError, match=r"^gradient of bias\[0, 1\]"):
        report_exact_gradients(bad, ["weight", "bias"], (2, 3), 36)


@triton.jit
def bounds_kernel(sums_ptr, far_ptr, values_ptr, order_ptr, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(far_ptr + at, is_far(tl.load(sums_ptr + at)).to(tl.int32))
    tl.store(order_ptr + at, magnitude(tl.load(values_ptr + at)))


@pytest.mark.parametrize("impl", [TRITON])
def test_bounds_of_tritons_sums_and_values_are_exact(impl):
    """Where a sum leaves its room, and that no value is above infinity: sums of terms show neither edge."""
    bound, largest = 2**62, torch.finfo(torch.float32).max
    sums = on(impl, torch.tensor([bound - 1, bound, -bound, -bound - 1], dtype=torch.int64))
    values = on(impl, torch.tensor([0.0, 1.0, -largest, -torch.inf], dtype=torch.float32))
    far, order = (on(impl, torch.empty(4, dtype=torch.int32)) for _ in range(2))
    bounds_kernel[(1,)](sums, far, values, order, 4)
    assert far.tolist() == [0, 1, 0, 1]
    assert order.tolist() == sorted({*order.tolist()})
