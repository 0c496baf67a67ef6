"""No store overtakes another thread's load, and no float sum changes its order with pointers or options."""

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from compiling import ROOT, compiled

PLANTED = Path(__file__).parent / "planted_layouts.py"
TARGETS = ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=TARGETS)
def planted(request):
    return json.loads(compiled(PLANTED, request.param))


@pytest.mark.slow
def test_each_planted_kernel_is_found_for_what_it_does_and_no_other(planted):
    assert len(planted) == 16
    for name, found in planted.items():
        assert [what for what in found if found[what]] == [what for what in found if name.startswith(what)], (
            name
        )


def test_an_overtaken_load_is_named_with_its_store(planted):
    lines = PLANTED.read_text().splitlines()
    (message,) = planted["overtaken_by_neighbours"]["overtaken"]
    line = 1 + lines.index("    tl.store(x_ptr + place, tl.load(x_ptr + place + 1))")
    assert f"x_ptr: load at {PLANTED.name}:{line}, store at {PLANTED.name}:{line}" in message


def test_two_orders_of_a_sum_are_shown_with_who_has_them(planted):
    (message,) = planted["orders_by_alignment"]["orders"]
    assert "sizePerThread = [4]" in message and "as it is" in message
    assert "sizePerThread = [1]" in message and "nothing aligned" in message


def test_an_argument_that_is_not_summed_can_change_the_order_too(planted):
    (message,) = planted["orders_by_a_neighbour"]["orders"]
    assert re.search(r"sizePerThread = \[1\].*: \S+, (y_ptr not aligned|nothing aligned)$", message, re.M)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "targets"),
    [("sparse_optimizers d50", "sm_90"), ("", "sm_80,sm_90")],
)
def test_no_store_of_a_launch_overtakes_a_load(only, targets):
    done = compiled("ci/compile/in_place.py", "--only", only, "--targets", targets)
    assert done.endswith("0 loads may be overtaken by a store\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "targets"),
    [("sampled_softmax d256", "sm_90"), ("", "sm_80,sm_90")],
)
def test_no_sum_of_a_launch_has_two_orders(only, targets):
    done = compiled("ci/compile/sum_layouts.py", "--only", only, "--targets", targets)
    assert done.endswith("0 sums or products have more than one order\n")


@pytest.fixture
def in_place(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "ci" / "compile"))
    return importlib.import_module("in_place")


@pytest.mark.parametrize(
    ("order", "safe"),
    [("load barrier store", True), ("barrier load store", False), ("load store barrier", False)],
)
def test_a_barrier_counts_only_between_a_load_and_its_store(in_place, order, safe):
    block = SimpleNamespace(owner=SimpleNamespace(parent=None))
    kernel = in_place.Kernel.__new__(in_place.Kernel)
    names = [{"barrier": "ttg.barrier"}.get(word, word) for word in order.split()]
    kernel.operations = [SimpleNamespace(name=name, parent=block) for name in names]
    kernel.place = {id(each): place for place, each in enumerate(kernel.operations)}
    by_name = {each.name: each for each in kernel.operations}
    assert kernel.barrier_between(by_name["load"], by_name["store"]) is safe


@pytest.mark.parametrize("bad", [("x_ptr",), ()])
def test_a_launch_is_read_with_its_alignment_and_with_none(in_place, monkeypatch, bad):
    launch = SimpleNamespace(name="k", key="k", aligned=("x_ptr",), kernel=None)
    monkeypatch.setattr(in_place, "texts_of", lambda launch, target, kind, aligned: {kind: aligned})
    found = {"x_ptr": ["load, store"]}
    kernel = lambda text, aliases: SimpleNamespace(overtaken=lambda: found if text == bad else {})  # noqa: E731
    monkeypatch.setattr(in_place, "Kernel", kernel)
    assert in_place.check([launch], "sm_90") == ["k for sm_90, x_ptr: load, store, with no barrier between"]
    launch.kernel = SimpleNamespace(declared={"x_ptr": (True, False)})
    assert in_place.check([launch], "sm_90") == []
