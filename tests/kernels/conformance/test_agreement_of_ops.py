"""Every op gives one result: in each implementation, at every edge, by any door, laid out in any way."""

import re
import sys
from itertools import product

import pytest
import torch
from drawn import (
    CASES,
    DRAWN,
    NAMES,
    PUBLIC,
    ROUNDED,
    SCHEMAS,
    WRITTEN,
    accepted,
    arguments,
    by_names,
    copied,
    drawn,
    outcome,
    results,
    tensors_of,
)
from guarded_memory import guarded_memory
from impls import GPU, IMPLS, TRITON, on
from verdicts import compare

from tritonrec import ops
from tritonrec.kernels import workers
from tritonrec.kernels.op import OPS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # an overflow of a reference is infinity


def assert_equal_bits(found, expected):
    assert len(found) == len(expected)
    for place, (got, want) in enumerate(zip(found, expected, strict=True)):
        if isinstance(want, torch.Tensor):
            assert got.dtype == want.dtype and got.shape == want.shape, place
            assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5)), f"result {place}"
            assert torch.equal(got.isnan(), want.isnan()), f"result {place}"
        else:
            assert got == want, place


@pytest.mark.smoke
def test_every_op_has_cases():
    """An op that is new says in `ci/attack` how its arguments are drawn, and by which function it is met."""
    assert DRAWN.keys() == OPS.keys()
    assert {op: accepted(op) for op in OPS if not {"ample", "any_0"} <= {*accepted(op)}} == {}
    others = {"derive_seed", "implementation", "use_impl"}  # take no tensors
    looks = {"check_inserted", "check_summed", "packed_bytes"}  # at one tensor, which an op has made
    names = {name for name in ops.__all__ if name.islower()} - others - looks
    assert names - {"sparse_momentum_sgd"} <= {name.split()[0] for name in PUBLIC} <= names | OPS.keys()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("op", "size"), CASES)
def test_an_implementation_agrees_with_the_reference(op, size, impl):
    """It writes all of its result and nothing beside it, and to no argument that it only reads."""
    given = arguments(op, size, impl)
    with guarded_memory():
        found = outcome(op, given, impl)
    for name, value in tensors_of(drawn(op, size)).items():
        if name not in WRITTEN[op] or isinstance(found, str):
            assert torch.equal(given[name].cpu(), value), f"{name} was written to"
    expected = outcome(op, arguments(op, size), "reference")
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
    else:
        assert compare(by_names(op), found, expected) == ("accepted", "")


@pytest.mark.parametrize("door", PUBLIC)
def test_a_public_function_is_its_op(door):
    op, function = PUBLIC[door]
    for size in ("ample", "any_0", "any_2"):

        def call(*values, impl):
            return function(**dict(zip(NAMES[op], values, strict=True)), impl=impl)

        ways = [outcome(op, arguments(op, size), impl, call) for impl in ("cpu", "reference")]
        if isinstance(ways[0], str) or isinstance(ways[1], str):
            assert ways[0] == ways[1]
        else:
            assert compare(by_names(op), *ways) == ("accepted", "")


def side_by_side(tensor):
    """A view with others beside it and before it."""
    if tensor.dim() == 0:
        return tensor
    shape = [*tensor.shape[:-1], tensor.shape[-1] + 5]
    shape[0] += 2 if tensor.dim() > 1 else 0
    wide = torch.full(
        shape, -77 if tensor.dtype != torch.bool else 1, dtype=torch.float64, device=tensor.device
    )
    wide = wide.to(tensor.dtype)
    view = wide[..., 3:-2] if tensor.dim() == 1 else wide[1:-1, ..., 3:-2]
    return view.copy_(tensor)


def turned(tensor):
    """The last dimension is the furthest apart."""
    order = [*range(tensor.dim())][::-1]
    return tensor.permute(order).contiguous().permute(order)


def every_second(tensor):
    return tensor.repeat_interleave(2, 0)[::2] if tensor.dim() else tensor


def expanded(tensor):
    """One row again and again."""
    return tensor[:1].expand(tensor.shape) if tensor.dim() and len(tensor) else tensor


LAYOUTS = {each.__name__: each for each in (side_by_side, turned, every_second, expanded)}


@pytest.mark.parametrize("impl", ["cpu", TRITON])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_depend_on_strides(op, layout, impl):
    """An argument whose strides an op does not take is refused by its name, and then taken as it was."""
    for size in [size for size in ("any_1", "ample") if size in accepted(op)][: 1 if impl == "triton" else 2]:
        given = arguments(op, size, impl)
        whole = {}
        for name, tensor in tensors_of(given).items():
            if layout != "expanded" or (tensor.is_floating_point() and name not in WRITTEN[op]):
                given[name] = LAYOUTS[layout](tensor)
            whole[name] = given[name]._base if given[name]._base is not None else given[name]
        before = {name: each.clone() for name, each in whole.items()}
        plain = {name: copied(value) for name, value in given.items()}
        expected = results(op, {name: copied(value) for name, value in plain.items()}, impl)
        for _ in NAMES[op]:
            found = outcome(op, given, impl)
            if not isinstance(found, str):
                break
            named = set(re.findall(r"\w+", found.split(" must ")[0])) & set(tensors_of(given))
            assert named and ("contiguous" in found or "in place" in found), found
            given |= {name: plain[name].clone() for name in named}
        assert_equal_bits(found, expected)
        for name, each in whole.items():
            if name not in WRITTEN[op]:
                assert torch.equal(each, before[name]), f"{name} was written to"
            elif given[name]._base is each:
                own = torch.zeros_like(each, dtype=torch.bool)
                torch.as_strided(
                    own, given[name].shape, given[name].stride(), given[name].storage_offset()
                ).fill_(True)
                assert torch.equal(each[~own], before[name][~own]), f"beside {name}"


@pytest.mark.parametrize("op", OPS)
def test_threads_and_repetition_change_no_bit(op, monkeypatch):
    """Work is cut between threads however little it is."""
    threads = torch.get_num_threads()
    cut = workers.over_ranges

    def always(run, count, cost, step=1):
        return cut(run, count, 1e12, step)

    for module in [each for name, each in sys.modules.items() if name.startswith("tritonrec.kernels.")]:
        if getattr(module, "over_ranges", None) is cut:
            monkeypatch.setattr(module, "over_ranges", always)
    try:
        for size in set(accepted(op)) & {"ample", "any_0"}:
            expected = results(op, arguments(op, size), "cpu")
            for number in (1, 2, 3):
                torch.set_num_threads(number)
                assert_equal_bits(results(op, arguments(op, size), "cpu"), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("op", OPS)
def test_the_default_dtype_changes_no_bit(op, impl):
    """It belongs to the user."""
    size = accepted(op)[-1]
    expected = results(op, arguments(op, size, impl), impl)
    before = torch.get_default_dtype()
    try:
        for default in (
            (torch.float64,) if impl == "triton" else (torch.float64, torch.bfloat16, torch.float16)
        ):
            torch.set_default_dtype(default)
            assert_equal_bits(results(op, arguments(op, size, impl), impl), expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="there is no GPU here")
@pytest.mark.parametrize("op", OPS)
def test_a_tensor_on_a_gpu_is_for_triton(op):
    for size in accepted(op):
        found, expected = (results(op, arguments(op, size, "triton"), impl) for impl in ("auto", "triton"))
        assert_equal_bits(found, expected)


def test_an_op_that_agrees_in_every_bit_is_held_to_it():
    """`compare` tells one unit in the last place where nothing is rounded, and a large error where it is."""
    ones = torch.ones(3)
    for op in ("gather_rows", "silu"):
        near, far = ones.nextafter(ones * 2), ones * 1.1
        assert (compare(by_names(op), [near], [ones])[0] == "accepted") == (op in ROUNDED)
        assert compare(by_names(op), [far], [ones])[0] == "difference"


ROW_WISE = {
    "silu": "x", "silu_backward": "x", "linear": "x", "norm_mul_dropout": "x",
    "norm_mul_dropout_backward": "x", "norm_linear_silu": "x", "norm_linear_silu_backward": "x",
    "sampled_softmax": "hidden", "sampled_softmax_backward": "hidden", "dropout": "x", "owner_of": "keys",
    "initial_rows": "keys", "random_indices": "positions", "gather_rows": "rows",
}  # fmt: skip
"""Op -> an argument with a row for each row of its result."""


@pytest.mark.parametrize("impl", ["cpu", TRITON])
@pytest.mark.parametrize("op", ROW_WISE)
def test_a_row_keeps_its_bits_in_any_batch(op, impl):
    def run(rows=None):
        given = arguments(op, "ample", impl)
        if "count" in given and op == "gather_rows":
            given["count"] = None
        size = len(given[ROW_WISE[op]])
        for name, value in tensors_of(given).items() if rows is not None else ():
            if value.dim() and len(value) == size and name != "source":
                given[name] = value[rows.to(value.device)]
        return size, results(op, given, impl)

    size, whole = run()
    whole = [each for each in whole if each.dim() and len(each) == size]
    assert whole
    draw = torch.Generator().manual_seed(1)
    for count in (1, 2, 7):
        rows = torch.randperm(size, generator=draw)[:count]
        some = [each for each in run(rows)[1] if each.dim() and len(each) == count]
        for got, every in zip(some, whole, strict=True):
            assert torch.equal(got, every[rows])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("op", [op for op in OPS if op.endswith("_into") and op[: -len("_into")] in OPS])
def test_what_is_written_into_an_argument_is_what_the_other_op_returns(op, impl):
    """`segment_sum_into` adds to zeros, and a gradient takes the place of an argument."""
    other = op[: -len("_into")]
    for size in accepted(op):
        given = arguments(op, size, impl)
        expected = results(other, {name: copied(given[name]) for name in NAMES[other]}, impl)
        found = results(op, given, impl)
        for want in expected:
            assert any(want.shape == each.shape and torch.equal(want, each) for each in found), size


BEHIND = {
    "unique": ["keys"], "unique_padded": ["keys"], "bucketize": ["keys"], "counting_sort": ["buckets"],
    "hash_find": ["keys"], "hash_erase": ["keys"], "hash_insert": ["keys"],
    "gather_rows": ["rows"], "scatter_rows": ["rows", "source", "values"], "sum_of_squares": ["values"],
    "segment_sum": ["segments", "source", "values"], "segment_sum_into": ["segments", "source", "values"],
    "sparse_lazy_decay": ["indices"],
    **{op: ["indices", "grad"] for op in OPS if op.startswith("sparse_") and op != "sparse_lazy_decay"},
}  # fmt: skip
"""Op with a `count` -> its lists that hold so many entries; of scatter and sums either source or values."""


def test_every_count_is_met():
    counted = {
        op for op in OPS if any(each.name == "count" and "Tensor" in str(each.type) for each in SCHEMAS[op])
    }
    assert counted - {"unique_table"} == set(BEHIND)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("op", BEHIND)
def test_what_lies_behind_the_count_is_not_read(op, impl):
    """Results begin with those of the entries that hold, and nothing else is written."""
    sizes = {"empty", "one", "ample", "any_0"} & {*accepted(op)}
    for size in [size for size in sizes if arguments(op, size)[BEHIND[op][0]].dim()]:
        names = [name for name in BEHIND[op] if arguments(op, size)[name] is not None]
        names = names[:-1] if len(names) == 3 else names  # values of a source are as many as they are
        length = len(arguments(op, size)[names[0]])
        for count, legal in product((-3, 0, length // 2, length, 2**40), (False, True)):
            held = min(max(count, 0), length)
            short = arguments(op, size) | {"count": None}
            given = arguments(op, size, impl) | {"count": on(impl, torch.tensor(count))}
            for name in names:
                short[name], rest = short[name][:held], given[name][held:]
                if rest.is_floating_point():
                    rest.fill_(torch.nan)
                elif not legal:
                    rest.fill_(77 << 8 * (rest.itemsize > 1))
            expected, found = results(op, short, "reference"), results(op, given, impl)
            for got, want in zip(found, expected, strict=True):
                if isinstance(want, torch.Tensor) and want.dim() and len(got) == length:
                    got = got[: len(want)]
                assert compare(by_names(op), [got], [want]) == ("accepted", ""), (size, count)
