"""Derivatives by torch.func and in forward mode: right, or refused by the name of the op, never dropped."""

import pytest
import torch
from conformance.drawn import CONSTANT, DIFFERENTIABLE, accepted, arguments, tensors_of
from dispatched import DispatchedOps
from torch.autograd import forward_ad
from verdicts import flat

from tritonrec import ops
from tritonrec.kernels.op import OPS

# What torch says of its own vmap, which goes sample by sample, and of what its functions are made with.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:`torch.jit.script`")
GENERATOR = torch.Generator().manual_seed(5)
ROWS, OFFSETS = torch.tensor([2, 0, 2, 3]), torch.tensor([0, 3, 3, 5])


def some(*shape):
    return torch.randn(shape, generator=GENERATOR) + 0.1


def drawn_call(op):
    """A function of the differentiable arguments, their names and values: of a drawn call that has them."""
    for size in ("ample", *accepted(op)):
        given = arguments(op, size)
        if given.get("consistency", "window") != "window":
            continue
        floats = {n: v.float() for n, v in tensors_of(given).items()
                  if (v.is_floating_point() or n == "source") and (op, n) not in CONSTANT}  # fmt: skip
        if op == "segment_sum":
            floats = {"values": given["values"]}
        if all(value.numel() for value in floats.values()):
            break

    def call(*values):
        return flat(OPS[op](*{**given, **dict(zip(floats, values, strict=True))}.values()))[0]

    return call, floats


CALLS = {op: drawn_call(op) for op in DIFFERENTIABLE if op != "scatter_rows"}
ARGUMENTS = [(name, argument) for name in CALLS for argument in CALLS[name][1]]


def test_these_are_all_differentiable_ops():
    assert CALLS.keys() | {"scatter_rows"} == {name for name, op in OPS.items() if op.has_derivative}
    assert len(OPS) > 30


def of_one(name, argument):
    """The call as a function of one of its arguments, and the value of that."""
    call, values = CALLS[name]
    return lambda value: call(*{**values, argument: value}.values()), values[argument]


def in_forward_mode(function, value, tangent):
    """The tangent of function(value), None where there is none."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(value, tangent))).tangent


def watched(function):
    def call(value):
        with DispatchedOps():
            return function(value)

    return call


WAYS = {
    "plain": in_forward_mode,
    "watched": lambda function, value, tangent: in_forward_mode(watched(function), value, tangent),
    "with a graph": lambda function, value, tangent: in_forward_mode(
        function, value.clone().requires_grad_(), tangent
    ),
    "without gradients": lambda *arguments: torch.no_grad()(in_forward_mode)(*arguments),
    "torch.func.jvp": lambda function, value, tangent: torch.func.jvp(function, (value,), (tangent,))[1],
    "compiled": lambda function, value, tangent: torch.compile(
        lambda *both: torch.func.jvp(function, both[:1], both[1:])[1], backend="aot_eager"
    )(value, tangent),
}


@pytest.mark.parametrize("way", [way for way in WAYS if way != "compiled"])
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_an_op_refuses_a_tangent(name, argument, way):
    call, value = of_one(name, argument)
    with pytest.raises(NotImplementedError, match=f"tritonrec::{name} has no .* {argument} came with a"):
        WAYS[way](call, value, some(*value.shape))


@pytest.mark.parametrize("name", CALLS)
def test_compiled_forward_mode_is_refused_too(name):
    call, value = of_one(name, next(iter(CALLS[name][1])))
    with pytest.raises(Exception, match=f"tritonrec::{name} has no forward-mode derivative"):
        WAYS["compiled"](call, value, some(*value.shape))


class Squares(torch.autograd.Function):
    """Rows of x squared, with both derivatives as a user writes them."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_forward(x)
        return ops.gather_rows(x, ROWS).square()

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return 2 * ops.gather_rows(x, ROWS) * tangent[ROWS]


def test_a_step_of_autograd_may_have_a_forward_mode_of_its_own():
    x, tangent = some(4, 3), some(4, 3)
    assert torch.equal(in_forward_mode(Squares.apply, x, tangent), 2 * x[ROWS] * tangent[ROWS])


@pytest.mark.parametrize("name", ["gather_rows", "segment_sum"])
def test_reverse_over_reverse(name):
    call, value = of_one(name, *CALLS[name][1])
    weights = some(*value.shape)

    def cubes(x):
        return (call(x * weights) ** 3).sum()

    expected = torch.autograd.functional.hessian(cubes, value)
    assert expected.any()
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(cubes))(value), expected)


@pytest.mark.parametrize("name", CALLS)
def test_forward_over_reverse_is_refused(name):
    call, value = of_one(name, next(iter(CALLS[name][1])))
    with pytest.raises(NotImplementedError, match=f"tritonrec::{name} has no forward-mode|implement the jvp"):
        torch.func.hessian(lambda x: call(x).square().sum())(value)


def weighted(call):
    """A scalar of the call's result that tells its elements apart."""

    def scalar(*arguments):
        out = call(*arguments)
        return (out * torch.arange(1.0, 1 + out.numel()).view(out.shape)).sum()

    return scalar


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_torch_func_are_those_of_autograd(name):
    call, values = CALLS[name]
    leaves = [value.clone().requires_grad_() for value in values.values()]
    everything = tuple(range(len(values)))
    got = torch.func.grad(weighted(call), everything)(*values.values())
    expected = torch.autograd.grad(weighted(call)(*leaves), leaves)
    assert all(map(torch.equal, got, expected)) and all(value.any() for value in expected)


@pytest.mark.parametrize("name", CALLS)
def test_vmap_is_one_call_after_another(name):
    call, values = CALLS[name]
    pairs = [torch.stack([value, some(*value.shape)]) for value in values.values()]
    expected = torch.stack([call(*(pair[i] for pair in pairs)) for i in range(2)])
    assert torch.equal(torch.func.vmap(call)(*pairs), expected)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_each_sample(name):
    call, values = CALLS[name]
    pairs = [torch.stack([value, some(*value.shape)]) for value in values.values()]
    gradients = torch.func.grad(weighted(call), tuple(range(len(values))))
    each = [gradients(*(pair[i] for pair in pairs)) for i in range(2)]
    same = torch.equal
    if "linear" in name:  # gradients of its parameters are products of torch's, which batches them
        same = torch.allclose
    for got, *expected in zip(torch.func.vmap(gradients)(*pairs), *each, strict=True):
        assert same(got, torch.stack(expected))


@pytest.mark.parametrize("name", CALLS)
def test_jacobians_row_by_row(name):
    call, values = CALLS[name]
    got = torch.func.jacrev(call, tuple(range(len(values))))(*values.values())
    expected = torch.autograd.functional.jacobian(call, tuple(values.values()))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.any()


def test_a_second_derivative_is_refused_by_name():
    twice = torch.func.grad(lambda x: torch.func.grad(lambda y: ops.silu(y).sum())(x).square().sum())
    with pytest.raises(NotImplementedError, match="tritonrec::silu_backward has no derivative"):
        twice(some(4, 3))


def test_no_op_writes_to_an_argument_with_a_default():
    """torch 2.11 leaves defaults out on the way to the op, and then looks for those that it writes to."""
    ours = {name: op.registered.default._schema for name, op in OPS.items()}
    written = [
        (name, argument)
        for name, schema in ours.items()
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    assert len(written) > 10
    assert [name for name, argument in written if argument.has_default_value()] == []
