"""Promise: a compiled model trains with the bits of the model itself, or is refused with what differs."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from threading import Barrier, Event, get_ident
from types import SimpleNamespace

import pytest
import torch
from speeds import slow_except
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from trainer_parts import DIM, Ranker, batches, parts, same, state, trained, trainer

from tritonrec import nn, ops
from tritonrec.kernels import compilation
from tritonrec.kernels.dispatch import is_compiling
from tritonrec.pipeline import StageFailedError
from tritonrec.pipeline import compiled as compiled_module
from tritonrec.pipeline import flight as flight_module
from tritonrec.pipeline.attributes import without_traces
from tritonrec.pipeline.compiled import Compilation
from tritonrec.pipeline.flight import Flight
from tritonrec.pipeline.model_call import CallerSettings


class Plain(Ranker):
    """`Ranker` without a list that grows, for which torch would compile each call anew."""

    def __init__(self):
        super().__init__()
        del self.seen

    def forward(self, batch, rows, seed):
        rows, tokens = rows["item"], batch.num_tokens
        hidden = torch.exp(-self.hidden(batch, rows[:tokens]).square())
        score = (hidden * rows[tokens : 2 * tokens]).sum(1)
        return nn.sum_by_sample(1 - torch.tanh(score), batch.offsets)


def compiled(backend):
    """`parts` with a model compiled in place, whose names stay."""
    torch._dynamo.reset()
    made = parts(Plain)
    made[0].compile(backend=backend)
    return made


def shifted(graph, _inputs):
    """A backend whose results are off by some units in the last place."""
    return lambda *inputs: tuple(
        each * (1 + 2.0**-22) if each.is_floating_point() else each for each in graph(*inputs)
    )


def failing(graph, _inputs):
    raise OSError("No working C++ compiler found")


CALLS = [
    ("eager", "nestpipe", 3), ("eager", "reference", 1), ("aot_eager", "reference", 1),
    ("aot_eager", "nestpipe", 3),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "mode", "micro_batches"), CALLS)
def test_a_compiled_model_has_the_bits_of_the_model_itself(backend, mode, micro_batches):
    want, losses = trained(parts(Plain), "reference", "batch", batches(3))
    got, found = trained(compiled(backend), mode, "batch", batches(3), micro_batches=micro_batches)
    assert same(got, want) and [each.loss for each in found] == [each.loss for each in losses]


def many_sizes():
    """Twenty batches of 5 to 9 samples and a different number of tokens each."""
    drawn = [each for size in range(5, 10) for each in batches(4, size)]
    return [replace(each, step=step) for step, each in enumerate(drawn)]


def seeded():
    """Its layers draw dropout, so that every step has seeds of its own."""
    torch.manual_seed(3)
    return nn.SASRec(nn.SASRecConfig(dim=DIM, layers=2, heads=2, max_seq_len=9, dropout=0.3))


@pytest.mark.if_changed
@pytest.mark.parametrize(
    ("make", "backend"),
    slow_except([(Plain, "eager"), (seeded, "eager")], product((Plain, seeded), ("eager", "aot_eager"))),
)
def test_a_whole_model_is_compiled_for_few_sizes_and_no_batch_alone(make, backend):
    """torch runs what it has compiled nine times as it is, with a warning of its own alone."""
    want, losses = trained(parts(make), "reference", "batch", many_sizes())
    torch._dynamo.reset()
    made = parts(make)
    made[0].compile(backend=backend)
    counters.clear()
    graphs, found = [], []
    with trainer(made, "sequential", "batch", micro_batches=1) as training:
        for each in many_sizes():
            found.append(training.step(each).loss)
            graphs.append(counters["stats"]["unique_graphs"])
    # the first batch, other numbers of tokens, another number of samples
    assert graphs[0] == 1 and graphs[4] == graphs[-1] <= 3 and not counters["graph_break"]
    assert same(state(made), want) and found == [each.loss for each in losses]


class Recording(Plain):
    def forward(self, batch, rows, seed):
        nn.record(rows=rows["item"])
        return super().forward(batch, rows, seed)


def test_a_comparison_records_nothing():
    torch._dynamo.reset()
    made = parts(Recording)
    made[0].compile(backend="eager")
    with trainer(made, "sequential", "batch", micro_batches=1) as training:
        assert [training.step(each).outputs for each in batches(2)] == [{}, {}]


class Zeros(Plain):
    """Gradients of its rows are zeros, with another sign in a graph."""

    def forward(self, batch, rows, seed):
        zero = 0.0 if is_compiling() else -0.0
        return super().forward(batch, {"item": rows["item"].detach() + rows["item"] * zero}, seed)


def test_exact_sums_know_one_zero():
    torch._dynamo.reset()
    made = parts(Zeros)
    made[0].compile(backend="eager")
    with trainer(made, "sequential", "batch", micro_batches=1) as training:
        assert training.step(batches(1)[0]).loss > 0


@pytest.mark.parametrize("mode", slow_except(["sequential"], ["reference", "sequential", "nestpipe"]))
def test_other_bits_are_refused_and_named(mode):
    made = compiled(shifted)
    before = [each.clone() for each in made[0].parameters()]
    words = "has other bits under torch.compile than without it .* backend='eager'"
    with pytest.raises((ValueError, StageFailedError), match=words):
        trained(made, mode, "batch", batches(1))
    assert same(before, list(made[0].parameters()))


class Late(Plain):
    """Its loss is tripled once `late` is set: torch compiles again."""

    late = False

    def forward(self, batch, rows, seed):
        losses = super().forward(batch, rows, seed)
        return losses * 3 if self.late else losses


@pytest.mark.if_changed
@pytest.mark.parametrize("mode", slow_except(["sequential"], ["reference", "sequential", "nestpipe"]))
@pytest.mark.parametrize("wrong", [False, True])
def test_a_later_compilation_is_compared_before_the_update(mode, wrong):
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return shifted(graph, inputs) if model.late and wrong else graph

    torch._dynamo.reset()
    model, *rest = parts(Late)
    model.compile(backend=backend)
    (first,) = batches(1)
    with trainer((model, *rest), mode, "batch", micro_batches=1) as training:
        training.step(first)
        training.step(replace(first, step=1))
        graphs, before = len(made), [each.clone() for each in model.parameters()]
        model.late = True
        if not wrong:
            training.step(replace(first, step=2))
        else:
            with pytest.raises((ValueError, StageFailedError), match=r"has other bits under torch\.compile"):
                training.step(replace(first, step=2))
    assert len(made) > graphs and same(before, list(model.parameters())) == wrong


def test_two_sizes_of_each_kind_and_one_are_compared():
    sizes = [(7, 40), (7, 40), (7, 41), (9, 40), (1, 3), (2, 1), (1, 1), (8, 30)]
    watch = Compilation(Ranker(), 36)
    new = [watch._is_new(SimpleNamespace(num_samples=b, num_tokens=n)) for b, n in sizes]
    assert new == [True, False, True, True, True, True, False, False]


@pytest.mark.slow
def test_window_consistency_takes_other_bits():
    got, _ = trained(compiled(shifted), "sequential", "window", batches(1))
    want, _ = trained(parts(Plain), "sequential", "window", batches(1))
    assert not same(got, want)


@pytest.mark.slow
def test_without_a_compiler_one_sentence_says_so():
    with pytest.raises(RuntimeError, match=r"could not compile the model .*No working C\+\+ compiler.*g\+\+"):
        trained(compiled(failing), "sequential", "window", batches(1))


@pytest.mark.slow
def test_steps_that_compile_are_told(monkeypatch):
    told = []
    monkeypatch.setattr(compilation, "compiling", [lambda: told.append(1)])
    with trainer(compiled("eager"), "sequential", "window", micro_batches=1) as training:
        for step in batches(2):
            training.step(step)
            assert told == [1], "the first step compiles"


def test_a_thread_that_compiles_nothing_computes_while_another_compiles(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # the process's, so any thread's
    with ops.use_impl("reference"):
        assert not is_compiling()
        assert ops.unique(torch.tensor([3, 3, 1]))[0].tolist() == [3, 1]
    with trainer(parts(), "nestpipe", "batch", micro_batches=1) as training:
        assert "score" in training.step(batches(1)[0]).outputs  # which is not recorded in a graph
    with FakeTensorMode():
        assert is_compiling()
        with pytest.raises(RuntimeError, match="use_impl inside of"), ops.use_impl("cpu"):
            pass


@pytest.mark.parametrize("who", ["comparison", "guard"])
def test_a_comparison_leaves_the_calls_of_other_threads_alone(monkeypatch, who):
    stances, both, other = [], Barrier(2), Event()
    eval_frame = torch._dynamo.eval_frame

    def look(*_given):
        stances.append((get_ident(), eval_frame._stance.stance))
        if len(stances) > 1 and stances[0][0] != get_ident():
            other.set()
        other.wait(0.3)  # in the meantime the other thread begins, where it may
        return {}

    def run(_number):
        made = parts(Plain)
        made[0].compile(backend="eager")
        calls, (batch,) = Compilation(made[0], 36), batches(1)
        both.wait()
        if who == "guard":
            with without_traces(made[0]):
                look()
        with calls.call(batch, {}, 1, CallerSettings()):
            look()

    monkeypatch.setattr(Compilation, "_gradients", look)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    seen = [stance for _, stance in stances]
    once = ["force_eager"] * (who == "guard") + ["default", "force_eager", "default"]
    by_thread = [[stance for thread, stance in stances if thread == each] for each in dict(stances)]
    assert by_thread == [once, once] and eval_frame._stance.stance == "default", seen


def test_batches_are_read_while_the_model_is_compiled(monkeypatch):
    def read():
        for step in batches(2):
            monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
            yield step

    with trainer(parts(Plain), "nestpipe", "batch", micro_batches=1) as training:
        assert len(list(training.run(read()))) == 2


class Deep(Ranker):
    """Two checkpointed parts between the rows and the score, with dropout of ours."""

    how = ""

    def __init__(self):
        super().__init__()
        layers = (nn.Linear(DIM, DIM), nn.GELU(), nn.Dropout(0.4), nn.LayerNorm(DIM))
        self.deep = torch.nn.Sequential(*layers, nn.Linear(DIM, DIM))

    def hidden(self, batch, rows):
        if self.how == "checkpoint":
            return checkpoint(self.deep, rows, use_reentrant=False)
        if self.how == "sequential":
            return checkpoint_sequential(self.deep, 2, rows, use_reentrant=False)
        return self.deep(rows)


@pytest.mark.parametrize(
    ("how", "consistency"),
    slow_except([("sequential", "batch")], product(("checkpoint", "sequential"), ("batch", "window"))),
)
def test_checkpointed_parts_add_their_gradients_once(how, consistency):
    class Checkpointed(Deep):
        pass

    Checkpointed.how = how
    plain = "reference" if consistency == "batch" else "sequential"
    want, _ = trained(parts(Deep), plain, consistency, batches(3))
    got, _ = trained(parts(Checkpointed), "nestpipe", consistency, batches(3))
    assert same(got, want)


def test_a_module_that_torch_compiles_is_known_by_its_name_or_its_call():
    plain, wrapping, in_place = (torch.nn.Linear(2, 2) for _ in range(3))
    wrapping._orig_mod = torch.nn.Linear(2, 2)
    in_place._compiled_call_impl = print
    for module in plain, wrapping, in_place:
        parent = torch.nn.Sequential(torch.nn.ReLU(), module)
        assert Compilation(parent, None).compiles == (module is not plain)


def test_steps_are_told_where_a_size_is_new_or_torch_has_compiled(monkeypatch):
    told, compared, count = [], [], [0]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0]._compiled_call_impl = print
    calls = Compilation(model, bits=3)
    monkeypatch.setattr(compiled_module, "note_compilation", lambda: told.append(1))
    monkeypatch.setattr(compiled_module, "_COMPILATIONS", SimpleNamespace(count=lambda: count[0]))
    monkeypatch.setattr(calls, "_compare", lambda *given: compared.append(given))

    def call(samples, compiles=False):
        batch = SimpleNamespace(num_samples=samples, num_tokens=7 * samples)
        with calls.call(batch, "rows", 5, "settings"):
            count[0] += compiles
        return len(told), batch

    first, batch = call(3)
    assert first == 1 and compared == [(batch, "rows", 5, "settings")]
    assert [call(3)[0], call(3, True)[0], call(0, True)[0], call(0)[0]] == [1, 2, 2, 2]
    assert len(compared) == 2


def test_a_compilation_of_any_thread_is_counted():
    from torch._dynamo.callback import callback_handler

    counted = compiled_module._Compilations()
    before = counted.count()
    callbacks = callback_handler.start_callbacks, callback_handler.end_callbacks
    try:
        assert all(each.count(counted._add) == 1 for each in callbacks)
        counted._add(None)
        assert counted.count() == before + 1
        assert all(each.count(counted._add) == 1 for each in callbacks)
    finally:
        for each in callbacks:
            each.remove(counted._add)


def test_a_call_is_compared_with_its_own_arguments(monkeypatch):
    given, flight = (
        [],
        SimpleNamespace(_graphs=None, model="model", _model_call=lambda exponent: nullcontext()),
    )
    flight.accumulator, flight.guard = SimpleNamespace(active=nullcontext), SimpleNamespace(see=None)
    flight._compilation = SimpleNamespace(call=lambda *each: given.append(each) or nullcontext())
    monkeypatch.setattr(flight_module, "train_micro_batch", lambda *each, gradients_of, see: each)
    arguments = "batch", "rows", 7, "settings"
    assert Flight.train_micro_batch(flight, *arguments, 0) == ("model", *arguments, 0)
    assert given == [arguments]
