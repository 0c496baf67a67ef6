"""Promise: inside `use_impl`, on that thread, every op without an `impl` of its own runs on that one."""

import threading

import pytest
import torch

from tritonrec import ops
from tritonrec.kernels import dispatch, launch
from tritonrec.kernels.op import Op
from tritonrec.nn import RECOMPUTED, GradientAccumulator, HSTUConfig
from tritonrec.nn.hstu import HSTULayer
from tritonrec.nn.tokens import Tokens

KEYS = torch.tensor([3, 1, 3])


@pytest.fixture
def ran(monkeypatch):
    """(op, implementation) of every op that ran, in order."""
    seen, run = [], Op._run

    def noted(self, arguments, impl):
        seen.append((self.name, ops.implementation(impl, arguments[self._first])))
        return run(self, arguments, impl)

    monkeypatch.setattr(Op, "_run", noted)
    return seen


def test_calls_and_launches_run_on_it(ran):
    with ops.use_impl("reference"):
        ops.unique(KEYS)
        launch.unique(KEYS)
        with torch.no_grad():
            ops.silu(torch.ones(3))
    ops.unique(KEYS)
    assert ran == [("unique", "reference")] * 2 + [("silu", "reference"), ("unique", "cpu")]


def test_an_explicit_choice_wins(ran):
    with ops.use_impl("reference"):
        ops.unique(KEYS, impl="cpu")
        launch.unique(KEYS, impl="cpu")
    assert ran == [("unique", "cpu")] * 2


def test_it_nests_and_an_exception_ends_it(ran):
    with ops.use_impl("reference"):
        with pytest.raises(KeyError), ops.use_impl("cpu"):
            ops.unique(KEYS)
            raise KeyError
        ops.unique(KEYS)
        with ops.use_impl("auto"):
            ops.unique(KEYS)
    ops.unique(KEYS)
    assert [impl for _, impl in ran] == ["cpu", "reference", "cpu", "cpu"]


def test_other_threads_keep_theirs(ran):
    with ops.use_impl("reference"):
        thread = threading.Thread(target=ops.unique, args=(KEYS,))
        thread.start()
        thread.join()
    assert ran == [("unique", "cpu")]


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_derivatives_run_on_it_wherever_backward_is_called(ran, accumulated, inside):
    layer = torch.nn.Linear(4, 3, bias=False)

    def forward():
        x = torch.ones(2, 4, requires_grad=True)
        return ops.silu(ops.linear(x, layer.weight, seq_offsets=torch.tensor([0, 2]))).sum()

    def run():
        with ops.use_impl("reference"):
            loss = forward()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()

    if accumulated:
        with GradientAccumulator(layer, 36).active():
            run()
    else:
        run()
    assert {impl for _, impl in ran} == {"reference"}
    names = {name for name, _ in ran}
    assert {"linear", "silu", "silu_backward"} <= names
    assert ("linear_weight_grad" in names) == accumulated


def test_a_derivative_runs_where_its_forward_ran(ran):
    loss = ops.silu(torch.ones(3, requires_grad=True)).sum()
    with ops.use_impl("reference"):
        loss.backward()
    assert ran == [("silu", "cpu"), ("silu_backward", "cpu")]


@pytest.mark.parametrize("exactly", [False, True])
def test_so_does_that_of_a_layer(ran, exactly):
    sizes = HSTUConfig(dim=4, layers=1, heads=1, qk_dim=2, v_dim=2, max_seq_len=4, recompute=RECOMPUTED)
    layer, tokens = HSTULayer(sizes), Tokens.place(torch.tensor([0, 2]), torch.tensor([5]), 4)
    with GradientAccumulator(layer, 36 if exactly else None).active():
        with ops.use_impl("reference"):
            loss = layer(torch.ones(2, 4, requires_grad=True), tokens, 3).sum()
        loss.backward()
    assert {impl for _, impl in ran} == {"reference"} and len(ran) > 10


def test_what_it_cannot_run_is_refused_as_an_explicit_choice_is(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("tritonrec.kernels.dispatch.emulated", None)
    for call in (ops.unique, launch.unique):
        with ops.use_impl("triton"), pytest.raises(ValueError, match="impl='triton' on a CPU tensor"):
            call(KEYS)
    with ops.use_impl("cpu"), pytest.raises(ValueError, match="impl='cpu' needs a CPU tensor"):
        ops.implementation("auto", torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"impl must be .*, got 'cuda'"), ops.use_impl("cuda"):
        pass


def test_a_compiled_function_follows_each_call(ran):
    compiled = torch.compile(lambda x: ops.silu(x * 2), fullgraph=True, backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    compiled(x).sum().backward()
    with ops.use_impl("reference"):
        compiled(x).sum().backward()
    assert ran == [
        ("silu", "cpu"), ("silu_backward", "cpu"), ("silu", "reference"), ("silu_backward", "reference")
    ]  # fmt: skip


def test_inside_a_compiled_function_it_is_refused():
    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x):
        with ops.use_impl("reference"):
            return ops.silu(x)

    with pytest.raises(Exception, match="use_impl"):
        compiled(torch.ones(3))


def test_what_a_thread_ran_on_is_as_before():
    with dispatch.runs_on("reference"):
        with dispatch.runs_on("cpu"):
            assert dispatch.default_impl() == "cpu"
        assert dispatch.default_impl() == "reference"
    assert dispatch.default_impl() == "auto"
