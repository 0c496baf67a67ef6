"""What can leave 32 bits is found, what cannot is not, and no launch of the kernels can."""

import json
import re
from pathlib import Path

import pytest
from compiling import compiled, intervals
from hypothesis import given
from hypothesis import strategies as st

PLANTED = Path(__file__).parent / "planted_widths.py"


@pytest.fixture(scope="module")
def planted():
    return json.loads(compiled(PLANTED))


@pytest.mark.if_changed
def test_each_planted_line_is_found_and_no_other(planted):
    lines = PLANTED.read_text().splitlines()
    marked = {n for n, line in enumerate(lines, 1) if line.endswith("# at fault")}
    found = {
        int(fault.split(":")[1])
        for faults in planted.values()
        for fault in faults
        if fault.startswith(PLANTED.name)
    }
    assert found == marked and len(marked) == 12
    assert planted["long_product_kernel"] == planted["long_block_kernel"] == planted["masked_kernel"] == {}


def test_a_fault_names_the_line_the_variable_the_range_and_the_launch(planted):
    ((fault, where),) = planted["product_kernel"].items()
    assert re.fullmatch(r"planted_widths.py:\d+: muli of place reaches \[9, 19327352823\]", fault)
    assert len(where) == 1 and where[0].endswith("sizes below 2**31")


@pytest.mark.if_changed
@pytest.mark.parametrize("only", ["hash_table", pytest.param("", marks=pytest.mark.slow)])
def test_no_launch_can_leave_32_bits(only):
    done = compiled("ci/compile/index_widths.py", "--only", only)
    assert re.search(r"\d+ launches, 0 lines of Python can leave 32 bits", done)


small = st.integers(-70, 70)
pairs = st.tuples(small, small).map(lambda ends: (min(ends), max(ends)))
MEANING = {
    "addi": lambda x, y: x + y, "subi": lambda x, y: x - y, "muli": lambda x, y: x * y,
    "divsi": lambda x, y: int(x / y) if y else None, "remsi": lambda x, y: x - int(x / y) * y if y else None,
    "maxsi": max, "minsi": min, "andi": lambda x, y: x & y, "ori": lambda x, y: x | y,
    "xori": lambda x, y: x ^ y,
    "shli": lambda x, y: x << y if 0 <= y < 8 else None,
    "shrsi": lambda x, y: x >> y if 0 <= y < 8 else None,
    "shrui": lambda x, y: x % 256 >> y if 0 <= y < 8 else None,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(MEANING))
@given(one=pairs, other=pairs, data=st.data())
def test_an_interval_holds_every_result(name, one, other, data):
    if name in ("shli", "shrsi", "shrui"):
        other = min(abs(other[0]), abs(other[1]), 7), min(max(map(abs, other)), 7)
    x, y = (data.draw(st.integers(*ends)) for ends in (one, other))
    result = MEANING[name](x, y)
    if result is None:
        return
    exact = intervals.EXACT.get(name)
    low, high = exact(one, other) if exact else intervals.BITWISE[name](one, other, 8)
    assert low <= result <= high


def test_every_operation_of_the_arithmetic_is_tried():
    assert MEANING.keys() == intervals.EXACT.keys() | intervals.BITWISE.keys()
