"""Promise: all ranks launch the collectives of an accelerator in one order, and no device waits for ever.

A model of devices that hold few collectives at a time: one runs when all ranks have begun it.
"""

from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from random import Random
from time import monotonic, sleep
from unittest import mock

import pytest
import torch
from fake_accelerator import FakeAccelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import FORMS
from speeds import examples, slow_except
from test_replicas import JOB
from test_switches import same, state

from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import (
    DBP,
    FWP,
    NESTPIPE,
    SCHEDULES,
    Edge,
    Executor,
    ScheduleError,
    Task,
    Tasks,
    Trainer,
    WindowConfig,
    check,
)
from tritonrec.pipeline.streams import launches_in_turn
from tritonrec.settings import with_values

COUNT = 4


def ends(launched, room):
    """Whether devices end that run `launched` collectives, one list a rank, `room` of them at a time."""
    waiting = [deque(each) for each in launched]
    begun = [set() for _ in launched]
    while any(waiting) or any(begun):
        for queue, here in zip(waiting, begun, strict=True):
            while queue and len(here) < room:
                here.add(queue.popleft())
        done = set.intersection(*begun)
        if not done:
            return False
        for here in begun:
            here -= done
    return True


@contextmanager
def executing(schedule, micro_batches, delay=None, in_turn=True):
    """An executor, and what it launches, in its order."""
    launched = []

    def action(task):
        if schedule[task.stage].launches_collectives:
            launched.append(task)

    actions = {
        stage.name: (lambda context, i, name=stage.name: action(Task(name, context, i)))
        for stage in schedule.stages
    }
    span = lambda lane, task, context: nullcontext()  # noqa: E731
    with Executor(Tasks(schedule, micro_batches), actions, span, delay, in_turn=in_turn) as executor:
        yield executor, launched


def launches(schedule, micro_batches, delay, in_turn=True, ahead=True):
    """What one rank launches, in its order; `ahead`: batches are submitted before results are needed."""
    with executing(schedule, micro_batches, delay, in_turn) as (executor, launched):
        flight = schedule.batches_in_flight - 1 if ahead else 0
        for batch in range(COUNT + flight):
            if batch < COUNT:
                executor.submit(batch, batch)
            if batch >= flight:
                executor.wait(batch - flight)
    return launched


def jitter(seed):
    random = Random(seed)
    return lambda task: random.random() * 0.002


@settings(max_examples=examples(8))
@given(st.sampled_from(sorted(FORMS)), st.integers(1, 3), st.integers(0, 2**32))
def test_ranks_launch_in_the_order_of_the_schedule_whatever_their_timing(mode, micro_batches, seed):
    schedule = FORMS[mode]
    here, there = (launches(schedule, micro_batches, jitter(seed + rank)) for rank in range(2))
    assert here == there == Tasks(schedule, micro_batches).launch_order(COUNT)
    assert ends([here, there], room=1)


def test_batches_that_come_one_by_one_are_launched_one_by_one():
    launched = launches(NESTPIPE, 2, jitter(1), ahead=False)
    assert [task.batch for task in launched] == sorted(task.batch for task in launched)
    assert len(launched) == len(Tasks(NESTPIPE, 2).launch_order(COUNT))


@pytest.mark.parametrize("comes", [True, False])
def test_a_window_waits_for_the_next_batch_or_for_somebody_who_wants_its_results(comes):
    with executing(NESTPIPE, 1) as (executor, launched):
        executor.submit(0, 0)
        sleep(0.1)  # long enough for a window that waits for nobody
        assert launched == [Task("route", 0)]
        if comes:
            executor.submit(1, 1)
        executor.wait(0)
        assert launched[:3] == Tasks(NESTPIPE, 1).launch_order(1 + comes)[:3]


def test_a_window_goes_on_as_soon_as_the_next_batch_has_come():
    with executing(NESTPIPE, 1) as (executor, launched):
        executor.submit(0, 0)
        executor.submit(1, 1)
        end = monotonic() + 4
        while len(launched) < 3 and monotonic() < end:
            sleep(0.01)
        assert launched[:3] == Tasks(NESTPIPE, 1).launch_order(2)[:3]


def late(stage, batch):
    return lambda task: 0.1 if (task.stage, task.batch) == (stage, batch) else 0.0


def test_without_turns_the_model_gets_stuck():
    """The model can fail: two ranks, of which one is late with its routing and the other with its window."""
    one = launches(NESTPIPE, 2, late("route", 1), in_turn=False)
    other = launches(NESTPIPE, 2, late("copy_kept_rows", 0), in_turn=False)
    assert set(one) == set(other) and not ends([one, other], room=1)
    assert ends([one, other], room=len(one))  # as the host's groups, which need no order


def test_with_turns_the_same_ranks_end():
    ranks = [launches(NESTPIPE, 2, late(*each)) for each in (("route", 1), ("copy_kept_rows", 0))]
    assert ends(ranks, room=1)


def test_routing_is_launched_ahead_of_the_window_before():
    order = [str(task) for task in Tasks(NESTPIPE, 1).launch_order(2)]
    assert order == [
        "route(0)", "route(1)",
        "exchange(0, 0)", "gradient_exchange(0, 0)", "dense_reduce(0)", "dense_update(0)",
        "exchange(1, 0)", "gradient_exchange(1, 0)", "dense_reduce(1)", "dense_update(1)",
    ]  # fmt: skip
    assert [str(task) for task in Tasks(FWP, 1).launch_order(2)][:2] == ["route(0)", "exchange(0, 0)"]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            replace(NESTPIPE, ahead=("route", "exchange")),
            r"exchange\(1, 0\) launches its collectives before \w+\(0.*\), and waits for it",
        ),
        (
            replace(DBP, ahead=("route", "dense_reduce")),
            r"dense_reduce\(0\) launches its collectives before exchange\(0, 0\), and",
        ),
        (replace(FWP, ahead=("route",)), "one batch in flight there is no next one"),
        (
            NESTPIPE.with_edges("route", Edge("dense_reduce", batch=1)),
            r"route\(1\) launches its collectives before exchange\(0, 0\), and waits for it",
        ),
    ],
    ids=["exchange_ahead", "reduce_ahead", "one_in_flight", "route_behind_the_window"],
)
def test_a_wrong_order_is_refused(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        check(schedule, 2)


def test_only_ranks_of_an_accelerator_take_turns():
    places = product([torch.device("cpu"), torch.device("cuda", 0)], [1, 2])
    assert [launches_in_turn(*each) for each in places] == [False, False, False, True]


def train(communicators, mode, in_turn, seed=0, **window):
    """On an accelerator made of threads, which runs everything later."""
    with turns(in_turn):
        return in_steps(communicators, mode, seed, **window)


def turns(in_turn):
    """Trainers take turns, or not: all of the process, so that ranks which are threads do not enter this."""
    return mock.patch("tritonrec.pipeline.trainer.launches_in_turn", lambda device, world_size: in_turn)


def in_steps(communicators, mode, seed=0, **window):
    made, loader = JOB.build("adam"), JOB.loader(communicators.rank, communicators.world_size)
    window = with_values(WindowConfig(3, seed=4), {"first_use": True, **window})
    with Trainer(*made, communicators, mode, window, streams=FakeAccelerator(seed)) as trainer:
        list(trainer.run(loader.batch(step) for step in range(5)))
        trainer.step(loader.batch(5))
    return state(made)


@pytest.mark.parametrize("mode", slow_except(["nestpipe"], SCHEDULES))
def test_training_in_turn_has_the_bits_of_training_without(mode):
    local = Communicators.local()
    assert same(train(local, mode, True), train(local, mode, False))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nestpipe", "dbp"])
def test_two_ranks_in_turn_have_the_bits_of_two_ranks_without(mode):
    with RankPool([2]) as pool:
        for in_turn, without in zip(
            pool.run(train, 2, mode, True), pool.run(train, 2, mode, False), strict=True
        ):
            assert same(in_turn, without)


def test_replicas_whose_micro_batches_share_exchanges_end_in_turn():
    """A reduction over replicas waits for gradients that leave with those of a later micro-batch."""

    def rank(communicators):
        return in_steps(communicators, "nestpipe", micro_batches=4, exchanges="joined")

    ranks = []
    for in_turn in (True, False):
        with turns(in_turn):
            ranks.append(run_ranks(4, rank, replicas=2))
    assert all(same(*each) for each in zip(*ranks, strict=True))
