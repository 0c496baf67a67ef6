"""Promise: the guard looks again where a call takes another way, and leaves nothing on a batch."""

from dataclasses import replace

import pytest
import torch
from guard_models import Model, model
from trainer_parts import batches, parts, trainer

from tritonrec.pipeline import NotBatchInvariantError, guard
from tritonrec.pipeline.looks import path_of


def of_one_size(count):
    return [replace(batches(1, 9)[0], step=step) for step in range(count)]


class Switch:
    on = False


SWITCH = Switch()


def of_attribute(self, batch, x):
    return x - x.mean(0) if getattr(self, "late", False) else x


def of_global(self, batch, x):
    return x - x.mean(0) if SWITCH.on else x


def by_attribute(model):
    model.late = True


def by_method(model):
    model.body = lambda batch, x: x - x.mean(0)


def by_global(model):
    SWITCH.on = True


@pytest.mark.parametrize(
    ("body", "change"), [(of_attribute, by_attribute), (of_attribute, by_method), (of_global, by_global)]
)
@pytest.mark.parametrize("mode", ["reference", "nestpipe"])
def test_what_a_later_run_switches_on_is_compared_before_its_first_update(mode, body, change, monkeypatch):
    monkeypatch.setattr(SWITCH, "on", False)
    monkeypatch.setattr(guard, "LOOKED_AT", 1 << 40)  # draws no window
    made = parts(model(body=body))
    with trainer(made, mode) as training:
        list(training.run(batches(18, 9)))  # past the early window
        before = [each.clone() for each in made[0].parameters()]
        change(made[0])
        with pytest.raises(NotBatchInvariantError, match="values of other samples"):
            list(training.run(batches(20, 9)[18:]))
    assert all(map(torch.equal, before, made[0].parameters()))


def test_a_run_that_begins_without_samples_is_looked_at_with_its_first_ones(monkeypatch):
    monkeypatch.setattr(SWITCH, "on", False)
    monkeypatch.setattr(guard, "LOOKED_AT", 1 << 40)  # draws no window
    made, given = parts(model(body=of_global)), of_one_size(21)
    given[18] = given[18].select(torch.empty(0, dtype=torch.int64))
    with trainer(made, "sequential", micro_batches=1) as training:
        list(training.run(given[:18]))
        SWITCH.on = True
        with pytest.raises(NotBatchInvariantError, match="values of other samples"):
            list(training.run(given[18:]))


@pytest.mark.parametrize("due", [lambda step: step >= 20, lambda step: step > 16 and step % 7 == 3])
def test_a_loss_that_a_later_step_adds_is_found(due):
    def body(self, batch, x):
        return x - x.mean(0) if due(batch.step) else x

    with (
        trainer(parts(model(body=body)), "sequential", micro_batches=1) as training,
        pytest.raises(NotBatchInvariantError, match="values of other samples"),
    ):
        for result in training.run(of_one_size(200)):
            last = result.step
    assert 16 <= last < 199


def test_a_new_way_is_compared_once_and_loops_are_one_way():
    def body(self, batch, x):
        for _ in range(2 + batch.step % 5):
            x = torch.tanh(x)
        return x * 2 if batch.step % 2 else x

    with trainer(parts(model(body=body)), "sequential", micro_batches=1) as training:
        seen = [training.guard.checks for _ in training.run(of_one_size(60))]
    assert seen[-1] == 3  # the first window's, the other way's, the early window's


def test_ways_are_no_more_looked_at_once_they_are_many(monkeypatch):
    monkeypatch.setattr(guard, "LOOKED_AT", 1)
    monkeypatch.setattr(guard, "MOST_PATHS", 3)
    functions = [torch.tanh, torch.sin, torch.cos, torch.atan, torch.erf]

    def body(self, batch, x):
        return functions[batch.step % 5](x)

    with trainer(parts(model(body=body)), "sequential", micro_batches=1) as training:
        seen = [training.guard.checks for _ in training.run(of_one_size(10))]
    assert seen == [1, 2] + [3] * 8


def test_pairs_of_functions_are_a_way():
    x = torch.randn(3, requires_grad=True)
    once, twice, other = x.tanh().sum(), x.tanh().tanh().tanh().sum(), x.sin().tanh().sum()
    pairs = {("SumBackward0", "TanhBackward0"), ("TanhBackward0", "torch::autograd::AccumulateGrad")}
    assert path_of(once) == pairs
    assert path_of(twice) == path_of(x.tanh().tanh().sum()) == pairs | {("TanhBackward0", "TanhBackward0")}
    assert path_of({"a": once, "b": other, "c": x.detach()}) == path_of(once) | path_of(other)
    assert path_of(x.detach()) == frozenset()


class Marks(Model):
    """Writes on its batch, as a cache of a mask does."""

    def body(self, batch, x):
        object.__setattr__(batch, "calls", getattr(batch, "calls", 0) + 1)
        return x * batch.calls


@pytest.mark.parametrize("mode", ["reference", "sequential"])
def test_what_a_compared_call_sets_on_its_batch_is_not_what_training_gets(mode):
    losses = []
    for trusted in (False, True):
        each = batches(1, 9)
        with trainer(parts(Marks), mode, micro_batches=1, trust_model=trusted) as training:
            losses += [result.loss for result in training.run(each)]
            assert training.guard.checks == (not trusted)
    assert losses[0] == losses[1]


def test_a_loss_that_only_the_largest_of_the_batch_has_otherwise_is_found_in_halves():
    def body(self, batch, x):
        first = x.detach()[:, 0]
        return torch.where(((first == first.max()) & (len(x) > 4))[:, None], x * 0.5, x)

    with (
        trainer(parts(model(body=body)), "sequential", micro_batches=1) as training,
        pytest.raises(NotBatchInvariantError, match="whose loss of sample"),
    ):
        list(training.run(batches(1, 40)))
