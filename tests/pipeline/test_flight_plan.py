"""Promise: a trainer computes HSTU by one op wherever that has the bits of the modules."""

from types import SimpleNamespace

import pytest
import torch
from trainer_parts import DIM, batches, optimizer_of, same, state, trainer

from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.nn import HSTU, HSTUConfig, next_item_step
from tritonrec.pipeline.stages import window

CONFIG = HSTUConfig(dim=DIM, layers=2, heads=2, qk_dim=3, v_dim=4, max_seq_len=20, dropout=0.3)


def parts():
    torch.manual_seed(5)
    model = HSTU(CONFIG)
    tables = HashTableCollection([FeatureConfig("item", DIM)], RowOptimizer("adam", lr=0.05), seed=2)
    return model, tables, optimizer_of(model)


@pytest.fixture
def steps(monkeypatch):
    """Micro-batches that were computed by a plan."""
    seen = []

    def counted(self, *arguments, backward=next_item_step.Step.backward):
        seen.append(self)
        return backward(self, *arguments)

    monkeypatch.setattr(next_item_step.Step, "backward", counted)
    return seen


def losses_of(training, given=None):
    return torch.cat([result.losses for result in training.run(batches(4) if given is None else given)])


@pytest.mark.parametrize("consistency", ["batch", "window"])
@pytest.mark.parametrize("mode", ["sequential", "nestpipe"])
def test_bits_are_those_of_the_modules(mode, consistency, steps, monkeypatch):
    found = []
    for _ in range(2):
        made = parts()
        with trainer(made, mode, consistency) as training:
            losses = losses_of(training)
        found.append([*state(made), losses])
        monkeypatch.setattr(next_item_step, "plan", lambda *arguments: None)
    assert len(steps) == 4 * 3
    assert same(*found)


def test_the_reference_calls_the_modules(steps):
    found = []
    for mode in ("reference", "sequential"):
        made = parts()
        with trainer(made, mode) as training:
            losses = losses_of(training)
        found.append([*state(made), losses])
        assert len(steps) == (0 if mode == "reference" else 12)
    assert same(*found)


def test_a_hook_added_between_results_is_called(steps):
    model, seen = (made := parts())[0], []
    with trainer(made, "sequential", trust_model=True) as training:
        results = training.run(batches(6))
        next(results)
        model.layers[1].register_forward_hook(lambda *arguments: seen.append(1))
        assert len(steps) == 3
        list(results)
    assert len(seen) == 5 * 3 and len(steps) == 3


def test_parameters_in_new_memory_are_found_again(steps):
    def run(moves):
        made = parts()
        with trainer(made, "sequential") as training:
            results = training.run(batches(4))
            for _ in results:
                for parameter in made[0].parameters() if moves else ():
                    parameter.data = parameter.data.clone()
        return state(made)

    assert same(run(True), run(False))
    assert len(steps) == 24


def test_a_plan_is_made_once_for_an_update(steps, monkeypatch):
    plans, plan = [], next_item_step.plan
    monkeypatch.setattr(next_item_step, "plan", lambda *arguments: plans.append(1) or plan(*arguments))
    with trainer(parts(), "sequential") as training:
        losses_of(training)
    assert len(steps) == 12 and len(plans) == 4


def test_bfloat16_calls_the_modules(steps):
    with trainer(parts(), "sequential", precision="bf16") as training:
        losses_of(training)
    assert not steps


def test_hooks_of_parameters_are_called_where_gradients_are_theirs(steps):
    made, seen = parts(), []
    for parameter in made[0].parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    with trainer(made, "sequential", "window") as training:
        losses_of(training)
    assert len(steps) == 12
    assert len(seen) == 12 * len(list(made[0].parameters()))


@pytest.mark.parametrize("mode", ["sequential", "nestpipe"])
@pytest.mark.parametrize("bad", ["row", "norm"])
def test_an_update_that_is_not_finite_is_left_out(mode, bad, steps):
    """By the gradients of a label's and a negative's row, or by all of them."""
    found = []
    for kind in ("reference", mode):
        made = parts()
        model, tables, _ = made
        if bad == "row":
            tables.load("item", torch.tensor([3]), torch.full((1, 3 * DIM), 1e30))
        else:
            model.norm.weight.data[0] = torch.inf
        with trainer(made, kind, skip_nonfinite=True) as training:
            results = list(training.run(batches(4)))
        found.append([*state(made), [result.skipped for result in results]])
    assert any(found[0][-1]) and found[0][-1] == found[1][-1]
    assert same(found[0][:-1], found[1][:-1]) and len(steps) == 4 * 3


@pytest.mark.parametrize(
    ("features", "whole"),
    [
        ([FeatureConfig("item", DIM)], True),
        ([FeatureConfig("item", DIM), FeatureConfig("other", DIM)], True),
        ([FeatureConfig("item", DIM), FeatureConfig("other", DIM, table="item")], False),
        ([FeatureConfig("item", DIM, pooling="sum")], False),
    ],
    ids=["one", "apart", "shared", "pooled"],
)
def test_rows_on_the_cpu_lie_where_one_op_reads_each_table(features, whole):
    """Float32 sums have an order, and two ops over one table would add in another."""
    tables = HashTableCollection(features, RowOptimizer("adam"), seed=2, merge=False)
    flight = SimpleNamespace(reads_indexed_rows=lambda impls: impls == {"cpu"})
    context = SimpleNamespace(tables=tables, sums=SimpleNamespace(exact=False))
    assert window._takes_indexed_rows(context, flight, [torch.zeros(2, DIM)]) == whole
