"""What can leave 32 bits is found, what cannot is not, and no launch of the kernels can."""

import json
import re
from pathlib import Path

import pytest
from compiling import compiled, intervals, triton_ir
from hypothesis import given
from hypothesis import strategies as st

PLANTED = Path(__file__).parent / "planted_widths.py"


@pytest.fixture(scope="module")
def planted():
    return json.loads(compiled(PLANTED))


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


def test_sizes_from_two_to_the_31_on_are_compiled_too(planted):
    for where in planted["block_kernel"].values():
        assert [one.rpartition(", ")[2] for one in where] == ["sizes below 2**31", "sizes up to 2**40"]


@pytest.mark.slow
@pytest.mark.parametrize("only", ["hash_table", ""])
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


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        ("i32", 32), ("tensor<32x1xi64>", 64), ("tensor<8xi1, #ttg.slice<{dim = 1}>>", 1), ("f32", 0),
        ("!tt.ptr<i64>", 0), ("tensor<8x!tt.ptr<i32>>", 0), ("tensor<16xbf16>", 0),
    ],
)  # fmt: skip
def test_widths_are_read_from_types(kind, bits):
    assert intervals.width(kind) == bits


def test_values_are_named_after_their_variable():
    assert [triton_ir.variable(value) for value in ("%lanes_25~2", "%walk#3", "%12", "%c0_i32")] == [
        "lanes", "walk", "", "c0_i32",
    ]  # fmt: skip
