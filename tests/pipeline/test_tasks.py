"""Promise: micro-batches that share a task are proven as they run; nobody waits for what comes behind it."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import FORMS

from tritonrec.pipeline import DBP, NESTPIPE, Edge, Schedule, ScheduleError, Task, Tasks, check
from tritonrec.pipeline.exchange_groups import joined_groups
from tritonrec.pipeline.schedule import with_replicas
from tritonrec.pipeline.stage import Access, Stage

pytestmark = pytest.mark.smoke


def doers_of(micro_batches, overlap, ordered=False):
    return joined_groups(micro_batches, overlap, ordered).doers


@given(st.sampled_from(sorted(FORMS)), st.integers(1, 12), st.booleans(), st.booleans(), st.integers(0, 5))
def test_each_task_is_done_once_and_behind_all_that_it_waits_for(name, count, overlap, ordered, batch):
    schedule = FORMS[name]
    doers = doers_of(count, overlap and schedule.overlaps_window, ordered)
    tasks = Tasks(schedule, count, doers)
    order = tasks.of(batch)
    done = [each for task in order for each in tasks.does(task)]
    assert sorted(map(str, done)) == sorted(map(str, schedule.tasks(batch, count)))
    assert all(tasks.done_by(each) == task for task in order for each in tasks.does(task))
    for n, task in enumerate(order):
        needed = {tasks.done_by(each) for each in schedule.waits_for(task, count)}
        assert set(tasks.waits_for(task)) == needed
        assert {each for each in needed if each.batch == batch} <= set(order[:n])
    for lane in {stage.lane for stage in schedule.stages}:
        of_lane = [task for task in order if schedule[task.stage].lane == lane]
        assert of_lane == [task for task in schedule.tasks(batch, count) if task in of_lane]


def test_without_shared_tasks_the_order_is_that_of_the_table():
    for schedule, count in product(FORMS.values(), (1, 3, 8)):
        tasks = Tasks(schedule, count, {"exchange": range(count)})
        assert tasks.of(2) == [*schedule.tasks(2, count)] and not tasks.shared


def test_a_reduction_over_replicas_comes_behind_the_gradients_that_it_needs():
    tasks = Tasks(with_replicas(NESTPIPE), 4, doers_of(4, overlap=True))
    order = [str(task) for task in tasks.of(0)]
    start = order.index("compute(0, 1)")
    assert tasks.shared and order[start : start + 4] == [
        "compute(0, 1)", "gradient_exchange(0, 1)", "replica_reduce(0, 0)", "replica_reduce(0, 1)",
    ]  # fmt: skip


WRONG = [
    # gradients that leave before they are computed, or are added in another order
    (NESTPIPE, {"gradient_exchange": (0, 0, 2)}, r"compute\(0, 1\) writes gradients\[0, 1\] while grad"),
    (NESTPIPE, {"gradient_exchange": (2, 1, 2)}, r"gradient_exchange\(0, 1\) reads another value"),
    # a micro-batch whose rows come behind the gradients of one that waits for them
    (DBP, {"exchange": (1, 1, 2)}, r"compute\(0, 0\) waits for exchange\(0, 1\), which is queued behind it"),
    (DBP, {"exchange": (0, 0, 2), "gradient_exchange": (2, 2, 2)}, "which is queued behind it"),
]


@pytest.mark.parametrize(("schedule", "doers", "message"), WRONG)
def test_exchanges_shared_wrongly_are_refused(schedule, doers, message):
    check(schedule, 3)
    with pytest.raises(ScheduleError, match=message):
        check(schedule, 3, doers)


def test_rows_may_come_late_where_nobody_is_stuck():
    check(NESTPIPE, 3, {"exchange": (1, 1, 2), "gradient_exchange": (1, 1, 2)})


def summing(per, waits="same"):
    """`make` adds to something, `send` reads it behind; both on one lane, so nothing races."""
    make = Stage("make", "a", (), (Access("update", "sums", per),), True)
    send = Stage(
        "send", "a", (Edge("make", waits),), (Access("read", "sums", per), Access("write", "out")), True
    )
    return Schedule(f"summing {per} {waits}", (make, send), 1, early=False)


def test_a_shared_task_that_reads_what_others_have_changed_meanwhile_is_refused():
    check(summing("run"), 3)
    check(summing("micro_batch"), 3, {"send": (1, 1, 2)})
    with pytest.raises(ScheduleError, match=r"send\(0, 0\) reads another value"):
        check(summing("run"), 3, {"send": (1, 1, 2)})
    with pytest.raises(ScheduleError, match=r"send\(0, 1\) reads sums\[0, 1\], which nobody has written"):
        check(summing("micro_batch"), 3, {"send": (0, 0, 2)})


@pytest.mark.parametrize(
    "doers", [{"exchange": (0, 0)}, {"exchange": (1, 2, 2)}, {"exchange": (0, 3, 2)}, {"route": (0, 0, 0)}]
)
def test_doers_that_fit_no_window_are_refused(doers):
    with pytest.raises(ValueError, match="are no doers of 3 micro-batches"):
        Tasks(NESTPIPE, 3, doers)


def test_tasks_wait_across_batches_for_the_task_that_does_the_work():
    schedule = NESTPIPE.with_edges("route", Edge("gradient_exchange", "all", batch=1))
    tasks = Tasks(schedule, 3, {"gradient_exchange": (1, 1, 2)})
    of_window = [each for each in tasks.waits_for(Task("route", 4)) if each.stage == "gradient_exchange"]
    assert of_window == [Task("gradient_exchange", 3, 1), Task("gradient_exchange", 3, 2)]
    assert not [each for each in tasks.waits_for(Task("route", 0)) if each.batch]
