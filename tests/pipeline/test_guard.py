"""Promise: consistency "batch" refuses models whose samples see each other, by module; no bit moves."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from guard_models import (
    Backward,
    Counter,
    FirstMean,
    FirstMeanInAParameter,
    FirstMeanInNestedContainers,
    Function,
    Model,
    Running,
    edits,
    edits_through_numpy,
    in_batch_softmax,
    model,
    part,
    refuse,
    two_towers,
)
from speeds import slow_except
from torch.utils.checkpoint import checkpoint
from trainer_parts import DIM, NoParameters, Ranker, batches, parts, same, state, trainer

from tritonrec import nn
from tritonrec.distributed import Communicators
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.kernels.compilation import say_once
from tritonrec.pipeline import NotBatchInvariantError, StageFailedError, Trainer, WindowConfig, guard

tnn = torch.nn

OF_BATCH = {
    "mean": lambda x: x - x.mean(0),
    "max": lambda x: x / x.detach().abs().max(),
    "deviation": lambda x: x / (1 + x.detach().std(0)),  # that of a sample alone is no number
    "size": lambda x: x / len(x),
    "order": lambda x: x * torch.arange(1, len(x) + 1)[:, None],
    "roll": lambda x: x + 0.5 * x.roll(1, 0),
    "neighbours": lambda x: x + x[(torch.cdist(x.detach(), x.detach()) + 9.0 * torch.eye(len(x))).argmin(1)],
    "sorted": lambda x: x * (1 + x.detach().argsort(0).argsort(0).float()),
}
"""Functions of the vectors of all samples."""
MIXING = {
    "in-batch softmax": (model(loss=in_batch_softmax), "Own", "values of other samples"),
    **{
        what: (part("inside", lambda each=each: Function(each)), "inside", "values of other samples: a mean")
        for what, each in OF_BATCH.items()
    },
    "first mean": (part("first", FirstMean), "first", "attribute mean is state"),
    "first mean in nested containers": (
        part("first", FirstMeanInNestedContainers), "first", "attribute kept is state",
    ),
    "first mean in a parameter": (
        part("first", FirstMeanInAParameter), None, "calls change parameter first.mean",
    ),
    "longest": (
        model(body=lambda self, batch, x: 0.2 * x * int(batch.offsets.diff().max())),
        "Own", "values of other samples",
    ),
    "batch norm": (part("bn", lambda: tnn.BatchNorm1d(DIM)), "bn", "batch norm, which mixes"),
    "batch norm without affine": (
        part("bn", lambda: tnn.BatchNorm1d(DIM, affine=False)), "bn", "batch norm, which mixes",
    ),
    "batch norm without statistics": (
        part("bn", lambda: tnn.BatchNorm1d(DIM, affine=False, track_running_stats=False)),
        "bn", "batch norm, which mixes",
    ),
    "dropout": (part("drop", lambda: tnn.Dropout(0.4)), "drop", "take tritonrec.nn.Dropout"),
    "two towers": (two_towers, "Towers", "values of other samples"),
    "running buffer": (part("running", Running), "running", "a buffer is state"),
    "counter": (part("counter", Counter), "counter", "a buffer is state"),
    "edit of the batch": (model(body=edits), None, "in place"),
    "edit of the batch through numpy": (model(body=edits_through_numpy), None, "in place"),
    "noise of torch": (
        model(body=lambda self, batch, x: x + torch.randn_like(x)), "Own", r"global generator \(aten",
    ),
    "noise of numpy": (
        model(body=lambda self, batch, x: x * float(np.random.rand())), "Own", "of torch, numpy or Python",
    ),
    "noise of Python": (
        model(body=lambda self, batch, x: x * random.random()), "Own", "of torch, numpy or Python",
    ),
    "mean in backward": (model(body=lambda self, batch, x: Backward.apply(x)), None, "gradient of"),
    "torch's linear": (part("plain", lambda: tnn.Linear(DIM, DIM)), "plain", "tritonrec.nn.Linear"),
    "broadcast parameter": (
        model(
            make=lambda self: setattr(self, "scale", tnn.Parameter(torch.ones(DIM))),
            body=lambda self, batch, x: x * self.scale,
        ),
        "Own", "nn.expand",
    ),
}  # fmt: skip
FEW = ["in-batch softmax", "batch norm without affine", "dropout", "two towers", "counter"]


@pytest.mark.parametrize(
    ("what", "mode"),
    slow_except(
        [*product(MIXING, ["reference"]), *product(FEW, ["nestpipe"])],
        product(MIXING, ["reference", "sequential", "dbp", "fwp", "nestpipe"]),
    ),
)
def test_samples_that_see_each_other_are_refused_by_module(what, mode):
    build, module, reason = MIXING[what]
    made = parts(build)
    before = state(made)
    with (
        pytest.raises((ValueError, StageFailedError), match=reason) as refused,
        trainer(made, mode) as training,
    ):
        list(training.run(batches(2)))
    if module is not None:
        assert isinstance(refused.value, NotBatchInvariantError) and refused.value.module == module
        assert "consistency='window'" in str(refused.value)
    if mode == "reference":  # before the first update
        assert same(state(made)[2:], before[2:])


def test_a_parameter_too_large_to_copy_says_that_it_is_not_put_back(monkeypatch):
    monkeypatch.setattr("tritonrec.pipeline.attributes.MOST_VALUES", 0)
    made = parts(MIXING["first mean in a parameter"][0])
    words = r"first.mean \(which keeps the call's values: .*anew\)"
    with pytest.raises(NotBatchInvariantError, match=words), trainer(made, "reference") as training:
        list(training.run(batches(1)))


class PaddedAttention(tnn.Module):
    """Over the samples' tokens, padded and masked."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, rows, batch, longest):
        wide, valid = nn.pad(rows, batch.offsets, longest)
        with nn.padded():
            out, _ = self.attention(wide, wide, wide, key_padding_mask=~valid, need_weights=False)
        return nn.unpad(out, batch.offsets, len(rows))


class OfTokens(Model):
    """A loss from `tokens` (L, d) of the samples."""

    longest = 9

    def tokens(self, batch, rows):
        return rows

    def forward(self, batch, rows, seed):
        rows, count = rows["item"], batch.num_tokens
        x = self.mix(self.tokens(batch, rows[:count]))
        return nn.sum_by_sample(1 - torch.tanh((x * rows[count : 2 * count]).sum(1)), batch.offsets)


def of_tokens(**methods):
    return type("OfTokens", (OfTokens,), methods)


def to_the_longest(self, batch, rows):
    return self.attention(rows, batch, int(batch.offsets.diff().max()))


def own_softmax(self, batch, x):
    return x * torch.softmax(x.detach(), 1)


def by_length(self, batch, x):
    return torch.where((batch.offsets.diff() > 3)[:, None], x, 0.5 * x)


def once(self, batch, x):
    """A buffer with the step's number: the same in every micro-batch."""
    self.step.fill_(batch.step)
    return x * (1 + self.step % 2)


def padded_drop(self, x):
    with nn.padded():
        return self.drop(x)


HARMLESS = {
    "layer norm": part("norm", lambda: nn.LayerNorm(DIM)),
    "rms norm": part("norm", lambda: nn.RMSNorm(DIM)),
    "softmax of a sample": model(body=own_softmax),
    "lengths": model(body=by_length),
    "dropout": part("drop", lambda: nn.Dropout(0.4)),
    "torch's dropout in eval": part("drop", lambda: tnn.Dropout(0.4).eval()),
    "torch's dropout of nothing": part("drop", lambda: tnn.Dropout(0.0)),
    "attention of torch": part(
        "heads", lambda: tnn.MultiheadAttention(DIM, 2, 0.2).requires_grad_(False).eval(),
        body=lambda self, batch, x: F.scaled_dot_product_attention(*[x[:, None, None]] * 3)[:, 0, 0],
    ),
    "batch norm in eval": part("bn", lambda: tnn.BatchNorm1d(DIM, affine=False).eval()),
    "attention": of_tokens(
        make=lambda self: setattr(self, "attention", PaddedAttention()),
        tokens=lambda self, batch, rows: self.attention(rows, batch, self.longest),
    ),
    "checkpointed": part(
        "drop", lambda: nn.Dropout(0.3),
        body=lambda self, batch, x: checkpoint(self.padded, x, use_reentrant=False),
        padded=padded_drop,
    ),
    "a frozen layer": part(
        "frozen", lambda: nn.Linear(DIM, DIM).requires_grad_(False)
    ),
    "a copied edit": model(body=lambda self, batch, x: x * batch.timestamps.clone().mul_(0).add_(1)[:1]),
    "a buffer of the step": model(
        make=lambda self: self.register_buffer("step", torch.zeros((), dtype=torch.int64)), body=once
    ),
    "a forward hook": part("norm", lambda: _hooked(nn.LayerNorm(DIM))),
    "no parameters": NoParameters,
    "a table's model": Ranker,
}  # fmt: skip


def _hooked(module):
    module.register_forward_hook(lambda module, args, output: output * 2)
    return module


@pytest.mark.parametrize("what", HARMLESS)
def test_other_models_train_and_no_bit_moves(what):
    ends = []
    for trusted in (False, True):
        made = parts(HARMLESS[what])
        generators = torch.manual_seed(6), random.seed(6), np.random.seed(6)
        config = WindowConfig(3, seed=4)
        with Trainer(*made, Communicators.local(), "sequential", config, trust_model=trusted) as training:
            losses = [result.losses for result in training.run(batches(3))]
            checks = training.guard.checks
        assert (checks > 0) != trusted and generators
        drawn = [torch.rand(2), torch.tensor([random.random()]), torch.from_numpy(np.random.rand(2))]
        buffers = [each.clone() for each in made[0].buffers()]
        ends.append([*state(made), *losses, *drawn, *buffers])
    assert same(*ends)


class LateMixer(Model):
    """Its samples see each other where there are more than eight, or once `late` is set."""

    late = False

    def body(self, batch, x):
        return x - x.mean(0) if self.late or len(x) > 8 else x


def test_a_buffer_that_a_call_changes_after_the_comparison_is_refused():
    def body(self, batch, x):
        if batch.step == 1:
            self.seen.add_(1)
        return x

    build = model(make=lambda self: self.register_buffer("seen", torch.zeros(())), body=body)
    (first,) = batches(1)
    refuse(build, "call changed buffer seen", [replace(first, step=step) for step in range(3)])


def test_a_new_size_is_compared():
    with trainer(parts(LateMixer), "sequential", micro_batches=1) as training:
        list(training.run(batches(2, 7)))
        with pytest.raises(NotBatchInvariantError, match="values of other samples"):
            list(training.run(batches(3, 9)[2:]))


def switched(model):
    model.eval()
    model.late = True


def with_a_buffer(model):
    model.register_buffer("more", torch.zeros(1))
    model.late = True


def with_a_hook(model):
    model.mix.register_forward_hook(lambda module, args, output: output - output.mean(0))


def frozen(model):
    model.mix.bias.requires_grad_(False)
    model.late = True


def with_another_module(model):
    model.mix = tnn.Sequential(model.mix, Function(OF_BATCH["mean"]))


@pytest.mark.every_case
@pytest.mark.parametrize("change", [switched, with_a_buffer, with_a_hook, frozen, with_another_module])
@pytest.mark.parametrize("mode", ["reference", "nestpipe"])
def test_a_changed_model_is_compared_again(mode, change):
    made = parts(LateMixer)
    with trainer(made, mode) as training:
        list(training.run(batches(2)))
        change(made[0])
        with pytest.raises(NotBatchInvariantError):
            list(training.run(batches(3)[2:]))


def test_a_buffer_that_the_caller_moved_is_compared_again():
    def body(self, batch, x):
        return x - self.share * x.mean(0)

    made = parts(model(make=lambda self: self.register_buffer("share", torch.zeros(())), body=body))
    with trainer(made) as training:
        list(training.run(batches(1)))
        made[0].share.fill_(0.5)
        with pytest.raises(NotBatchInvariantError, match="values of other samples"):
            list(training.run(batches(2)[1:]))


def test_some_micro_batches_are_drawn_and_compared(monkeypatch):
    monkeypatch.setattr(guard, "EVERY", 3)
    made = parts(LateMixer)
    with trainer(made, "sequential", micro_batches=1) as training:
        seen = []
        for _ in training.run(batches(12, 5)):
            seen.append(training.guard.checks)
        made[0].late = True
        with pytest.raises(NotBatchInvariantError, match="values of other samples"):
            list(training.run(batches(60, 5)[12:]))
    assert seen[0] == 1 and 2 <= seen[-1] < 12


class LateCounter(Model):
    """From its twentieth call on a loss depends on how often the model was called."""

    calls = 0

    def body(self, batch, x):
        self.calls += 1
        return x / (1 + max(0, self.calls - 20) * 0.1)


def test_what_calls_keep_is_found_where_it_shows_late():
    with (
        trainer(parts(LateCounter, lr=1e-3), "sequential", micro_batches=1) as training,
        pytest.raises(NotBatchInvariantError, match="whose loss of sample"),
    ):
        for result in training.run(batches(40)):
            last = result.step
    assert last == 31  # the window before the next power of two


class EarlierWeights(Model):
    """Its first call keeps a function of the weights, which a restart would take from later ones."""

    kept = None

    def body(self, batch, x):
        if self.kept is None:
            self.kept = self.mix.weight.detach().sum(0)
        return x * self.kept


def test_what_calls_keep_of_earlier_weights_is_found():
    refuse(EarlierWeights, "attribute kept is state", batches(18), parts={"lr": 1e-3})


class OfFour(Model):
    def body(self, batch, x):
        return x * 2 if len(x) == 4 else x


def test_the_number_of_samples_that_training_computes_together_is_compared():
    refuse(OfFour, "whose loss of sample", batches(1, 12), micro_batches=3)


def test_an_early_window_is_compared_too():
    with trainer(parts(LateMixer), "sequential", micro_batches=1) as training:
        seen = [training.guard.checks for _ in training.run(batches(18, 5))]
    assert seen[0] == 1 and seen[16] == seen[15] + 1


def test_what_calls_keep_is_that_of_training_alone():
    made = parts(LateCounter)
    with trainer(made, "sequential", micro_batches=1) as training:
        list(training.run(batches(3)))
        assert made[0].calls == 3 and training.guard.checks


def test_a_batch_that_comes_again_has_no_sample_twice():
    each = batches(1, 1)[0]
    with trainer(parts(Ranker), "sequential", micro_batches=1) as training:
        list(training.run([replace(each, step=step) for step in range(3)]))
        assert training.guard.checks == 1  # alone: its company of earlier windows is itself


def test_micro_batches_of_one_sample_are_compared_in_company():
    refuse(model(loss=in_batch_softmax), "module Own", mode="nestpipe", micro_batches=7)


@pytest.mark.parametrize("what", ["dropout", "counter", "noise of numpy"])
def test_a_batch_of_one_sample_shows_draws_and_what_calls_keep(what):
    build, _, reason = MIXING[what]
    refuse(build, reason, batches(1, 1))


def test_a_harmless_model_with_batches_of_one_sample_is_compared_once_alone_and_then_in_company():
    with trainer(parts(Ranker), "sequential", micro_batches=1) as training:
        list(training.run(batches(4, 1)))
        assert training.guard.checks == 3  # alone, and beside earlier samples for each of two sizes
        list(training.run(batches(5, 2)[4:]))
        assert training.guard.checks == 4


def test_batches_of_one_sample_are_compared_beside_those_of_earlier_windows():
    """The mean of one sample is that sample, alone and whatever its copies."""
    centred = model(body=lambda self, batch, x: x - x.mean(0))
    with trainer(parts(centred), "sequential", micro_batches=1) as training:
        steps = training.run(batches(4, 1))
        next(steps)
        with pytest.raises(NotBatchInvariantError, match="values of other samples"):
            next(steps)


@pytest.mark.parametrize("mode", ["sequential", "nestpipe"])
def test_samples_that_see_each_other_in_larger_batches_alone_are_found(mode):
    """No micro-batch of three has eight samples, and the batch that synchronous training takes has."""

    def body(self, batch, x):
        return x - x.mean(0) if batch.num_samples >= 8 else x

    refuse(model(body=body), "in a batch of 24", batches(1, 24), mode, micro_batches=8)


@pytest.mark.parametrize("mode", ["reference", "nestpipe"])
def test_a_trusted_model_trains_and_it_is_said(mode, capsys):
    say_once.cache_clear()
    with trainer(parts(model(loss=in_batch_softmax)), mode, trust_model=True) as training:
        assert len(list(training.run(batches(2)))) == 2
        assert training.recorder.metadata["trust_model"] is True
    assert capsys.readouterr().err.count("trust_model") == 1


def test_at_window_consistency_samples_may_see_each_other():
    with trainer(parts(model(loss=in_batch_softmax)), consistency="window") as training:
        assert len(list(training.run(batches(2)))) == 2


def test_a_checkpoint_inside_of_padded_is_told_where_to_enter_it():
    outside = part(
        "layer", lambda: nn.Linear(DIM, DIM),
        body=lambda self, batch, x: checkpoint(self.layer, x, use_reentrant=False),
    )  # fmt: skip
    with (
        pytest.raises(ValueError, match=r"enter nn.padded\(\) .* inside of what is checkpointed"),
        trainer(parts(outside), "reference") as training,
    ):
        list(training.run(batches(1)))


def test_an_error_of_the_model_is_its_own():
    def body(self, batch, x):
        raise KeyError("nowhere")

    with pytest.raises(KeyError, match="nowhere"), trainer(parts(model(body=body)), "reference") as training:
        list(training.run(batches(1)))


def test_a_gradient_without_an_exact_sum_is_no_verdict():
    def loss(self, x, y):
        return (x * y).sum(1) * 1e30

    with pytest.raises(ArithmeticError), trainer(parts(model(loss=loss)), "reference") as training:
        list(training.run(batches(1)))


def test_a_size_without_a_verdict_is_compared_again(monkeypatch):
    made = parts(Ranker)
    with trainer(made, "sequential", micro_batches=1) as training:
        with monkeypatch.context() as patched:
            patched.setattr(guard._Calls, "_judge", _no_exact_sum)
            list(training.run(batches(2)))
        assert training.guard.checks == 2
        list(training.run(batches(4)[2:]))
        assert training.guard.checks == 3


def _no_exact_sum(*arguments):
    raise ArithmeticError("no exact sum")


def test_a_compiled_model_is_compared_without_compilation():
    made = parts(Ranker)
    made[0].mix.compile(backend="eager")
    with trainer(made, "sequential") as training:
        list(training.run(batches(2)))
        assert training.guard.checks


def test_a_refusal_on_one_rank_names_it_on_all():
    class OnRankOne(Model):
        rank = 0

        def body(self, batch, x):
            return x - x.mean(0) if self.rank else x

    def on_rank(communicators):
        made = parts(OnRankOne)
        made[0].rank = communicators.rank
        with trainer(made, communicators=communicators, micro_batches=1) as training:
            list(training.run(batches(2, 7, communicators.rank, 2)))

    with pytest.raises(NotBatchInvariantError, match="values of other samples"):
        run_ranks(2, on_rank)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_source_of_batches_may_draw_meanwhile(trusted):
    def source():
        for batch in batches(6):
            drawn.append(torch.rand(3).tolist())
            yield batch

    drawn, made = [], parts()
    torch.manual_seed(3)
    with trainer(made, trust_model=trusted) as training:
        list(training.run(source()))
    torch.manual_seed(3)
    assert drawn == [torch.rand(3).tolist() for _ in range(6)]
