"""Schedules: functions of the update's number alone, those of torch, comparable by what they print."""

import math
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from tritonrec.embedding import (
    Constant,
    FeatureConfig,
    HashTableCollection,
    RowOptimizer,
    StepDecay,
    WarmupCosine,
    WarmupLinear,
)
from tritonrec.embedding.learning_rate import FunctionSchedule, comparable, rate_at

SCHEDULES = [
    Constant(0.1),
    WarmupLinear(0.1, 5, 40, 0.01),
    WarmupCosine(0.1, 5, 40, 0.01),
    StepDecay(0.1, 7, 0.5),
]


def rates_of_torch(make, updates=60):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    schedule, rates = make(optimizer), []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_schedules_are_those_of_torch():
    kinds = torch.optim.lr_scheduler
    cosine = rates_of_torch(lambda o: kinds.CosineAnnealingLR(o, 40, 0.01), 41)
    assert [WarmupCosine(0.1, 0, 40, 0.01)(update) for update in range(1, 41)] == pytest.approx(cosine[1:])
    linear = rates_of_torch(lambda o: kinds.LinearLR(o, 1.0, 0.1, 40))
    assert [WarmupLinear(0.1, 0, 40, 0.01)(update) for update in range(1, 60)] == pytest.approx(linear[1:])
    steps = rates_of_torch(lambda o: kinds.StepLR(o, 7, 0.5))
    assert [StepDecay(0.1, 7, 0.5)(update) for update in range(1, 61)] == pytest.approx(steps)


@pytest.mark.parametrize("schedule", [WarmupLinear, WarmupCosine])
def test_warm_up_is_linear_and_the_end_is_the_floor(schedule):
    rates = [schedule(0.2, 4, 10, 0.05)(update) for update in range(1, 14)]
    assert rates[:4] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert all(left > right for left, right in pairwise(rates[3:10]))
    assert rates[9:] == pytest.approx([0.05] * 4)
    assert rates[6] == pytest.approx(0.125)  # half way


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_prints_and_serialises_all_that_it_is(schedule):
    again = type(schedule)(**asdict(schedule))
    assert again == schedule and hash(again) == hash(schedule) and repr(again) == repr(schedule)
    assert RowOptimizer("adam", again) == RowOptimizer("adam", schedule)
    assert repr(schedule) in repr(RowOptimizer("adam", schedule))
    assert comparable(schedule) is schedule


def halving(update):
    return 0.1 / update


def test_a_function_prints_its_name_and_rates():
    rule = RowOptimizer("adam", halving)
    assert isinstance(rule.lr, FunctionSchedule) and rule == RowOptimizer("adam", halving)
    assert "test_learning_rate.halving" in repr(rule) and "(0.1, 0.01, 0.001, 0.0001" in repr(rule)
    assert " at 0x" not in repr(rule)
    assert [rate_at(rule.lr, update) for update in (1, 2, 5)] == [0.1, 0.05, 0.02]
    other, again = (RowOptimizer("adam", lambda update, power=p: update**-power) for p in (1.0, 2.0))
    assert repr(other) != repr(again)


def test_a_frozen_dataclass_of_a_user_is_left_as_it_is_and_another_object_gets_a_name():
    @dataclass(frozen=True)
    class Root:
        lr: float

        def __call__(self, update):
            return self.lr / math.sqrt(update)

    class Plain:
        def __call__(self, update):
            return 0.5

    @dataclass(frozen=True)
    class Listed:
        rates: list

        def __call__(self, update):
            return self.rates[0]

    @dataclass(unsafe_hash=True)
    class Changing:
        lr: float

        def __call__(self, update):
            return self.lr

    HashTableCollection([FeatureConfig("a", 2)], RowOptimizer("sgd", Listed([0.5])))  # has no hash
    assert comparable(Root(0.1)) == Root(0.1)
    for other in (Plain(), Changing(0.5)):  # what can change later tells by what it was
        named = comparable(other)
        assert isinstance(named, FunctionSchedule) and named.rates == (0.5,) * 6
        assert type(other).__name__ in repr(named) and " at 0x" not in repr(named)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-1.0), "lr must be finite and >= 0, got -1.0"),
        (lambda: Constant(math.nan), "lr must be finite"),
        (lambda: WarmupCosine(0.1, 10, 10), "warmup=10 and steps=10"),
        (lambda: WarmupLinear(0.1, -1, 10), "warmup=-1"),
        (lambda: WarmupLinear(0.1, 1, 10, -0.5), "floor must be finite"),
        (lambda: StepDecay(0.1, 0), "step_size must be at least 1"),
        (lambda: RowOptimizer("adam", lambda update: math.inf), "learning rate of update 1 must be finite"),
        (lambda: RowOptimizer("adam", lambda update: 1e-3 - 1e-5 * update), "learning rate of update 1000"),
        (lambda: RowOptimizer("adam", lambda update: "x"), "got 'x'"),
        (lambda: RowOptimizer("adam", math.inf), "lr must be finite"),
    ],
)
def test_what_is_no_rate_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_switch_is_no_rate():
    with pytest.raises(TypeError, match="lr must be a number or a function of the update's number, got True"):
        RowOptimizer("adam", lr=True)


def test_a_rate_that_turns_bad_later_is_an_error_of_its_update():
    rule = RowOptimizer("sgd", lambda update: -1.0 if update == 7 else 0.1)
    rows = torch.ones(2, 3)
    rule.update(rows, torch.arange(1), torch.ones(1, 3), 6)
    with pytest.raises(ValueError, match=r"learning rate of update 7 must be finite and >= 0, got -1\.0"):
        rule.update(rows, torch.arange(1), torch.ones(1, 3), 7)
    assert rows[0].tolist() == pytest.approx([0.9] * 3)


@pytest.mark.parametrize("rate", [1, np.float32(0.5), np.float64(0.5)])
def test_any_real_number_is_a_rate(rate):
    for rule in (RowOptimizer("sgd", rate), RowOptimizer("sgd", lambda update: rate)):
        rows = torch.ones(1, 2)
        rule.update(rows, torch.arange(1), torch.ones(1, 2), 1)
        assert rows.tolist() == [[1 - float(rate)] * 2]
    with pytest.raises(TypeError, match="lr must be a number or a function"):
        RowOptimizer("sgd", "0.1")
