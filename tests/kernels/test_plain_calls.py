"""Small calls on keys and rows leave the dispatcher out: the same bits, versions and errors as the op's."""

import pytest
import torch
from test_plain_eager import Noted

from tritonrec import ops
from tritonrec.kernels import segment_sum as sums


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) + 0.1


KEYS = torch.tensor([7, -3, 7, 2**63 - 1, 5, -3, -(2**63), 7])
LIST, OTHER = torch.tensor([7, -3, 12, 5, 0, 9]), torch.tensor([9, 1, 7, 5])
ROWS, SEGMENTS = torch.tensor([4, 0, 6, 2]), torch.tensor([4, 0, 4, 4])


def table():
    """A table that holds keys 7 and 5 in rows 0 and 1, with 16 slots."""
    slots = torch.zeros(16, dtype=torch.int64), torch.full((16,), -1, dtype=torch.int32)
    ops.hash_insert(*slots, torch.tensor([7, 5]), 0)
    return slots


def number(value):
    return torch.tensor(value)


# name of the registered op -> tensors that it writes to, other arguments, and the call
CALLS = {
    "unique": (lambda: [], lambda count: ops.unique(KEYS)),
    "unique_padded": (lambda: [], lambda count: ops.unique(KEYS, padded=True, count=count)),
    "owner_of": (lambda: [], lambda count: ops.owner_of(KEYS, 3)),
    "bucketize": (lambda: [], lambda count: ops.bucketize(KEYS, 3, count=count)),
    "intersect": (lambda: [], lambda count: ops.intersect(LIST, OTHER, left_count=count)),
    "intersect_padded": (lambda: [], lambda count: ops.intersect(LIST, OTHER, padded=True, left_count=count)),
    "hash_insert": (lambda: [*table()], lambda count, *slots: ops.hash_insert(*slots, LIST, 2, OTHER)),
    "hash_insert_padded": (
        lambda: [*table(), number(2), number(0)],
        lambda count, keys, rows, after, lost: ops.hash_insert(
            keys, rows, LIST, after, count=count, status=lost
        ),
    ),
    "hash_find": (lambda: [], lambda count: ops.hash_find(*table(), LIST, count=count)),
    "hash_assign": (
        lambda: [table()[1]],
        lambda count, rows: ops.hash_assign(table()[0], rows, LIST, LIST.abs(), count=count),
    ),
    "hash_erase": (
        lambda: [table()[1]],
        lambda count, rows: ops.hash_erase(table()[0], rows, LIST, count=count),
    ),
    "gather_rows": (lambda: [], lambda count: ops.gather_rows(some(7, 3), ROWS, count=count)),
    "scatter_rows": (
        lambda: [some(7, 3)],
        lambda count, out: ops.scatter_rows(out, ROWS, some(5, 3), source=SEGMENTS, count=count),
    ),
    "segment_sum": (lambda: [], lambda count: ops.segment_sum(some(4, 3), SEGMENTS, 6, count=count)),
    "segment_sum_into": (
        lambda: [torch.zeros(6, 3, dtype=torch.int64), number(0)],
        lambda count, out, lost: ops.segment_sum(
            some(4, 3), SEGMENTS, 6, consistency="batch", out=out, count=count, status=lost
        ),
    ),
}  # fmt: skip


def outcome(name, count):
    """What a call returns, what is in the tensors it writes to, and how far their versions went."""
    make, call = CALLS[name]
    written = make()
    before = [tensor._version for tensor in written]
    got = call(count, *written)
    returned = [] if got is None else [got] if isinstance(got, torch.Tensor) else list(got)
    moved = [tensor._version > version for tensor, version in zip(written, before, strict=True)]
    return [*returned, *written], moved


class Entrance:
    """An op that notes when Python calls it; everything else about it is the op's."""

    def __init__(self, op, name, names):
        self.op, self.name, self.names = op, name, names

    def __call__(self, *arguments):
        self.names.append(self.name)
        return self.op(*arguments)

    def __getattr__(self, attribute):
        return getattr(self.op, attribute)


@pytest.fixture
def entered(monkeypatch):
    """The names of the registered ops that Python enters, in order."""
    names = []
    for name in CALLS:
        owner, attribute = torch.ops.tritonrec, name
        if name.startswith("segment_sum"):
            owner, attribute = sums, f"_{name}"
        monkeypatch.setattr(owner, attribute, Entrance(getattr(owner, attribute), name, names))
    return names


@pytest.mark.parametrize("name", CALLS)
def test_a_plain_call_is_the_op_without_the_dispatcher(name, entered):
    count = number(3)
    table()
    assert entered == []
    plain, moved = outcome(name, count)
    assert entered == [] and all(moved)
    with Noted() as noted:
        watched, moved = outcome(name, count)
    assert name in noted.names and name in entered and all(moved)
    assert len(plain) == len(watched) > 0 and all(map(torch.equal, plain, watched))
    assert any(value.any() for value in plain)


def gradients(call, leaf, cotangent):
    out = call(leaf)
    (first,) = torch.autograd.grad(out, leaf, cotangent, create_graph=True)
    return [out.detach(), first]


@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("name", ["gather_rows", "segment_sum"])
def test_gradients_without_the_dispatcher(name, count, entered):
    """The first derivative, and the second, that of a weighted sum's weights."""
    count = None if count is None else number(count)
    leaf, cotangent = some(4, 3).requires_grad_(), some(4, 3).mul(2).requires_grad_()
    rows = torch.tensor([2, 0, 2, 3])

    def call(values):
        if name == "gather_rows":
            return ops.gather_rows(values, rows, count=count)
        return ops.segment_sum(values, rows, 4, count=count)

    plain = gradients(call, leaf, cotangent)
    (second,) = torch.autograd.grad((plain[1] * some(4, 3)).sum(), cotangent)
    with torch.no_grad():
        assert torch.equal(call(leaf), plain[0]) and not call(leaf).requires_grad
    assert entered == []
    with Noted() as noted:
        watched = gradients(call, leaf, cotangent)
        (again,) = torch.autograd.grad((watched[1] * some(4, 3)).sum(), cotangent)
    assert name in noted.names
    assert all(map(torch.equal, [*plain, second], [*watched, again])) and second.any()


def test_a_move_that_is_differentiated_is_a_plain_call(entered):
    out, values = some(7, 3), some(4, 3).requires_grad_()
    version = out._version
    with torch.no_grad():
        ops.scatter_rows(out, ROWS, values)
    assert not out.requires_grad
    ops.scatter_rows(out, ROWS, values)
    assert entered == [] and out.requires_grad and out._version > version + 1
    assert torch.equal(out[ROWS], values)


@pytest.mark.parametrize("name", ["scatter_rows", "segment_sum_into"])
def test_what_backward_kept_is_not_overwritten_unseen(name):
    out, weight = some(7, 3), some(7, 3).requires_grad_()
    product = (out * weight).sum()
    if name == "scatter_rows":
        ops.scatter_rows(out, ROWS, some(5, 3), source=SEGMENTS)
    else:
        ops.segment_sum(some(4, 3), SEGMENTS, 7, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_registered_ops_without_the_dispatcher(entered):
    table_keys, table_rows = table()
    with torch.no_grad():
        got = ops.registered.gather_rows(some(7, 3), ROWS, "auto", None)
        out = some(7, 3)
        version = out._version
        assert ops.registered.scatter_rows(out, ROWS, some(5, 3), "auto", None, SEGMENTS) is None
        inverse = ops.registered.unique(KEYS, "auto", None)[1]
        found = ops.registered.hash_find(table_keys, table_rows, LIST, "auto", None)
    assert entered == [] and out._version > version
    assert torch.equal(got, some(7, 3)[ROWS]) and torch.equal(out[ROWS], some(5, 3)[SEGMENTS])
    assert inverse.tolist() == [0, 1, 0, 2, 3, 1, 4, 0] and found.tolist() == [0, -1, -1, 1, -1, -1]


def test_registered_ops_are_the_ops_where_they_are_seen(entered):
    leaf = some(7, 3).requires_grad_()
    got = ops.registered.gather_rows(leaf, ROWS, "auto", None)
    assert entered == ["gather_rows"] and got.requires_grad
    with Noted() as noted, torch.no_grad():
        assert torch.equal(ops.registered.gather_rows(leaf, ROWS, "auto", None), got)
    assert noted.names == ["gather_rows"]


def test_registered_has_what_is_registered():
    with pytest.raises(AttributeError, match="no_such_op"):
        ops.registered.no_such_op  # noqa: B018
    assert not hasattr(ops.registered, "no_such_op") and not hasattr(ops.registered, "__wrapped__")
    assert {"gather_rows", "silu_backward"} <= set(dir(ops.registered)) and "add" not in dir(ops.registered)
    assert all(hasattr(ops.registered, name) for name in dir(ops.registered))


class Moved(torch.autograd.Function):
    """A step of autograd as a user writes one."""

    @staticmethod
    def forward(ctx, x):
        return ops.registered.gather_rows(x, ROWS, "auto", None)

    @staticmethod
    def backward(ctx, dy):
        return ops.registered.segment_sum(dy, ROWS, 7, "window", 36, "rows", "auto", None)


def test_registered_ops_compile_without_a_graph_break():
    leaf = some(7, 3).requires_grad_()
    compiled = torch.compile(Moved.apply, fullgraph=True, backend="aot_eager")
    got, expected = (torch.autograd.grad(move(leaf).sum(), leaf)[0] for move in (compiled, Moved.apply))
    assert torch.equal(got, expected) and got.sum() == ROWS.numel() * 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.owner_of(KEYS, 2.5),
        lambda: ops.bucketize(KEYS, 4.0),
        lambda: ops.segment_sum(some(4, 3), SEGMENTS, 6, consistency="batch", bits=36.5),
        lambda: ops.segment_sum(some(4, 3), SEGMENTS, 6.0),
        lambda: ops.hash_insert(*table(), LIST, 1.5),
    ],
)
def test_a_float_for_a_whole_number_is_refused_by_the_op(call):
    with pytest.raises(RuntimeError, match="Expected a value of type 'int'"):
        call()


def test_a_whole_number_that_is_a_tensor_or_a_bool_is_the_ops_affair():
    assert torch.equal(ops.owner_of(KEYS, torch.tensor(4)), ops.owner_of(KEYS, 4))
    assert torch.equal(ops.owner_of(KEYS, True), torch.zeros(len(KEYS), dtype=torch.int64))


def test_tensors_whose_memory_does_not_hold_their_values_meet_the_op():
    assert ops.unique(KEYS[:3]._neg_view())[0].tolist() == [-7, 3]
    assert torch.equal(
        ops.segment_sum(some(4, 3)._neg_view(), SEGMENTS, 6), -ops.segment_sum(some(4, 3), SEGMENTS, 6)
    )


@pytest.mark.parametrize(
    "squares",
    [
        lambda x: ops.gather_rows(x, torch.tensor([1, 0, 1])).square().sum(),
        lambda x: ops.segment_sum(x, torch.tensor([1, 1]), 3).square().sum(),
    ],
)
def test_second_derivatives_all_at_once(squares):
    x = some(2, 2)
    together = torch.autograd.functional.hessian(squares, x, vectorize=True)
    assert torch.equal(together, torch.autograd.functional.hessian(squares, x))
