"""An op that writes to an argument has the right derivative, or refuses one by name; none is lost."""

import pytest
import torch
from dispatched import DispatchedOps
from impls import TRITON, on

from tritonrec import ops

GENERATOR = torch.Generator().manual_seed(11)


def some(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=GENERATOR).to(dtype)


def whole(*values):
    return torch.tensor(values, dtype=torch.int64)


# case -> rows, source, how many of them hold
CASES = {
    "plain": (whole(4, 0, 6), None, 3),
    "counted": (whole(4, 0, 6), None, 2),
    "source": (whole(4, 0, 6), whole(1, 1, 3), 3),
    "source_counted": (whole(5, 2, 0, 1), whole(2, 2, 2, 0), 3),
    "none_hold": (whole(4, 0), whole(1, 0), 0),
    "empty": (whole(), None, 0),
    "all": (torch.arange(7).flip(0), None, 7),
}


def ours(case, impl):
    rows, source, held = CASES[case]
    count = None if held == len(rows) else on(impl, torch.tensor(held))
    rows, source = on(impl, rows), None if source is None else on(impl, source)

    def move(destination, values):
        ops.scatter_rows(destination, rows, values, impl=impl, source=source, count=count)

    return move


def torchs(case):
    rows, source, held = CASES[case]

    def move(destination, values):
        values = values[:held] if source is None else values[source[:held]]
        destination.index_copy_(0, rows[:held], values)

    return move


def gradients(move, destination, values, cotangent):
    """Of a leaf behind the destination and one behind the values, after a move in the middle of a graph."""
    leaves = destination.clone().requires_grad_(), values.clone().requires_grad_()
    out = leaves[0] * 1.5
    move(out, leaves[1] * 2)
    return [out.detach(), *torch.autograd.grad(out.sin(), leaves, cotangent)]


def operands(case, impl="cpu", dtype=torch.float32):
    rows, source, _ = CASES[case]
    length = len(rows) if source is None else 4
    return tuple(on(impl, some(*shape, dtype=dtype)) for shape in ((7, 3), (length, 3), (7, 3)))


@pytest.mark.parametrize("impl", ["cpu", "reference", TRITON])
@pytest.mark.parametrize("case", CASES)
def test_a_move_has_the_derivative_of_index_copy(case, impl):
    tensors = operands(case, impl)
    expected = gradients(torchs(case), *(tensor.cpu() for tensor in tensors))
    for got, want in zip(gradients(ours(case, impl), *tensors), expected, strict=True):
        torch.testing.assert_close(
            got.cpu(), want, rtol=1e-6, atol=1e-6
        )  # a source's sums have another order
    assert expected[1].any() or case == "all"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_move_of_another_dtype(dtype):
    tensors = operands("counted", dtype=dtype)
    found, expected = (gradients(move("counted"), *tensors) for move in (lambda c: ours(c, "cpu"), torchs))
    assert all(map(torch.equal, found, expected))
    if dtype == torch.float64:
        with pytest.raises(ValueError, match=r"scatter_rows with source .* torch\.float64"):
            gradients(ours("source", "cpu"), *operands("source", dtype=dtype))
    else:
        gradients(ours("source", "cpu"), *operands("source", dtype=dtype))


@pytest.mark.parametrize("of", ["destination", "values"])
def test_a_move_that_one_side_alone_is_differentiated_in(of):
    destination, values, cotangent = operands("plain")
    for move in (ours("plain", "cpu"), torchs("plain")):
        leaf = (destination if of == "destination" else values).clone().requires_grad_()
        out = leaf * 1 if of == "destination" else destination.clone()
        move(out, values if of == "destination" else leaf)
        assert out.requires_grad
        (found,) = torch.autograd.grad(out, leaf, cotangent)
        expected = cotangent[CASES["plain"][0]]
        if of == "destination":
            expected = cotangent.index_fill(0, CASES["plain"][0], 0)
        assert torch.equal(found, expected)


def test_a_move_into_a_view_of_the_graph():
    def column(move):
        leaf, values = some(7, 5).requires_grad_(), some(3, 3).requires_grad_()
        torch.manual_seed(0)
        base = leaf * 3
        move(base[:, 1:4], values)
        return torch.autograd.grad(base, [leaf, values], torch.arange(35.0).view(7, 5))

    found, expected = column(ours("plain", "cpu")), column(torchs("plain"))
    assert all(map(torch.equal, found, expected))


def test_a_leaf_is_not_written_to():
    leaf = some(7, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="destination is a leaf that requires a gradient"):
        ops.scatter_rows(leaf, whole(1), some(1, 3))
    with torch.no_grad():
        ops.scatter_rows(leaf, whole(1), torch.ones(1, 3))
    assert torch.equal(leaf[1], torch.ones(3))


def moved(destination, values):
    """A function of both whose second derivative is not zero."""
    out = destination * 1.5
    ops.scatter_rows(out, whole(4, 0, 6), values**2, source=whole(1, 1, 2))
    return (out**3).sum()


def moved_by_torch(destination, values):
    out = (destination * 1.5).index_copy(0, whole(4, 0, 6), (values**2)[whole(1, 1, 2)])
    return (out**3).sum()


WAYS = {
    "grad": lambda f, *args: torch.autograd.grad(f(*args), args),
    "watched": lambda f, *args: watched(f, args),
    "torch.func": lambda f, *args: torch.func.grad(f, (0, 1))(*(arg.detach() for arg in args)),
    "compiled": lambda f, *args: torch.autograd.grad(
        torch.compile(f, backend="aot_eager", fullgraph=True)(*args), args
    ),
    "twice": lambda f, *args: torch.autograd.grad(
        [g.square().sum() for g in torch.autograd.grad(f(*args), args, create_graph=True)], args
    ),
}


def watched(function, arguments):
    with DispatchedOps() as dispatched:
        found = torch.autograd.grad(function(*arguments), arguments)
    assert "scatter_rows" in dispatched.names or function is moved_by_torch
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_move_is_differentiated_wherever_torch_does(way):
    leaves = some(7, 3).requires_grad_(), some(4, 3).requires_grad_()
    found, expected = (WAYS[way](f, *leaves) for f in (moved, moved_by_torch))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
        assert want.any()


NORM = (some(3, 4), some(4), some(4), some(2, 4), some(2), 1e-6)


@pytest.mark.parametrize("recompute", [(), ("norm",), ("linear",), ("norm", "linear")])
def test_a_second_derivative_of_the_fused_layer_is_refused(recompute):
    """Whatever backward keeps: its product with dz must not pass for one with dy."""
    leaves = [tensor.clone().requires_grad_() for tensor in NORM[:5]]
    out = ops.norm_linear_silu(*leaves, 1e-6, recompute)
    cotangent = some(3, 2).requires_grad_()
    for gradient in torch.autograd.grad(out, leaves, cotangent, create_graph=True):
        for leaf in (*leaves, cotangent):
            with pytest.raises(RuntimeError, match="norm_linear_silu_backward"):
                torch.autograd.grad(gradient.sum(), leaf, retain_graph=True)
