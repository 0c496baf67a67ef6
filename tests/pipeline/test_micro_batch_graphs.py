"""Promise: a micro-batch that is padded, and computed from fixed tensors, has the bits of the model's call.

Without an accelerator, work is repeated here by calling it again; `tests/emulator/test_graphs.py` records it.
"""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tritonrec import nn
from tritonrec.data import NextItemLoader, load
from tritonrec.distributed import Communicators
from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.kernels.compilation import say_once
from tritonrec.nn import HSTU, Dropout, GradientAccumulator, HSTUConfig, MultiheadAttention
from tritonrec.pipeline import MicroBatchGraphs, Trainer, WindowConfig
from tritonrec.pipeline import graphs as graphs_module
from tritonrec.pipeline.graphs import CudaRecorder, share_of
from tritonrec.pipeline.model_call import CallerSettings, train_micro_batch
from tritonrec.settings import with_values

SIZES = HSTUConfig(dim=6, layers=1, heads=2, qk_dim=3, v_dim=4, max_seq_len=9, dropout=0.0)
LOG, DIM = load("zipf:users=60,items=80,seed=1"), 6
MICRO_BATCHES = {"one": [2], "some": [0, 4, 5], "all": list(range(7)), "none": []}


class Repeating:
    """Calls the work again, into the tensors of its first call."""

    def record(self, work):
        self.work, self.results = work, work()
        return self.results

    def replay(self):
        for target, again in zip(self.results, self.work(), strict=True):
            target.detach().copy_(again.detach())


class Seeds:
    """Numbers, as the CPU's kernels take them: what was written last."""

    def __init__(self, device, most):
        self.seed = 0

    def root(self):
        return self.seed

    def write(self, seed):
        self.seed = seed


@pytest.fixture(autouse=True)
def numbers(monkeypatch):
    monkeypatch.setattr(graphs_module, "DeviceSeeds", Seeds)


def model():
    torch.manual_seed(3)
    return HSTU(SIZES)


def batch(samples, negatives=2):
    return NextItemLoader(LOG, 7, 9, negatives, 3).batch(0).select(torch.tensor(samples, dtype=torch.int64))


def rows_of(part, dim=DIM):
    generator = torch.Generator().manual_seed(part.num_tokens)
    return torch.randn(
        part.num_tokens * (2 + part.negatives.shape[1]), dim, generator=generator
    ).requires_grad_()


def graphs(samples=8, tokens=70):
    return MicroBatchGraphs(samples, tokens, Repeating)


def called(net, parts, made=None):
    """Losses and gradients of rows of each part, and the sums of the model's gradients."""
    accumulator, found = GradientAccumulator(net), []
    for part in parts:
        rows, given = rows_of(part), (7, CallerSettings())
        if made is None:
            with accumulator.active():
                losses = train_micro_batch(net, part, {"item": rows}, *given)
        else:
            losses = made.train(net, accumulator, part, {"item": rows}, *given)
        found += [losses.detach(), rows.grad if len(rows) else rows.detach()]
    return [*found, *accumulator.take().values()]


def test_every_size_has_the_bits_of_the_model_s_call():
    net, made = model(), graphs()
    parts = [batch(samples) for samples in MICRO_BATCHES.values()]
    assert all(map(torch.equal, called(net, parts), called(net, parts, made)))
    assert (made.recorded, made.replayed) == (1, 3)


def test_a_graph_that_is_full_has_no_padding_and_the_same_bits():
    part, net = batch(MICRO_BATCHES["all"]), model()
    assert all(map(torch.equal, called(net, [part]), called(net, [part], graphs(7, part.num_tokens))))


def test_sizes_that_are_not_given_grow_with_the_micro_batches_and_keep_the_bits():
    net, made = model(), MicroBatchGraphs(recorder=Repeating)
    parts = [batch(samples) for samples in MICRO_BATCHES.values()]
    large = NextItemLoader(LOG, 80, 9, 2, 3).batch(0)
    assert parts[2].num_tokens > 9 and large.num_tokens > 64
    parts = [parts[0], large, *parts, large]
    assert all(map(torch.equal, called(net, parts), called(net, parts, made)))
    assert (made.recorded, made.replayed) == (2, 6) and made.samples >= large.num_samples
    most = 9 * large.num_tokens / 8  # in 64s
    assert most <= made.tokens < most + 64
    with pytest.raises(ValueError, match="and 70 tokens, and a micro-batch has"):
        called(net, [large], MicroBatchGraphs(tokens=70, recorder=Repeating))


def test_another_accumulator_or_number_of_negatives_is_recorded_anew():
    net, made = model(), graphs()
    for negatives, recorded in ((2, 1), (2, 2), (3, 3)):
        parts = [batch([2], negatives), batch([0, 4], negatives)]
        assert all(map(torch.equal, called(net, parts), called(net, parts, made)))
        assert made.recorded == recorded
    accumulator = GradientAccumulator(net)
    for negatives, recorded in ((2, 4), (3, 5), (3, 5)):
        part = batch([2], negatives)
        made.train(net, accumulator, part, {"item": rows_of(part)}, 7, CallerSettings())
        assert made.recorded == recorded
    net.extra = Dropout(0.1)
    made.train(net, accumulator, part, {"item": rows_of(part)}, 7, CallerSettings())
    assert made.recorded == 6


def with_module(module):
    net = model()
    net.extra = module
    return net


REFUSED = {
    "dropout": (lambda: with_module(torch.nn.Dropout(0.1)), {}, "extra is a Dropout, whose draws a graph"),
    "slopes": (lambda: with_module(torch.nn.RReLU()), {}, "extra is a RReLU, whose draws"),
    "recurrent": (lambda: with_module(torch.nn.GRU(2, 2, 2, dropout=0.1)), {}, "extra is a GRU, whose"),
    "attention": (lambda: with_module(MultiheadAttention(4, 2, dropout=0.1)), {}, "extra is a Multihead"),
    "window": (model, {"consistency": "window"}, "consistency 'batch'"),
    "precision": (model, {"precision": "bf16"}, "precision 'float32', got 'batch' and 'bf16'"),
    "another": (lambda: torch.nn.Linear(2, 2), {}, "next-item model, got Linear"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_recorded_is_refused_with_its_reason(case):
    make, changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        graphs().validate(make(), with_values(WindowConfig(), changes), torch.device("cpu"))


def test_what_drops_nothing_or_by_the_seed_is_recorded():
    for module in (torch.nn.Dropout(0.1).eval(), torch.nn.Dropout(0.0), torch.nn.ReLU(), Dropout(0.1)):
        graphs().validate(with_module(module), WindowConfig(), torch.device("cpu"))
    named = torch.nn.Module()
    named.dropout = torch.nn.Identity()  # a module of that name is no share
    assert share_of(named) == 0.0 and share_of(torch.nn.Dropout(0.25)) == 0.25


def test_hooks_devices_sizes_and_autocast_are_refused():
    hooked = model()
    hooked.norm.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="norm has hooks"):
        graphs().validate(hooked, WindowConfig(), torch.device("cpu"))
    with pytest.raises(ValueError, match="records on CUDA, and the trainer works on cpu"):
        MicroBatchGraphs(2, 9).validate(model(), WindowConfig(), torch.device("cpu"))
    part = batch([0, 1, 2])
    for sizes in ((2, 70), (3, part.num_tokens - 1)):
        with pytest.raises(
            ValueError, match=rf"it has {sizes[0]} samples and {sizes[1]} tokens, and a .* has 3 and"
        ):
            called(model(), [part], graphs(*sizes))
    for sizes in ((0, 9), (9, 0)):
        with pytest.raises(ValueError, match=f"at least 1, got {sizes[0]} and {sizes[1]}"):
            MicroBatchGraphs(*sizes)
    net = model()
    settings = CallerSettings((("cpu", torch.bfloat16),))
    with pytest.raises(ValueError, match=r"read under torch\.autocast"):
        graphs().train(net, GradientAccumulator(net), part, {"item": rows_of(part)}, 7, settings)


def test_outputs_that_a_graph_would_give_once_are_refused(monkeypatch):
    net = model()
    encode = net.encode

    def recorded(part, rows, seed):
        nn.record(rows=rows)
        return encode(part, rows, seed)

    monkeypatch.setattr(net, "encode", recorded)
    with pytest.raises(ValueError, match="records rows"):
        called(net, [batch([0, 1])], graphs())


def test_cuda_compiles_on_another_stream_before_it_records(monkeypatch):
    """Calls of `torch.cuda` in their order, with stand-ins."""
    log = []

    class Stream:
        def __init__(self, name="beside"):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    def graph(recorded, capture_error_mode):
        log.append(f"record, {capture_error_mode}")
        return nullcontext()

    def stream(used):
        log.append(f"on {used.name}")
        return nullcontext()

    stands_in = {
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: log.append("replay")),
        "Stream": Stream,
        "current_stream": lambda: Stream("current"),
        "stream": stream,
        "graph": graph,
    }
    for name, each in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, each)
    recorder = CudaRecorder()
    assert recorder.record(lambda: log.append("work") or len(log)) == 6
    recorder.replay()
    before = ["beside waits for current", "on beside", "work", "current waits for beside"]
    assert log == [*before, "record, thread_local", "work", "replay"]


def trainer_of(net, mode="nestpipe", config=None, communicators=None, **given):
    tables = HashTableCollection([FeatureConfig("item", DIM)], RowOptimizer("adam"), seed=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Trainer(net, tables, optimizer, communicators or Communicators.local(), mode, config, **given)


def test_a_trainer_refuses_graphs_that_its_device_cannot_record():
    net = model()
    with pytest.raises(ValueError, match="records on CUDA, and the trainer works on cpu"):
        trainer_of(net, graphs=MicroBatchGraphs(2, 9))


class Failing:
    def record(self, work):
        raise RuntimeError("operation not permitted when stream is capturing")


def by_default(monkeypatch, net=None, recorder=Repeating, **changes):
    """The graphs that a trainer takes by itself, on a machine with CUDA."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(graphs_module, "CudaRecorder", recorder)
        config = with_values(WindowConfig(4), changes)
        return MicroBatchGraphs.by_default(model() if net is None else net, config, torch.device("cuda"))


def trained(graphs, steps=3, alone=False, mode="nestpipe", net=None, **changes):
    """Losses of all steps and what the model has become."""
    net = model() if net is None else net
    batches = [NextItemLoader(LOG, 7, 9, 2, 3).batch(step) for step in range(steps)]
    config = with_values(WindowConfig(4), changes)
    with trainer_of(net, mode, config, graphs=graphs) as trainer:
        results = [trainer.step(each) for each in batches] if alone else list(trainer.run(batches))
    return [each.losses for each in results] + [each.detach() for each in net.parameters()]


def test_a_run_records_by_itself_behind_its_first_window_and_a_step_alone_does_not(monkeypatch, capsys):
    say_once.cache_clear()
    expected = trained(None)
    made = by_default(monkeypatch)
    assert all(map(torch.equal, trained(made, alone=True), expected)) and made.recorded == 0
    assert "CUDA graph" not in capsys.readouterr().err
    assert all(map(torch.equal, trained(made), expected))
    assert (made.recorded, made.replayed) == (1, 2 * 4)
    assert capsys.readouterr().err.count("micro-batches run as one CUDA graph; Trainer(graphs=None)") == 1


def test_a_trainer_of_several_ranks_takes_none_by_itself(monkeypatch):
    made, taken, models = by_default(monkeypatch), [], [model(), model()]
    monkeypatch.setattr(MicroBatchGraphs, "by_default", lambda *given: made)

    def rank(communicators):
        net = models[communicators.rank]
        with trainer_of(net, communicators=communicators) as trainer:
            taken.append(trainer._pending.flight._graphs)

    run_ranks(1, rank)
    run_ranks(2, rank)
    assert taken == [made, None, None]


def test_a_recording_that_fails_is_told_once_and_the_run_goes_on(monkeypatch):
    made = by_default(monkeypatch, recorder=Failing)
    with pytest.warns(UserWarning, match=r"whose recording failed \(operation not permitted") as warned:
        got = trained(made)
    assert len([each for each in warned if "recording failed" in str(each.message)]) == 1
    assert all(map(torch.equal, got, trained(None))) and made.replayed == 0


@pytest.mark.parametrize(("mode", "size", "accumulate"), [("fwp", 4, 2), ("sequential", 1, 4)])
def test_no_graph_is_recorded_where_a_run_is_one_window(monkeypatch, mode, size, accumulate):
    made = by_default(monkeypatch, micro_batches=size, accumulate=accumulate)
    changes = {"mode": mode, "micro_batches": size, "accumulate": accumulate}
    got = trained(made, 2 * accumulate, **changes)
    assert all(map(torch.equal, got, trained(None, 2 * accumulate, **changes)))
    assert made.recorded <= 1


def test_what_becomes_of_a_model_after_its_trainer_was_made_is_not_left_out(monkeypatch):
    calls, made, net = [], by_default(monkeypatch), model()
    assert len(trained(made, net=net)) and made.replayed
    before = made.replayed
    hook = net.norm.register_forward_hook(lambda *given: calls.append(1))
    part = batch([0, 4])
    given = net, GradientAccumulator(net), part, {"item": rows_of(part)}
    assert not made.takes(*given, CallerSettings(), 99)
    with pytest.raises(ValueError, match="norm has hooks, which a graph would not call"):
        graphs().train(*given, 7, CallerSettings())
    hook.remove()
    assert made.takes(*given, CallerSettings(), 99)
    net.norm.__class__ = type("Mine", (type(net.norm),), {})
    assert not made.takes(*given, CallerSettings(), 99) and made.replayed == before


@pytest.mark.if_changed
def test_a_graph_s_memory_is_free_before_the_next_one_is_recorded_and_after_a_run(monkeypatch):
    alive, at_record = weakref.WeakSet(), []

    class Counted(Repeating):
        def __init__(self):
            gc.collect()  # of this stand-in, which keeps the work that keeps it
            at_record.append(len(alive))
            alive.add(self)

    made = by_default(monkeypatch, recorder=Counted)
    for _ in range(2):
        trained(made)
        gc.collect()
        assert not alive
    small, large = batch([2]), NextItemLoader(LOG, 80, 9, 2, 3).batch(0)
    one = MicroBatchGraphs(recorder=Counted)
    called(model(), [small, large, batch([2], negatives=3)], one)
    assert at_record == [0] * 5 and one.recorded == 3


def test_a_call_beside_the_step_goes_without(monkeypatch):
    made, net = by_default(monkeypatch), model()
    with trainer_of(net, "sequential", WindowConfig(4), graphs=made) as trainer:
        flight, part = trainer._pending.flight, batch([0, 4])
        flight.begin()
        flight.called = 99
        with flight.beside(torch.get_rng_state()):
            flight.train_micro_batch(part, {"item": rows_of(part)}, 7, CallerSettings(), 0)
        assert made.recorded == 0
        flight.train_micro_batch(part, {"item": rows_of(part)}, 7, CallerSettings(), 0)
        assert made.recorded == 1
        flight.end()


def test_a_batch_that_no_graph_takes_goes_without(monkeypatch):
    made, net = by_default(monkeypatch), model()
    part = batch([0, 4, 5])
    given = net, GradientAccumulator(net), part, {"item": rows_of(part)}
    assert made.takes(*given, CallerSettings(), 5) and not made.takes(*given, CallerSettings(), 4)
    assert not made.takes(*given, CallerSettings((("cpu", torch.bfloat16),)), 5)
    assert not made.takes(*given[:2], batch([]), *given[3:], CallerSettings(), 5)
    assert not made.takes(*given[:2], SimpleNamespace(num_samples=2), *given[3:], CallerSettings(), 5)
    # those that a caller gave refuse what they cannot take
    assert graphs().takes(*given, CallerSettings(), 1)


class Own(torch.nn.Module):
    def forward(self, x):
        return x if float(x.sum()) else x + 1  # waits for the device


def test_no_model_is_recorded_by_itself_of_which_a_part_is_unknown(monkeypatch):
    def patched():
        net = model()
        net.norm.forward = net.norm.forward
        return net

    assert by_default(monkeypatch) is not None
    assert by_default(monkeypatch, consistency="window") is None
    assert by_default(monkeypatch, with_module(torch.nn.ReLU())) is not None
    for net in (with_module(Own()), with_module(torch.nn.Dropout(0.1)), patched()):
        assert by_default(monkeypatch, net) is None
    compiled = model()
    compiled.compile(backend="eager")
    assert by_default(monkeypatch, compiled) is None
    assert MicroBatchGraphs.by_default(model(), WindowConfig(4), torch.device("cuda")) is None  # no CUDA here
