"""Promise: rules of a user's own, schedules and lazy decay end at the bits of the reference in every mode."""

from itertools import product

import numpy as np
import pytest
import torch
from speeds import slow_except
from trainer_parts import NoParameters, batches, parts, same, state, trained, trainer

from tritonrec.embedding import Eviction, RowOptimizer, TablePolicy, WarmupLinear
from tritonrec.pipeline import MODES, DenseModel


def lion(weight, state, gradient, step, lr):
    """Chen et al. 2023, algorithm 2, without decay."""
    direction = torch.sign(0.9 * state + 0.1 * gradient)
    return weight - lr * direction, 0.99 * state + 0.01 * gradient


def lion_of_a_row(weight, state, gradient, step, lr):
    for d in range(len(weight)):
        weight[d] -= lr * np.sign(np.float32(0.9) * state[d] + np.float32(0.1) * gradient[d])
        state[d] = np.float32(0.99) * state[d] + np.float32(0.01) * gradient[d]


def decaying(update):
    return 0.05 / update


SCHEDULE = WarmupLinear(0.05, 2, 6, 0.01)
RULES = {
    "lion": RowOptimizer.custom(lion, lambda dim: dim, name="lion", lr=SCHEDULE),
    "lion with lazy decay": RowOptimizer.custom(
        lion, lambda dim: dim, name="lion", lr=decaying, weight_decay=0.5, lazy_weight_decay=True
    ),
    "adamw": RowOptimizer("adamw", SCHEDULE, weight_decay=0.5),
    "adagrad": RowOptimizer("adagrad", decaying, weight_decay=0.5, lazy_weight_decay=True),
    "lion in numba": RowOptimizer.custom(
        lion, lambda dim: dim, name="lion", lr=SCHEDULE, numba=lion_of_a_row
    ),
    "ftrl": RowOptimizer("ftrl", SCHEDULE, weight_decay=0.1, l1=0.02),
    "rowwise_lamb": RowOptimizer("rowwise_lamb", decaying, weight_decay=0.1),
    "lars_sgd": RowOptimizer("lars_sgd", decaying, weight_decay=0.1, eta=0.5),
    "nesterov": RowOptimizer("momentum_sgd", SCHEDULE, momentum=0.5, nesterov=True, weight_decay=0.1),
}
CASES = [*product(RULES, list(MODES)[1:], ("batch", "window"))]
QUICK = [("lion with lazy decay", "nestpipe", "batch"), ("nesterov", "fwp", "window")]
QUICK += [("lion in numba", "nestpipe", "batch"), ("ftrl", "dbp", "batch")]


@pytest.mark.parametrize(("rule", "mode", "consistency"), slow_except(QUICK, CASES))
def test_every_mode_ends_at_the_bits_of_the_reference(rule, mode, consistency):
    base = "reference" if consistency == "batch" else "sequential"
    cut = {} if consistency == "batch" else {"micro_batches": 3}
    expected, _ = trained(parts(rule=RULES[rule]), base, consistency, batches(), **cut)
    got, _ = trained(parts(rule=RULES[rule]), mode, consistency, batches())
    assert same(got, expected)


@pytest.mark.parametrize("rule", ["lion with lazy decay", "lion in numba", "ftrl"])
def test_two_runs_that_meet_at_a_restart_are_one(rule):
    """The schedule and the missed updates count from the run's begin, not from the trainer's."""
    policy = None if RULES[rule].lazy_weight_decay else TablePolicy(Eviction("lru", capacity=30), admission=2)
    whole, made = (parts(rule=RULES[rule], policy=policy) for _ in range(2))
    expected, _ = trained(whole, "reference", "batch", batches())
    trained(made, "nestpipe", "batch", batches()[:3])
    again = parts(rule=RULES[rule], policy=policy)
    again[1].load_state(made[1].state())
    DenseModel(again[0], again[2]).load_state_dict(DenseModel(made[0], made[2]).state_dict())
    with trainer(again) as training:
        list(training.run(batches()[3:]))
    assert same(state(again), expected)


def test_a_bad_rule_stops_the_run_by_its_name():
    def mixing(weight, state, gradient, step, lr):
        return weight - gradient.mean(0), state

    made = parts(NoParameters, rule=RowOptimizer.custom(mixing, 0, name="mixing"))
    with trainer(made) as training, pytest.raises(Exception, match=r"update 'mixing' \(.*\) gives row"):
        list(training.run(batches()))
