"""The record of an op: what torch sees of a call, what is written, and which arguments are refused."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tritonrec import ops
from tritonrec.kernels import launch
from tritonrec.kernels.op import OPS, Op


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


# op -> the tensors that it writes to, and a call of the public function
WRITING = {
    "hash_insert": (
        lambda: [*table(), torch.tensor(2), torch.tensor(0)],
        lambda keys, rows, after, lost: ops.hash_insert(keys, rows, LIST, after, status=lost),
    ),
    "hash_assign": (
        lambda: [table()[1]],
        lambda rows: ops.hash_assign(table()[0], rows, LIST, LIST.abs()),
    ),
    "hash_erase": (lambda: [table()[1]], lambda rows: ops.hash_erase(table()[0], rows, LIST)),
    "scatter_rows": (
        lambda: [some(7, 3)],
        lambda out: ops.scatter_rows(out, ROWS, some(5, 3), source=SEGMENTS),
    ),
    "segment_sum_into": (
        lambda: [torch.zeros(6, 3, dtype=torch.int64), torch.tensor(0)],
        lambda out, lost: ops.segment_sum(some(4, 3), SEGMENTS, 6, consistency="batch", out=out, status=lost),
    ),
}


class Noted(TorchDispatchMode):
    """The names of our ops that pass by."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tritonrec":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", WRITING)
def test_autograd_learns_of_what_is_written(name):
    make, call = WRITING[name]
    written = make()
    before = [tensor._version for tensor in written]
    with Noted() as noted:
        call(*written)
    assert name in noted.names
    assert all(tensor._version > version for tensor, version in zip(written, before, strict=True))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", ["scatter_rows", "segment_sum_into"])
def test_a_value_that_backward_kept_is_not_overwritten_unseen(name, alone):
    out, weight = some(7, 3), some(7, 3).requires_grad_()
    product = (out * weight).sum()
    if name == "scatter_rows":
        move = launch.scatter_rows if alone else OPS[name]
        move(out, ROWS, some(5, 3), SEGMENTS)
    else:
        add = launch.segment_sum_into if alone else OPS[name]
        add(out, some(4, 3), SEGMENTS, 7, "window", 36, "rows")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_the_implementation_alone_gives_the_ops_results():
    assert torch.equal(launch.gather_rows(some(7, 3), ROWS), ops.gather_rows(some(7, 3), ROWS))
    assert all(map(torch.equal, launch.unique(KEYS), ops.unique(KEYS)))
    with Noted() as noted:
        launch.gather_rows(some(7, 3), ROWS)
    assert noted.names == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.owner_of(KEYS, 2.5),
        lambda: ops.bucketize(KEYS, 4.0),
        lambda: ops.segment_sum(some(4, 3), SEGMENTS, 6, consistency="batch", fraction_bits=36.5),
        lambda: ops.segment_sum(some(4, 3), SEGMENTS, 6.0),
        lambda: ops.hash_insert(*table(), LIST, 1.5),
    ],
)
def test_a_float_for_a_whole_number_is_refused(call):
    with pytest.raises(RuntimeError, match="Expected a value of type 'int'"):
        call()


def test_a_whole_number_may_be_a_tensor_or_a_bool():
    assert torch.equal(ops.owner_of(KEYS, torch.tensor(4)), ops.owner_of(KEYS, 4))
    assert torch.equal(ops.owner_of(KEYS, True), torch.zeros(len(KEYS), dtype=torch.int64))


def test_negated_views_are_read():
    assert ops.unique(KEYS[:3]._neg_view())[0].tolist() == [-7, 3]
    assert torch.equal(
        ops.segment_sum(some(4, 3)._neg_view(), SEGMENTS, 6), -ops.segment_sum(some(4, 3), SEGMENTS, 6)
    )


def test_fake_tensors_have_shapes_only():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = ops.gather_rows(mode.from_tensor(some(7, 3)), mode.from_tensor(ROWS))
    assert found.shape == (4, 3)


def test_the_profiler_names_the_ops():
    with torch.autograd.profiler.profile() as profile:
        ops.gather_rows(some(7, 3), ROWS)
    assert "tritonrec::gather_rows" in {event.key for event in profile.key_averages()}


def test_a_number_that_differs_from_call_to_call_compiles_one_graph():
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return graph.forward

    owners = torch.compile(lambda keys, size: ops.owner_of(keys, size), fullgraph=True, backend=note)
    for size in (3, 5, 9, 17):
        assert torch.equal(owners(KEYS, size), ops.owner_of(KEYS, size))
    assert len(graphs) <= 2


@pytest.mark.parametrize(
    "squares",
    [
        lambda x: ops.gather_rows(x, torch.tensor([1, 0, 1])).square().sum(),
        lambda x: ops.segment_sum(x, torch.tensor([1, 1]), 3).square().sum(),
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_second_derivatives_all_at_once(squares):
    x = some(2, 2)
    together = torch.autograd.functional.hessian(squares, x, vectorize=True)
    assert torch.equal(together, torch.autograd.functional.hessian(squares, x))


def test_a_schema_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"expected 'name\(arguments\) -> results', got 'nothing'"):
        Op("nothing", reference=test_negated_views_are_read, cpu="a:b", triton="a:b")
