"""A call that nobody watches leaves the dispatcher out, and every other one meets the registered op."""

import threading

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tritonrec.kernels import hstu_attention as folder
from tritonrec.kernels.dispatch import PLAIN_NUMBERS, in_plain_eager
from tritonrec.kernels.hstu_attention import HSTUBias, HSTUMask, hstu_attention

OPS = ["hstu_attention", "hstu_attention_backward"]


class Noted(TorchDispatchMode):
    """The names of our ops that pass by."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tritonrec":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def case():
    """do, then the leaves q, k, v and both tables, and a function of the leaves."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(8, 2, 7), (8, 2, 5), (8, 2, 5), (8, 2, 7), (9,), (4,)]
    do, *leaves = (torch.randn(shape, generator=generator) + 0.1 for shape in shapes)
    leaves = [leaf.requires_grad_() for leaf in leaves[:3]] + [torch.nn.Parameter(t) for t in leaves[3:]]
    times = torch.randint(0, 50, (8,), generator=generator)
    offsets, targets = torch.tensor([0, 5, 5, 8]), torch.tensor([2, 0, 1])

    def attend(q, k, v, pos_weights, ts_weights):
        return hstu_attention(
            q, k, v, offsets, 5, alpha=0.6, scaling_seqlen=7, mask=HSTUMask(targets),
            bias=HSTUBias(pos_weights, ts_weights, times),
        )  # fmt: skip

    return do, leaves, attend


def results(do, leaves, attend):
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


@pytest.fixture
def entered(monkeypatch):
    """The names of the registered ops that Python enters, in order."""
    names = []
    for name in OPS:
        op = getattr(folder, f"_{name}")
        note = lambda *arguments, name=name, op=op: names.append(name) or op(*arguments)  # noqa: E731
        monkeypatch.setattr(folder, f"_{name}", note)
    return names


def test_plain_calls_leave_the_dispatcher_out_and_keep_their_bits(entered):
    do, leaves, attend = case()
    plain = results(do, leaves, attend)
    with torch.no_grad():
        assert torch.equal(attend(*leaves), plain[0])
    assert entered == []
    with Noted() as noted:
        watched = results(do, leaves, attend)
        with torch.no_grad():
            assert torch.equal(attend(*leaves), plain[0])
    assert noted.names == [*OPS, OPS[0]] == entered
    assert all(value.any() for value in plain) and all(map(torch.equal, plain, watched))


def test_a_mode_that_begins_after_forward_sees_backward():
    do, leaves, attend = case()
    out = attend(*leaves)
    expected = torch.autograd.grad(out, leaves, do, retain_graph=True)
    with Noted() as noted:
        got = torch.autograd.grad(out, leaves, do)
    assert noted.names == OPS[1:] and all(map(torch.equal, got, expected))


def test_a_second_derivative_is_refused():
    do, leaves, attend = case()
    dq, *_ = torch.autograd.grad(attend(*leaves), leaves, do, create_graph=True)
    with pytest.raises(RuntimeError, match="hstu_attention_backward"):
        torch.autograd.grad(dq.sum(), leaves)


def test_fake_tensors_have_shapes_only():
    do, leaves, attend = case()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = results(mode.from_tensor(do), [mode.from_tensor(leaf) for leaf in leaves], attend)
    assert [value.shape for value in got] == [do.shape, *(leaf.shape for leaf in leaves)]
    fake = mode.from_tensor(do)
    assert not in_plain_eager(fake)  # outside of its mode too


def test_a_compiled_graph_holds_the_ops():
    do, leaves, attend = case()
    graphs = []

    def note(graph, inputs):
        graphs.append([node.target._opname for node in graph.graph.nodes if "tritonrec" in str(node.target)])
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    got, expected = results(do, leaves, compiled), results(do, leaves, attend)
    assert graphs == [OPS[:1], OPS[1:]] and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_the_op(strict):
    _, leaves, attend = case()
    layer = torch.nn.Module()
    layer.forward = attend
    exported = torch.export.export(layer, tuple(leaf.detach() for leaf in leaves), strict=strict)
    assert torch.ops.tritonrec.hstu_attention.default in {node.target for node in exported.graph.nodes}


def test_the_profiler_names_the_ops():
    do, leaves, attend = case()
    with torch.autograd.profiler.profile() as profile:
        results(do, leaves, attend)
    assert {f"tritonrec::{name}" for name in OPS} <= {event.key for event in profile.key_averages()}


def test_a_profiler_of_all_threads_names_the_ops_of_a_thread_that_was_up_before():
    do, leaves, attend = case()
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    started = threading.Event()
    thread = threading.Thread(target=lambda: (started.wait(), results(do, leaves, attend)))
    thread.start()
    with torch.profiler.profile(experimental_config=config) as profile:
        started.set()
        thread.join()
    assert {f"tritonrec::{name}" for name in OPS} <= {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_who_is_plain():
    one, seen = torch.ones(3), []

    def note(*arguments):
        seen.append(in_plain_eager(*arguments))
        return arguments[0] * 2

    def noted(transform, *arguments):
        seen.clear()
        transform(note)(*arguments)
        return seen[0]

    assert in_plain_eager(one, torch.nn.Parameter(one), None, 3, "cpu")
    assert in_plain_eager(one, 3, 0.5, True, [1, 2], plain=PLAIN_NUMBERS)
    assert not any(in_plain_eager(one, other) for other in (0.5, True, [1, 2]))
    assert not in_plain_eager(one._neg_view()) and not in_plain_eager(one, torch._efficientzerotensor(3))
    assert in_plain_eager(one.clone().requires_grad_()) and in_plain_eager(one[:0])
    other = one.as_subclass(Subclass)
    assert not in_plain_eager(other) and not in_plain_eager(one, other)
    assert not in_plain_eager(one.to("meta"))
    assert not in_plain_eager(one, ShapeEnv().create_unbacked_symint())
    assert not noted(torch.func.vmap, one) and not noted(torch.func.functionalize, one)
    assert not noted(lambda f: torch.func.grad(lambda x: f(x).sum()), one)
    assert not noted(make_fx, one)
    assert not noted(lambda f: lambda x: torch.jit.trace(f, x, check_trace=False), one)
    for mode in (BaseTorchFunctionMode(), Noted(), FakeTensorMode(), torch.device("cpu")):
        with mode:
            assert not in_plain_eager(one), mode
    assert noted(lambda f: f, one)
