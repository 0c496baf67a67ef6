"""Rules of rows: their layout, decay that is caught up in the same bits, and rules of a user's own."""

import copy
import pickle
from typing import get_args

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from impls import IMPLS, on

from tritonrec import ops
from tritonrec.embedding import (
    FeatureConfig,
    HashTableCollection,
    OptimizerName,
    PrecisionTiers,
    RowOptimizer,
    TablePolicy,
    WarmupCosine,
)
from tritonrec.embedding.row_optimizer import DecayFactors
from tritonrec.ops import use_impl

NAMES = get_args(OptimizerName)
WIDTHS = {"sgd": 5, "momentum_sgd": 10, "adagrad": 10, "rowwise_adagrad": 6, "adam": 15, "adamw": 15}
WIDTHS |= {
    "rowwise_adam": 11,
    "lars_sgd": 10,
    "rowwise_adagradw": 6,
    "lamb": 15,
    "rowwise_lamb": 11,
    "ftrl": 15,
}
LAZY = [name for name in NAMES if name != "ftrl"]


def same_bits(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_rule_has_its_width():
    assert {name: RowOptimizer(name).row_width(5) for name in NAMES} == WIDTHS
    assert all(RowOptimizer(n, lazy_weight_decay=True).row_width(5) == WIDTHS[n] + 1 for n in LAZY)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_weight_then_states_in_the_order_of_the_op(name):
    width, indices, grad = WIDTHS[name], torch.tensor([2, 0]), random(2, 5, seed=1)
    rows = random(4, width).abs()
    parts = [part.clone() for part in rows.split([5] * (width // 5) + [1] * (width % 5), 1)]
    own = {"ftrl": {"l1": 0.01}, "lars_sgd": {"eta": 0.5}}.get(name, {})
    RowOptimizer(name, 0.1, 1e-3, weight_decay=0.2, **own).update(rows, indices, grad, 3)
    numbers = own | ({"eps": 1e-3} if "sgd" not in name else {})
    numbers |= {"step": 3} if "adam" in name or "lamb" in name else {}
    getattr(ops, f"sparse_{name}")(*parts, indices, grad, 0.1, weight_decay=0.2, **numbers)
    assert same_bits(rows, torch.cat(parts, 1))


def test_nesterov_is_a_rule_of_its_own():
    results = []
    for nesterov in (False, True):
        rows, grad = random(3, 10), random(2, 5, seed=1)
        RowOptimizer("momentum_sgd", 0.1, momentum=0.8, nesterov=nesterov).update(
            rows, torch.tensor([2, 0]), grad, 1
        )
        weight, momentum = random(3, 10).split(5, 1)
        weight, momentum = weight.clone(), momentum.clone()
        ops.sparse_momentum_sgd(weight, momentum, torch.tensor([2, 0]), grad, 0.1, 0.8, nesterov)
        assert same_bits(rows, torch.cat([weight, momentum], 1))
        results.append(rows)
    assert not same_bits(*results)


@pytest.mark.parametrize("schedule", [0.25, WarmupCosine(0.25, 3, 12, 0.01)])
@pytest.mark.parametrize("name", LAZY)
def test_lazy_decay_ends_at_the_bits_of_decay_in_every_update(name, schedule):
    """Rows touched now and then, beside a loop that multiplies in each update and never looks at a number."""
    lazy = RowOptimizer(name, schedule, weight_decay=0.3, lazy_weight_decay=True)
    plain, width = RowOptimizer(name, schedule), WIDTHS[name]
    rows = torch.cat([random(4, 5), torch.zeros(4, width - 4)], 1)
    expected, begun = rows[:, :-1].clone(), set()
    touches = {1: [0, 1], 2: [0], 5: [0, 2], 9: [1, 0], 10: [2]}
    for update in range(1, 12):
        indices = torch.tensor(touches.get(update, [] if update < 11 else [0, 1, 2]), dtype=torch.int64)
        grad = random(len(indices), 5, seed=update)
        begun |= set(indices.tolist())
        lr = schedule if isinstance(schedule, float) else schedule(update)
        factor = np.float32(1 - lr * 0.3)
        for row in begun:
            expected[row, :5] *= float(factor)
        plain.update(expected, indices, grad, update)
        lazy.update(rows, indices, grad, update)
    assert same_bits(rows[:, :-1], expected)
    assert rows[:, -1].tolist() == [11, 11, 11, 0]


def test_factors_are_those_of_their_updates_however_they_were_asked_for():
    schedule = WarmupCosine(0.25, 3, 40)
    expected = torch.tensor([1 - schedule(update) * 0.1 for update in range(1, 61)], dtype=torch.float32)
    for order in ([*range(1, 61)], [60], [7, 3, 8, 60, 2], [1, 2, 3, 59, 60]):
        factors = DecayFactors(schedule, 0.1, torch.device("cpu"))
        for update in order:
            assert same_bits(factors.up_to(update), expected[:update])
    with pytest.raises(ValueError, match="counts 1 to 16777216 updates, got 16777217"):
        factors.up_to(2**24 + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RowOptimizer("lion"), "rowwise_lamb or ftrl, got 'lion'"),
        (lambda: RowOptimizer("sgd", lr=-0.1), r"lr must be finite and >= 0, got -0.1"),
        (lambda: RowOptimizer("adam", beta1=1.0), r"beta1 must lie in \[0, 1\)"),
        (lambda: RowOptimizer("momentum_sgd", momentum=-0.1), "momentum must lie"),
        (lambda: RowOptimizer("sgd", weight_decay=-1.0), "weight_decay must be finite"),
        (lambda: RowOptimizer("ftrl", l1=-1.0), "l1 must be finite"),
        (lambda: RowOptimizer("ftrl", 0.0), "ftrl computes weights from its states and divides by lr"),
        (lambda: RowOptimizer("adam", l1=0.1), "l1 goes with ftrl, got adam"),
        (lambda: RowOptimizer("ftrl", lazy_weight_decay=True), "a weight_decay that is not lazy"),
        (lambda: RowOptimizer("sgd", nesterov=True), "nesterov goes with momentum_sgd"),
        (lambda: RowOptimizer.custom(signed, 0, weight_decay=0.1), "decays its weights itself"),
        (lambda: RowOptimizer.custom(signed, 0, triton=signed), "'custom': its .* decorated with triton.jit"),
        (lambda: RowOptimizer.custom(signed, 0, numba=3), "'custom': its update .* must be functions"),
        (lambda: RowOptimizer.custom(signed, 0, numba=max), "'custom': its update .* must be functions"),
        (
            lambda: RowOptimizer.custom(signed, lambda dim: dim * dim, triton=adamax_of_a_tile),
            "is 1, 4 and 4096",
        ),
        (lambda: RowOptimizer.custom(signed, -1), "state width must be a whole number"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def adagrad(weight, state, gradient, step, lr):
    state = state + gradient * gradient
    return weight - (lr * gradient) / (state.sqrt() + 1e-8), state


def signed(weight, state, gradient, step, lr):
    return weight - lr * gradient.sign(), state


def counted(weight, state, gradient, step, lr):
    return weight - lr / step * gradient, state + 1


def of_numbers(weight, state, gradient, step, lr):
    assert all(bool(each.isfinite().all()) for each in (weight, state, gradient))
    return weight, state


SEES_NUMBERS = RowOptimizer.custom(of_numbers, lambda dim: dim, name="sees numbers")
CUSTOM = RowOptimizer.custom(adagrad, lambda dim: dim, name="mine", lr=0.1)


def test_a_rule_of_ones_own_updates_the_rows_of_the_indices():
    rows, grad, indices = random(6, 10).abs(), random(3, 5, seed=1), torch.tensor([5, 0, 2])
    expected = rows.clone()
    CUSTOM.update(rows, indices, grad, 2)
    w, s = adagrad(expected[indices, :5], expected[indices, 5:], grad, 2, 0.1)
    expected[indices] = torch.cat([w, s], 1)
    assert same_bits(rows, expected)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_rule_of_ones_own_leaves_what_lies_behind_the_count(count):
    rows, expected = (random(6, 10).abs() for _ in range(2))
    indices, grad = torch.tensor([5, 0, 2, 1, 3]), random(5, 5, seed=1)
    CUSTOM.update(expected, indices[:count], grad[:count], 1)
    grad[count:], indices[count:] = torch.nan, 2**62
    CUSTOM.update(rows, indices, grad, 1, torch.tensor(count))
    assert same_bits(rows, expected)
    SEES_NUMBERS.update(rows, indices, grad, 1, torch.tensor(count))


def test_a_rule_of_ones_own_sees_update_rate_and_lazy_decay():
    rule = RowOptimizer.custom(
        counted, 1, lr=lambda update: 1.0 * update, weight_decay=0.5, lazy_weight_decay=True
    )
    assert rule.row_width(2) == 4
    rows = torch.tensor([[8.0, 16.0, 0.0, 2.0]])
    rule.update(rows, torch.tensor([0]), torch.tensor([[1.0, 2.0]]), 3)  # factor 1 - 3 * 0.5
    assert rows.tolist() == [[-5.0, -10.0, 1.0, 3.0]]


@pytest.mark.parametrize(("rows", "dim"), [(0, 5), (3, 0), (1, 300_000), (3, 1)])
def test_a_rule_of_ones_own_takes_any_shape(rows, dim):
    table, grad = random(4, 2 * dim).abs(), random(rows, dim, seed=1)
    expected = table.clone()
    CUSTOM.update(table, torch.arange(rows), grad, 1)
    w, s = adagrad(expected[:rows, :dim], expected[:rows, dim:], grad, 1, 0.1)
    assert same_bits(table[:rows], torch.cat([w, s], 1)) and same_bits(table[rows:], expected[rows:])


def adamax(weight, state, gradient, step, lr):
    """A moment per element and the largest gradient so far per row."""
    moment = 0.9 * state[:, :-1] + 0.1 * gradient
    largest = torch.maximum(0.999 * state[:, -1:], gradient.abs().amax(1, keepdim=True))
    return weight - (lr * moment) / (largest + 1e-8), torch.cat([moment, largest], 1)


def adamax_of_a_row(weight, state, gradient, step, lr):
    dim = len(weight)
    largest = np.float32(0.999) * state[dim]
    for d in range(dim):
        largest = max(largest, abs(gradient[d]))
    state[dim] = largest
    for d in range(dim):
        state[d] = np.float32(0.9) * state[d] + np.float32(0.1) * gradient[d]
        weight[d] -= (lr * state[d]) / (largest + np.float32(1e-8))


@triton.jit
def adamax_of_a_tile(weight, states, gradient, step, lr):
    moment = 0.9 * states[0] + 0.1 * gradient
    largest = tl.maximum(0.999 * states[1], tl.max(tl.abs(gradient), 1, keep_dims=True))
    change = tl.div_rn(lr * moment, tl.broadcast_to(largest + 1e-8, moment.shape))
    return weight - change, (moment, largest)


def adagrad_of_one(weight, state, gradient, step, lr):
    """With a square root that is rounded correctly, which torch's is not on every CPU."""
    state = state + gradient * gradient
    return weight - lr * gradient / (state.double().sqrt().float() + 1e-8), state


def adagrad_of_a_row(weight, state, gradient, step, lr):
    for d in range(len(weight)):
        state[d] += gradient[d] * gradient[d]
        weight[d] -= lr * gradient[d] / (np.sqrt(state[d]) + np.float32(1e-8))


@triton.jit
def adagrad_of_a_tile(weight, states, gradient, step, lr):
    total = states[0] + gradient * gradient
    return weight - tl.div_rn(lr * gradient, tl.sqrt_rn(total) + 1e-8), (total,)


def signed_of_a_row(weight, state, gradient, step, lr):
    for d in range(len(weight)):
        weight[d] -= lr * np.sign(gradient[d])


@triton.jit
def signed_of_a_tile(weight, states, gradient, step, lr):
    return weight - lr * (tl.where(gradient > 0, 1.0, 0.0) - tl.where(gradient < 0, 1.0, 0.0)), states


def wide(dim):
    return dim + 1


OWN = {"adamax": (adamax, wide, adamax_of_a_row, adamax_of_a_tile)}
OWN |= {"adagrad": (adagrad_of_one, lambda dim: dim, adagrad_of_a_row, adagrad_of_a_tile)}
OWN |= {"signed": (signed, 0, signed_of_a_row, signed_of_a_tile)}


@pytest.mark.parametrize("count", [None, 0, 4, 9])
@pytest.mark.parametrize("dim", [1, 7, 16, 150])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_rule_of_ones_own_has_the_same_bits_in_torch_numba_and_triton(impl, name, dim, count):
    in_torch, width, *compiled = OWN[name]
    given = {"lr": 0.1, "weight_decay": 0.5, "lazy_weight_decay": True}
    plain = RowOptimizer.custom(in_torch, width, name=name, **given)
    rule = RowOptimizer.custom(in_torch, width, name=name, **given, numba=compiled[0], triton=compiled[1])
    expected = torch.cat([random(20, plain.row_width(dim) - 1).abs(), torch.zeros(20, 1)], 1)
    rows, indices = (
        on(impl, expected.clone()),
        torch.randperm(20, generator=torch.Generator().manual_seed(3))[:9],
    )
    valid = None if count is None else on(impl, torch.tensor(count))
    with use_impl(impl):
        for step in (1, 2, 4):
            grad = random(9, dim, seed=step)
            plain.update(expected, indices[:count], grad[:count], step)
            rule.update(rows, on(impl, indices), on(impl, grad), step, valid)
    assert same_bits(rows.cpu(), expected)
    with pytest.raises(IndexError, match=r"indices\[0\] = 20 is outside"):
        rule.update(expected, torch.tensor([20]), grad[:1], 5)


def careless(weight, state, gradient, step, lr):
    for d in range(len(weight)):
        state[d] = 0.9 * state[d] + 0.1 * gradient[d]  # float64
        weight[d] -= lr * np.sign(state[d])


def test_a_rule_whose_bits_are_not_those_of_torch_is_refused_by_name():
    def lion(weight, state, gradient, step, lr):
        state = 0.9 * state + 0.1 * gradient
        return weight - lr * state.sign(), state

    rule, rows = RowOptimizer.custom(lion, lambda dim: dim, name="lion", numba=careless), torch.ones(2, 6)
    said = r"update 'lion' gives .* on 'cpu' and .* in torch \(.*lion\), in col.* x\.double\(\)\.sqrt\(\)"
    with pytest.raises(ValueError, match=said):
        rule.update(rows, torch.arange(2), torch.ones(2, 3), 1)
    assert (rows == 1).all()


@pytest.mark.if_changed
@pytest.mark.parametrize("fault", ["no eps", "the first formula alone"])
def test_a_rule_whose_bits_differ_for_few_gradients_or_late_is_refused(fault):
    eps, late = np.float32(1e-12 * (fault != "no eps")), np.float32(1 + (fault == "no eps"))

    def plain(weight, state, gradient, step, lr):
        state = state + gradient * gradient
        rate = lr / 2 if step > 5 else lr  # as RAdam's, which changes its formula there
        return weight - rate * gradient / (state.double().sqrt().float() + 1e-12), state

    def of_a_row(weight, state, gradient, step, lr):
        rate = lr / late if step > 5 else lr
        for d in range(len(weight)):
            state[d] += gradient[d] * gradient[d]
            weight[d] -= rate * gradient[d] / (np.sqrt(state[d]) + eps)

    rule, rows = RowOptimizer.custom(plain, lambda dim: dim, name="late", numba=of_a_row), torch.ones(2, 6)
    with pytest.raises(ValueError, match=r"update 'late' gives .* on 'cpu' and .* in torch"):
        rule.update(rows, torch.arange(2), torch.ones(2, 3), 1)
    assert (rows == 1).all()


def beyond(weight, state, gradient, step, lr):
    for d in range(len(weight)):
        weight[d] -= lr * np.sign(gradient[d])
    weight[0] += min(gradient[len(gradient)], 0) * 0


def test_a_rule_in_numba_that_reaches_beyond_its_row_is_refused():
    rule = RowOptimizer.custom(signed, 0, name="long", numba=beyond)
    with pytest.raises(ValueError, match="update 'long' in numba reaches beyond the row"):
        rule.update(torch.ones(3, 3), torch.arange(2), torch.ones(2, 3), 1)


def test_a_rule_with_compiled_updates_reaches_ranks_and_copies():
    rule = RowOptimizer.custom(signed, 0, numba=signed_of_a_row, triton=signed_of_a_tile)
    assert pickle.loads(pickle.dumps(rule)) == rule == copy.deepcopy(rule)


def across(weight, state, gradient, step, lr):
    return weight - lr * gradient.mean(0, keepdim=True), state


def placed(weight, state, gradient, step, lr):
    return weight - lr * torch.sigmoid(gradient), state


def second_step(weight, state, gradient, step, lr):
    return (weight - lr * state.sum() if step == 3 else weight), state + gradient


@pytest.mark.parametrize("function", [across, placed, second_step])
def test_a_rule_whose_rows_depend_on_each_other_is_refused_by_name(function):
    rule, rows = RowOptimizer.custom(function, 3, name="suspect"), torch.ones(2, 6)
    with pytest.raises(ValueError, match=rf"update 'suspect' \(.*{function.__name__}\) gives row \d+ of 37"):
        rule.update(rows, torch.arange(2), torch.ones(2, 3), 1)
    assert (rows == 1).all()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda w, s, g, step, lr: w, "must return weight and state, got Tensor"),
        (lambda w, s, g, step, lr: (w[:, :1], s), r"must return weight \(\d+, 3\) torch.float32, got"),
        (lambda w, s, g, step, lr: (w, s.double()), r"must return state .* got .* torch.float64"),
    ],
)
def test_a_rule_that_returns_something_else_is_named(function, message):
    rule = RowOptimizer.custom(function, 3, name="odd")
    with pytest.raises(ValueError, match=f"update 'odd' {message}"):
        rule.update(torch.ones(2, 6), torch.arange(2), torch.ones(2, 3), 1)


def test_rules_are_compared_by_what_they_print():
    assert RowOptimizer.custom(CUSTOM.custom_update.function, CUSTOM.custom_update.state_width,
                                         name="mine", lr=0.1) == CUSTOM  # fmt: skip
    assert "test_row_optimizer.adagrad" in repr(CUSTOM) and " at 0x" not in repr(CUSTOM)
    assert "widths=(1, 2, 64)" in repr(CUSTOM)


def test_tables_of_different_rules_are_not_merged_and_one_table_has_one_rule():
    slow, fast = RowOptimizer("adam", 0.01), RowOptimizer("adagrad", 0.1)
    features = [FeatureConfig("a", 4), FeatureConfig("b", 4, optimizer=slow)]
    features += [FeatureConfig("c", 4, optimizer=fast), FeatureConfig("d", 4, optimizer=CUSTOM)]
    tables = HashTableCollection(features, slow)
    assert [(group.layout.names, group.optimizer) for group in tables.groups] == [
        (("a", "b"), slow), (("c",), fast), (("d",), CUSTOM)
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"'a' and 'e' share table 'a' but differ in .*optimizer"):
        HashTableCollection([*features, FeatureConfig("e", 4, table="a", optimizer=fast)], slow)


def test_lazy_decay_and_precision_tiers_exclude_each_other():
    lazy = RowOptimizer("adam", lazy_weight_decay=True)
    feature = FeatureConfig("a", 4, policy=TablePolicy(precision=PrecisionTiers(2, 4)))
    with pytest.raises(ValueError, match="table 'a' has lazy weight decay and precision tiers"):
        HashTableCollection([feature], lazy)


def test_a_rule_of_ones_own_updates_rows_whatever_the_default_device_is():
    rows, grad, indices = random(6, 10).abs(), random(3, 5, seed=1), torch.tensor([5, 0, 2])
    expected = rows.clone()
    CUSTOM.update(expected, indices, grad, 2)
    with torch.device("meta"):
        RowOptimizer.custom(adagrad, lambda dim: dim, name="probed anew", lr=0.1).update(
            rows, indices, grad, 2
        )
    assert same_bits(rows, expected)
