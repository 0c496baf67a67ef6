"""Promise: a micro-batch replayed from a recorded graph has the bits of the model's call.

`test_plugin.py` runs this file with ``--emulate``. The GPU is pretended, and the graph is the emulator's
stand-in for an accelerator's.
"""

import pytest
import torch
from pretended import pretended
from speeds import slow_except

from tritonrec.data import NextItemLoader, load
from tritonrec.distributed import Communicators
from tritonrec.embedding import FeatureConfig, HashTableCollection, Placement, RowOptimizer
from tritonrec.harness.emulator.graph import EmulatedRecorder
from tritonrec.harness.job import dense_optimizer
from tritonrec.kernels import dispatch
from tritonrec.kernels.deferred import DeferredErrors
from tritonrec.nn import (
    HSTU,
    Dropout,
    FuXi,
    FuXiConfig,
    GradientAccumulator,
    HSTUConfig,
    SASRec,
    SASRecConfig,
    scaled_dot_product_attention,
    sum_by_sample,
)
from tritonrec.ops import ExactSumError, use_impl
from tritonrec.pipeline import ExchangeConfig, MicroBatchGraphs, Trainer, WindowConfig
from tritonrec.pipeline.model_call import CallerSettings, train_micro_batch

pytestmark = pytest.mark.skipif(dispatch.emulated is None, reason="needs pytest --emulate")
SIZES = HSTUConfig(dim=6, layers=1, heads=2, qk_dim=3, v_dim=4, max_seq_len=9, dropout=0.0)
LOG, DIM = load("zipf:users=60,items=80,seed=1"), 6
MICRO_BATCHES = {"one": [2], "some": [0, 4, 5], "all": list(range(7)), "none": []}


@pytest.fixture(autouse=True)
def gpu():
    with pretended() as made, made.stage("test"):
        yield made


def model(**changes):
    torch.manual_seed(3)
    return HSTU(HSTUConfig(**{**vars(SIZES), **changes})).to("cuda")


def batch(samples, step=0):
    whole = NextItemLoader(LOG, 7, 9, 2, 3).batch(step)
    return whole.select(torch.tensor(samples, dtype=torch.int64)).to("cuda")


def rows_of(part):
    generator = torch.Generator().manual_seed(part.num_tokens)
    count = part.num_tokens * (2 + part.negatives.shape[1])
    return torch.randn(count, DIM, generator=generator).to("cuda").requires_grad_()


def graphs(samples=8, tokens=70):
    recorders = []
    made = MicroBatchGraphs(samples, tokens, lambda: recorders.append(EmulatedRecorder()) or recorders[-1])
    return made, recorders


def called(net, parts, run, seeds=None):
    """Losses and gradients of rows of each part, and the sums of the model's gradients."""
    accumulator, found = GradientAccumulator(net), []
    with use_impl("triton"):
        for part, seed in zip(parts, seeds or [7] * len(parts), strict=True):
            rows = rows_of(part)
            found.append((run(accumulator, part, rows, seed), rows.grad))
    return found, accumulator.take()


def plain(net):
    def run(accumulator, part, rows, seed):
        with accumulator.active():
            return train_micro_batch(net, part, {"item": rows}, seed, CallerSettings())

    return run


def replayed(net, made):
    return lambda accumulator, part, rows, seed: made.train(
        net, accumulator, part, {"item": rows}, seed, CallerSettings()
    )


def same(a, b):
    if a is None or b is None:
        return all(each is None or not each.numel() for each in (a, b))
    return torch.equal(a, b)


@pytest.mark.parametrize("bias", slow_except([True], [True, False]))
def test_every_size_has_the_bits_of_the_model_s_call(bias):
    net, (made, recorders) = model(relative_bias=bias), graphs()
    parts = [batch(samples) for samples in MICRO_BATCHES.values()] + [batch([3, 1], step=1)]
    expected, sums = called(net, parts, plain(net))
    found, got = called(net, parts, replayed(net, made))
    for (losses, rows), (other, others) in zip(expected, found, strict=True):
        assert torch.equal(losses, other) and same(rows, others)
    assert all(torch.equal(sums[name], got[name]) for name in sums) and any(map(torch.any, sums.values()))
    assert (made.recorded, made.replayed, len(recorders)) == (1, 4, 1)


class DropsMore(HSTU):
    """With draws of the trainer's seed beside those of its layers, one module twice."""

    def __init__(self, config):
        super().__init__(config)
        self.more = Dropout(0.5)

    def encode(self, batch, rows, seed=0):
        return self.more(super().encode(batch, self.more(rows), seed))


KINDS = {
    "hstu": (HSTU, HSTUConfig), "fuxi": (FuXi, FuXiConfig), "module": (DropsMore, HSTUConfig),
    "sasrec": (SASRec, SASRecConfig),
}  # fmt: skip
SEEDS = [7, 7, 2**62 + 11, -5, 0]


@pytest.mark.parametrize("kind", slow_except(["module"], KINDS))
def test_dropout_draws_from_the_seed_of_each_micro_batch(kind):
    """The same samples under other seeds, of which the first is not the recorded one."""
    torch.manual_seed(3)
    sizes = {**vars(SIZES), "layers": 2, "dropout": 0.4, "input_dropout": 0.3}
    build, config = KINDS[kind]
    net = build(config(**{k: v for k, v in sizes.items() if k in config.__dataclass_fields__})).to("cuda")
    made, _ = graphs(4, 30)
    parts = [batch(MICRO_BATCHES["some"])] * len(SEEDS)
    expected, sums = called(net, parts, plain(net), SEEDS)
    found, got = called(net, parts, replayed(net, made), SEEDS)
    for (losses, rows), (other, others) in zip(expected, found, strict=True):
        assert torch.equal(losses, other) and torch.equal(rows, others)
    assert all(torch.equal(sums[name], got[name]) for name in sums)
    assert torch.equal(expected[0][0], expected[1][0])
    assert not any(torch.equal(expected[0][0], each) for each, _ in expected[2:])
    assert made.recorded == 1 and made.replayed == len(SEEDS)


def test_another_share_of_dropout_is_recorded_anew():
    net, (made, _) = model(dropout=0.4), graphs()
    accumulator, part, losses = GradientAccumulator(net), batch([0, 4]), []
    for p in 0.4, 0.1, 0.1:
        net.layers[0].gate.dropout = p
        with use_impl("triton"):
            losses += [run(accumulator, part, rows_of(part), 7) for run in (plain(net), replayed(net, made))]
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[2], losses[3])
    assert not torch.equal(losses[1], losses[3]) and made.recorded == 2


def test_samples_of_padding_add_nothing_where_their_losses_have_gradients():
    net, (made, _) = model(), graphs()
    forward = net.forward

    def more(batch, rows, seed):
        hidden = net.encode(batch, rows["item"][: batch.num_tokens])
        return forward(batch, rows, seed) + sum_by_sample(hidden[:, 0], batch.offsets)

    net.forward = more
    parts = [batch(MICRO_BATCHES["all"]), batch(MICRO_BATCHES["one"])]
    _, sums = called(net, parts, plain(net))
    _, got = called(net, parts, replayed(net, made))
    assert all(torch.equal(sums[name], got[name]) for name in sums) and bool(sums["norm.bias"][0])


def test_no_constant_of_the_recorded_work_depends_on_the_samples():
    net, work = model(), []
    for samples in MICRO_BATCHES["one"], MICRO_BATCHES["all"]:
        made, recorders = graphs()
        called(net, [batch(samples)], replayed(net, made))
        recorder = recorders[0]
        recorded = list(recorder.work)
        # recorded once more, when the fixed tensors have samples
        made._graph.record(recorder, CallerSettings())
        assert recorder.work == recorded
        work.append(recorded)
    assert work[0] == work[1]
    launches = [each for each in work[0] if "." in each[0]]
    assert 15 < len(launches) <= 40, [each[0] for each in launches]


def test_a_micro_batch_is_recorded_and_replayed_without_a_wait(gpu):
    net, (made, _), errors = model(), graphs(), DeferredErrors()
    parts = [batch(MICRO_BATCHES["some"]), batch(MICRO_BATCHES["all"])]
    rows = [rows_of(part) for part in parts]
    accumulator = GradientAccumulator(net)
    with use_impl("triton"), errors.active(), gpu.stage("micro-batches"):
        for part, each in zip(parts, rows, strict=True):
            made.train(net, accumulator, part, {"item": each}, 7, CallerSettings())
    # the stand-in makes tensors of constants on the host, and copies them
    waits = [line for stage, line in gpu.waits if stage == "micro-batches" and "old.copy_(new)" not in line]
    assert not waits, waits
    assert gpu.launches["micro-batches"] and all(each.grad.is_cuda for each in rows)
    errors.check()


def test_a_wait_inside_is_refused_when_it_is_recorded():
    net, (made, _) = model(), graphs()
    encode = net.encode
    net.encode = lambda batch, rows, seed=0: encode(batch, rows * float(rows.abs().max() >= 0), seed)
    with pytest.raises(RuntimeError, match="aten::_local_scalar_dense reads values"):
        called(net, [batch([1])], replayed(net, made))


DRAWS = {
    "torch": (lambda x: torch.nn.functional.dropout(x, 0.5), "draws from torch's generator"),
    "attention": (
        lambda x: scaled_dot_product_attention(*[x.view(1, 1, *x.shape)] * 3, dropout_p=0.5).view(x.shape),
        "softmax attention is in no graph",
    ),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_that_a_graph_would_repeat_are_refused_when_it_is_recorded(kind):
    draw, message = DRAWS[kind]
    net, (made, _) = model(), graphs()
    encode = net.encode
    net.encode = lambda batch, rows, seed=0: encode(batch, draw(rows), seed)
    with pytest.raises(ValueError, match=message):
        called(net, [batch([1])], replayed(net, made))


def test_an_error_of_a_replay_is_put_off_with_its_name():
    net, (made, _) = model(), graphs()
    accumulator, errors, part = GradientAccumulator(net), DeferredErrors(), batch([0, 4])
    with use_impl("triton"), errors.active():
        for scale in 1.0, float("inf"), 1.0:
            rows = (rows_of(part).detach() * scale).requires_grad_()
            made.train(net, accumulator, part, {"item": rows}, 7, CallerSettings())
    with pytest.raises(ExactSumError):
        errors.check()


def trained(gpu, made, **changes):
    net, rule = model(**changes), RowOptimizer("adam", lr=0.05)
    placement = Placement("device", "cuda")
    feature = FeatureConfig("item", DIM)
    tables = HashTableCollection([feature], rule, seed=2, slots=8, chunk_rows=32, placement=placement)
    optimizer = dense_optimizer(net.parameters(), "adam", 0.05)
    parts = [NextItemLoader(LOG, 7, 9, 2, 3).batch(step) for step in range(4)]
    config = WindowConfig(2, exchange=ExchangeConfig(first_use=True))
    parts_of = net, tables, optimizer, Communicators.local(), "nestpipe", config
    with Trainer(*parts_of, device="cuda", graphs=made) as trainer:
        actions = trainer.program.actions

        def seen(action):
            def stage(places, micro_batch=None):
                with gpu.stage("trainer"):
                    action(places, micro_batch)

            return stage

        actions.update({name: seen(action) for name, action in actions.items()})
        losses = [result.loss for result in trainer.run(parts[:2])] + [trainer.step(parts[2]).loss]
    return losses, [*tables.export()["item"], *net.state_dict().values()]


@pytest.mark.parametrize("dropout", slow_except([0.3], [0.0, 0.3]))
def test_a_trainer_replays_its_micro_batches_and_ends_at_the_same_bits(gpu, dropout):
    made, recorders = graphs(5, 40)
    (losses, state), (others, same_state) = (trained(gpu, each, dropout=dropout) for each in (None, made))
    assert losses == others and all(map(torch.equal, state, same_state))
    assert made.replayed == 6 and made.recorded == len(recorders) == 2  # a run and a step
