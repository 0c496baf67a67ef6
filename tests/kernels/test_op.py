"""The record of an op: what torch sees of a call, what is written, and which arguments are refused."""

import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from dispatched import DispatchedOps
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from tritonrec import ops
from tritonrec.kernels import dispatch, launch
from tritonrec.kernels.op import OPS, Op, _plain_keys, annotated_launches, annotation
from tritonrec.kernels.races import declared


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
    with DispatchedOps() as dispatched:
        launch.gather_rows(some(7, 3), ROWS)
    assert dispatched.names == []


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


def test_a_compiled_functions_graphs_hold_no_part_of_an_implementation():
    """After a break of the graph a kernel runs under dynamo, which would trace tensors that it makes."""
    found = []

    def backend(graph, _inputs):
        found.extend(node.name for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def between(x):
        torch._dynamo.graph_break()
        return torch.ops.tritonrec.unique(KEYS, None, "cpu"), x * 2

    torch._dynamo.reset()
    (keys, *_), doubled = torch.compile(between, backend=backend)(x := some(3))
    assert torch.equal(doubled, x * 2) and torch.equal(keys, ops.unique(KEYS)[0])
    assert found == ["mul"]


def attention():
    """do, then the leaves q, k, v and both tables, and a function of the leaves."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(8, 2, 7), (8, 2, 5), (8, 2, 5), (8, 2, 7), (9,), (4,)]
    do, *leaves = (torch.randn(shape, generator=generator) + 0.1 for shape in shapes)
    leaves = [leaf.requires_grad_() for leaf in leaves[:3]] + [torch.nn.Parameter(t) for t in leaves[3:]]
    times = torch.randint(0, 50, (8,), generator=generator)
    offsets, mask = torch.tensor([0, 5, 5, 8]), ops.HSTUMask(torch.tensor([2, 0, 1]))

    def attend(q, k, v, pos_weights, ts_weights):
        bias = ops.HSTUBias(pos_weights, ts_weights, times)
        return ops.hstu_attention(q, k, v, offsets, 5, alpha=0.6, scaling_seqlen=7, mask=mask, bias=bias)

    return do, leaves, attend


def results(do, leaves, attend):
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


FORWARD, BACKWARD = "hstu_attention", "hstu_attention_backward"


def test_a_mode_that_begins_after_forward_sees_backward():
    do, leaves, attend = attention()
    out = attend(*leaves)
    expected = torch.autograd.grad(out, leaves, do, retain_graph=True)
    with DispatchedOps() as dispatched:
        got = torch.autograd.grad(out, leaves, do)
    assert dispatched.names == [BACKWARD] and all(map(torch.equal, got, expected))


def test_a_compiled_graph_has_the_ops():
    do, leaves, attend = attention()
    graphs = []

    def note(graph, inputs):
        graphs.append([node.target._opname for node in graph.graph.nodes if "tritonrec" in str(node.target)])
        return make_boxed_func(graph)

    compiled = torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note))
    got, expected = results(do, leaves, compiled), results(do, leaves, attend)
    assert graphs == [[FORWARD], [BACKWARD]] and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_the_op(strict):
    _, leaves, attend = attention()
    layer = torch.nn.Module()
    layer.forward = attend
    exported = torch.export.export(layer, tuple(leaf.detach() for leaf in leaves), strict=strict)
    assert torch.ops.tritonrec.hstu_attention.default in {node.target for node in exported.graph.nodes}


def test_a_profiler_of_all_threads_names_the_ops_of_a_thread_that_was_up_before():
    do, leaves, attend = attention()
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    started = threading.Event()
    thread = threading.Thread(target=lambda: (started.wait(), results(do, leaves, attend)))
    thread.start()
    with torch.profiler.profile(experimental_config=config) as profile:
        started.set()
        thread.join()
    names = {event.key for event in profile.key_averages()}
    assert {f"tritonrec::{FORWARD}", f"tritonrec::{BACKWARD}"} <= names


def test_a_number_that_differs_from_call_to_call_compiles_one_graph():
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return graph.forward

    owners = torch.compile(lambda keys, size: ops.owner_of(keys, size), fullgraph=True, backend=note)
    for size in (3, 5, 9, 17):
        assert torch.equal(owners(KEYS, size), ops.owner_of(KEYS, size))
    assert len(graphs) <= 2


def test_a_schema_that_is_none_is_refused():
    with pytest.raises(RuntimeError, match="only the operator name was given"):
        Op("nothing", reference=test_negated_views_are_read, cpu="a:b", triton="a:b")


def test_a_check_that_names_no_argument_of_the_schema_is_refused():
    with pytest.raises(TypeError, match="takes 'columns'; the schema has x, rows"):
        Op(
            "probe(Tensor x, Tensor rows) -> Tensor",
            reference=lambda x, rows: x, cpu="", triton="", check=lambda rows, columns: None,
        )  # fmt: skip
    assert "probe" not in OPS


def test_a_check_gets_the_arguments_that_it_names_and_the_rest():
    seen = []
    Op(
        "probe_of_checks(Tensor x, int first, Tensor rows, int dim, float scale) -> Tensor",
        reference=lambda x, *_: x.clone(), cpu="", triton="", fake=lambda x: x.new_empty(x.shape),
        check=(
            lambda dim, first: seen.append((dim, first)),
            lambda first, dim, *rest: seen.append((first, dim, rest)),
            lambda rows, width=3: seen.append((len(rows), width)),
        ),
    )(torch.ones(2), 5, torch.ones(4), 7, 0.5, impl="reference")  # fmt: skip
    del OPS["probe_of_checks"]
    assert seen == [(7, 5), (5, 7, (0.5,)), (4, 3)]


def test_a_cpu_has_no_compute_capability(monkeypatch):
    monkeypatch.setattr(dispatch, "emulated", None)
    assert dispatch.capability(torch.zeros(1)) == (0, 0)
    monkeypatch.setattr(dispatch, "emulated", (9, 0))
    assert dispatch.capability(torch.zeros(1)) == (9, 0)


def test_the_kernels_of_a_cpu_take_its_tensors_alone():
    with pytest.raises(ValueError, match="impl='cpu' needs a CPU tensor, got one on meta"):
        dispatch.implementation("cpu", torch.zeros(1, device="meta"))


def test_the_number_of_a_device_is_one_that_the_machine_has(monkeypatch):
    for name, value in (
        ("is_available", True), ("current_accelerator", torch.device("cuda")),
        ("device_count", 2), ("current_device_index", 1),
    ):  # fmt: skip
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    assert dispatch.usable_device("cuda") == dispatch.usable_device("cuda:1") == torch.device("cuda:1")
    assert dispatch.usable_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ValueError, match="device 'cuda:2' is not usable: this machine has 2 of them"):
        dispatch.usable_device("cuda:2")


def test_a_race_is_declared_of_an_argument_that_the_kernel_has():
    kernel = SimpleNamespace(arg_names=["out_ptr", "count"])
    assert declared(races=("out_ptr",))(kernel).declared == {"out_ptr": (True, False)}
    with pytest.raises(ValueError, match=r"no arguments named \['in_ptr'\]: the kernel has out_ptr, count"):
        declared(races=("out_ptr",), varies=("in_ptr",))(kernel)


class Marked(torch.Tensor):
    pass


@contextmanager
def scripted():
    """Inside of a trace by torch.jit."""
    inside = []
    torch.jit.trace(lambda x: (inside.append(gathered()), x + 1)[1], (some(2),), check_trace=False)
    yield inside[0]


@contextmanager
def mapped():
    """Inside of torch.func.vmap, of a tensor that is mapped and one that is not."""
    inside, source = [], some(7, 3)
    torch.func.vmap(lambda x: (inside.append(gathered(source)), x)[1])(some(2))
    yield inside[0]


def gathered(source=None, rows=None, **given):
    with torch.no_grad():
        return ops.gather_rows(
            some(7, 3) if source is None else source, ROWS if rows is None else rows, **given
        )


@contextmanager
def within(context, *source):
    with context:
        yield gathered(*source)


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


SEEN = {
    "a mode": lambda: within(DispatchedOps()),
    "a mode of functions": lambda: within(Functions()),
    "torch's profiler": lambda: within(torch.profiler.profile()),
    "inference": lambda: within(torch.inference_mode()),
    "torch.jit.trace": scripted,
    "vmap": mapped,
    "a subclass": lambda: within(nullcontext(), some(7, 3).as_subclass(Marked)),
    "negation": lambda: within(nullcontext(), torch.complex(some(7, 3), -some(7, 3)).conj().imag),
    "meta": lambda: within(nullcontext(), some(7, 3).to("meta"), ROWS.to("meta")),
}


@pytest.mark.parametrize("case", ["plain", "a parameter", "autocast", *SEEN])
def test_a_call_passes_the_dispatcher_where_somebody_would_see_it(case, monkeypatch):
    record, calls = OPS["gather_rows"], []
    registered = record.registered
    monkeypatch.setattr(record, "registered", lambda *given: (calls.append(1), registered(*given))[1])
    if case in SEEN:
        with SEEN[case]() as got:
            assert calls
    else:
        source = torch.nn.Parameter(some(7, 3)) if case == "a parameter" else some(7, 3)
        with torch.autocast("cpu", torch.bfloat16) if case == "autocast" else nullcontext():
            got = gathered(source)
        assert not calls
    assert got.is_meta or torch.equal(got, some(7, 3)[ROWS])


def test_a_trace_before_dispatch_holds_the_op():
    traced = make_fx(lambda keys: ops.unique(keys)[0], pre_dispatch=True)(KEYS)
    assert torch.ops.tritonrec.unique.default in {node.target for node in traced.graph.nodes}
    assert torch.equal(traced(torch.tensor([4, 2, 4, 9, 9, 9, 1, 1])), torch.tensor([4, 2, 9, 1]))


def test_a_first_call_in_inference_mode_leaves_later_calls_plain():
    _plain_keys.cache_clear()
    with torch.inference_mode():
        gathered()
    assert OPS["gather_rows"]._is_plain((some(7, 3), ROWS, None))
    with torch.inference_mode():
        assert not OPS["gather_rows"]._is_plain((some(7, 3), ROWS, None))


def test_a_number_of_another_type_is_the_dispatchers_to_judge(monkeypatch):
    record, calls = OPS["owner_of"], []
    registered = record.registered
    monkeypatch.setattr(record, "registered", lambda *given: (calls.append(1), registered(*given))[1])
    plain = ops.owner_of(KEYS, 3)
    assert not calls and torch.equal(ops.owner_of(KEYS, torch.tensor(3)), plain) and len(calls) == 1


def test_launches_are_named_for_a_profiler_on_request():
    for wanted in (False, True):
        named = annotated_launches() if wanted else nullcontext()
        with named, torch.profiler.profile() as profile, annotation("some_launch"):
            torch.zeros(3).add(1)
        assert ("tritonrec::some_launch" in {each.key for each in profile.key_averages()}) == wanted
