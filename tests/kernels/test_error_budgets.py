"""The judges of the other tests, broken: an error above its budget, a value nobody wrote."""

import pytest
import torch
from conformance.guarded_memory import guarded_memory
from float_error import assert_error_at_most_twice

EXACT = torch.tensor([[1.0, -8.0], [0.5, 3.0]], dtype=torch.float64)
OFF = torch.tensor([[0.0, 1e-3], [0.0, 0.0]])
PLAIN = EXACT.float() + OFF  # off by 0.001


@pytest.mark.parametrize("times", [0.0, 1.0, -1.9, 2.1, -2.1, 100.0])
def test_an_error_of_more_than_twice_the_plain_one_fails(times):
    got = EXACT.float() + times * OFF.flip(0)  # another element than the plain one's
    if abs(times) <= 2:
        assert_error_at_most_twice(got, PLAIN, EXACT)
        return
    with pytest.raises(AssertionError, match=r"got\[1, 1\] = .*exact 3.0: error"):
        assert_error_at_most_twice(got, PLAIN, EXACT, "got")


def test_an_exact_plain_result_leaves_half_a_unit_in_the_last_place():
    plain = EXACT.float()
    assert_error_at_most_twice(plain + 2.0**-23, plain, EXACT)
    with pytest.raises(AssertionError, match="allowed"):
        assert_error_at_most_twice(plain + 2.0**-20, plain, EXACT)
    assert_error_at_most_twice(plain + 2.0**-20, plain, EXACT, largest=16.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["got", "plain", "exact"])
def test_what_is_not_finite_fails_wherever_it_is(which, value):
    given = {"got": EXACT.float(), "plain": PLAIN.clone(), "exact": EXACT.clone()}
    given[which][0, 1] = value
    with pytest.raises(AssertionError):
        assert_error_at_most_twice(**given)


def test_another_shape_fails_and_nothing_passes():
    with pytest.raises(AssertionError, match="shape"):
        assert_error_at_most_twice(EXACT.float()[:1], PLAIN[:1], EXACT)
    assert_error_at_most_twice(EXACT.float()[:0], PLAIN[:0], EXACT[:0])


def test_memory_that_nobody_wrote_is_seen():
    with guarded_memory():
        like = torch.zeros(3)
        for made in (
            torch.empty(3),
            torch.empty_like(like),
            like.new_empty(3),
            torch.empty(3, dtype=torch.bfloat16),
        ):
            assert made.isnan().all()
        assert torch.empty(2, dtype=torch.int64).tolist() == [77, 77]
        assert torch.empty(2, dtype=torch.bool).all()
    with pytest.raises(AssertionError, match="bytes around a tensor of 4 bytes"), guarded_memory():
        torch.empty(1, dtype=torch.float32).as_strided((2,), (1,)).fill_(1.0)
