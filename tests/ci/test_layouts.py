"""No float sum changes its order with pointers or options."""

import json
import re
from pathlib import Path

import pytest
from compiling import compiled

PLANTED = Path(__file__).parent / "planted_layouts.py"
TARGETS = ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=TARGETS)
def planted(request):
    return json.loads(compiled(PLANTED, request.param))


@pytest.mark.slow
def test_each_planted_kernel_is_found_for_what_it_does_and_no_other(planted):
    assert len(planted) == 5
    assert {name for name in planted if planted[name]} == {n for n in planted if n.startswith("orders")}


@pytest.mark.if_changed
def test_two_orders_of_a_sum_are_shown_with_who_has_them(planted):
    (message,) = planted["orders_by_alignment"]
    assert "sizePerThread = [4]" in message and "as it is" in message
    assert "sizePerThread = [1]" in message and "nothing aligned" in message


@pytest.mark.if_changed
def test_an_argument_that_is_not_summed_can_change_the_order_too(planted):
    (message,) = planted["orders_by_a_neighbour"]
    assert re.search(r"sizePerThread = \[1\].*: \S+, (y_ptr not aligned|nothing aligned)$", message, re.M)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # every launch is compiled several times for each target
@pytest.mark.parametrize(
    ("only", "targets"),
    [("sampled_softmax d256", "sm_90"), ("", "sm_80,sm_90")],
)
def test_no_sum_of_a_launch_has_two_orders(only, targets):
    done = compiled("ci/compile/sum_layouts.py", "--only", only, "--targets", targets)
    assert done.endswith("0 sums or products have more than one order\n")
