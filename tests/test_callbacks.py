"""Promise: early stopping counts as Lightning's does, on all ranks alike, and goes on from its state."""

import json
import math

import pytest

from tritonrec.callbacks import EarlyStopping, Throughput
from tritonrec.distributed import Communicators

NAN = math.nan


def stopped_at(stopping, values, first=1):
    """The first evaluation that says stop."""
    for step, value in enumerate(values, first):
        if stopping.on_evaluation_end(step, {"AUC": value}):
            return step
    return None


@pytest.mark.parametrize(
    ("values", "patience", "options", "step"),
    [
        ([0.1, 0.2, 0.3], 1, {}, None),
        ([0.1, 0.2, 0.2], 1, {}, 3),
        ([0.3, 0.2, 0.25, 0.31, 0.3, 0.3], 3, {}, None),
        ([0.3, 0.2, 0.25, 0.3, 0.4], 3, {}, 4),
        ([0.3, 0.2, 0.1], 1, {"mode": "min"}, None),
        ([0.3, 0.4], 1, {"mode": "min"}, 2),
        ([0.1, 0.14, 0.19], 2, {"min_delta": 0.05}, None),
        ([0.1, 0.14, 0.15], 2, {"min_delta": 0.0625}, 3),
        ([NAN, NAN], 2, {"check_finite": False}, 2),
        ([NAN, 0.1, NAN, 0.2], 2, {"check_finite": False}, None),
        ([0.1, 0.2, NAN, 0.3], 3, {}, 3),
        ([0.1, math.inf], 3, {}, 2),
    ],
)
def test_it_stops_after_evaluations_without_a_better_one(values, patience, options, step):
    assert stopped_at(EarlyStopping("AUC", patience, **options), values) == step


@pytest.mark.parametrize("cut", range(6))
def test_it_goes_on_from_its_state_through_json(cut):
    values = [0.3, 0.2, 0.4, NAN, 0.1, 0.4, 0.9]
    whole, before, after = (EarlyStopping("AUC", 3, check_finite=False) for _ in range(3))
    stopped_at(before, values[:cut])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert stopped_at(after, values[cut:], cut + 1) == stopped_at(whole, values) == 6
    assert after.state_dict() == whole.state_dict()
    assert (whole.best, whole.best_step, whole.step) == (0.4, 3, 6)


@pytest.mark.parametrize("metric", ["val_loss", "loss", "BCE", "my_accuracy", "RMSE"])
def test_less_is_better_by_default_as_in_lightning(metric):
    stopping = EarlyStopping(metric, patience=1)
    assert [stopping.on_evaluation_end(step, {metric: 1 / step}) for step in range(1, 9)] == [False] * 8
    assert stopping.on_evaluation_end(9, {metric: 1.0}) and stopping.best_step == 8


OURS = "NDCG@10 HR@5 AUC AUC/click GAUC/like accuracy recall@5 MRR@1 coverage@9 window_auc window_gauc"


@pytest.mark.parametrize("metric", OURS.split())
def test_more_is_better_of_our_own_metrics(metric):
    stopping = EarlyStopping(metric, patience=1)
    assert [stopping.on_evaluation_end(step, {metric: step}) for step in range(1, 9)] == [False] * 8
    assert EarlyStopping(metric, mode="min").mode == "min"


def test_a_metric_that_is_not_finite_ends_it_also_after_a_restart():
    stopping, resumed = EarlyStopping("loss", 5), EarlyStopping("loss", 5)
    assert stopping.on_evaluation_end(1, {"loss": NAN})
    resumed.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
    assert resumed.should_stop


@pytest.mark.parametrize("other", [EarlyStopping("AUC/click"), EarlyStopping("AUC", mode="min")])
def test_the_state_of_another_metric_is_refused(other):
    stopping = EarlyStopping("AUC", patience=1)
    with pytest.raises(ValueError, match=r"early stopping was by AUC"):
        stopping.load_state_dict(other.state_dict())
    assert stopping.step is None


def test_a_metric_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"'NDCG10', which are HR@10, NDCG@10; did you mean NDCG@10\?"):
        EarlyStopping("NDCG10").on_evaluation_end(1, {"HR@10": 0.1, "NDCG@10": 0.1})


@pytest.mark.parametrize("options", [{"patience": 0}, {"mode": "maximum"}, {"min_delta": NAN}], ids=str)
def test_absurd_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        EarlyStopping("AUC", **options)


def stop_by_own_values(communicators):
    stopping = EarlyStopping("AUC", patience=1, communicators=communicators)
    values = [[0.1, 0.2, 0.3, 0.2], [0.5, 0.1, 0.7, 0.8]][communicators.rank]
    return stopped_at(stopping, values), stopping.state_dict()


@pytest.mark.multi_rank
def test_all_ranks_go_by_rank_0(pool):
    first, second = pool.run(stop_by_own_values, 2)
    assert first == second and first[0] == 4
    assert stop_by_own_values(Communicators.local()) == first


def test_throughput_is_that_of_the_last_steps():
    meter = Throughput(window=2)
    assert meter.compute() == {}
    for seconds in (100.0, 0.5, 1.5):
        meter.on_step_end(seconds, samples=8, tokens=40)
    assert meter.compute() == {"samples_per_second": 8.0, "tokens_per_second": 40.0}
    with pytest.raises(ValueError, match="window"):
        Throughput(0)
