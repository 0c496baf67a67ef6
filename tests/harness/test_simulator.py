"""Promise: the event core gives the times that an event loop over single workers gives, exactly."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.harness.simulator import Cost, Workers, measure, simulate
from tritonrec.harness.simulator.plan import TABLES, Plan
from tritonrec.pipeline.schedule import Access, Edge, Schedule, Stage, Task

GROUP = (Access("update", "communication_group", group="device"),)


def one_by_one(schedule, cost, micro_batches, batches, workers, groups):
    """Start and end of every task of every worker: a loop over time, workers and lanes."""
    tasks = [task for batch in range(batches) for task in schedule.tasks(batch, micro_batches)]
    collective = {
        stage.name: next((a.place for a in stage.touches if a.group), None) for stage in schedule.stages
    }

    def group_of(task, worker):
        place = collective[task.stage]
        if place is None:
            return [worker]
        number = groups.get(place, 1)
        if number > 0:
            return [w for w in range(workers.count) if w % number == worker % number]
        return [w for w in range(workers.count) if w // -number == worker // -number]

    def uses_link(task):
        return cost(task).transfer > 0 and schedule[task.stage].lane in ("communication", "reduce")

    everyone = range(workers.count)
    lanes = [
        {
            lane: deque(task for task in tasks if schedule[task.stage].lane == lane)
            for lane in {stage.lane for stage in schedule.stages}
        }
        for _ in everyone
    ]
    links = [deque(task for task in tasks if uses_link(task)) for _ in everyone]
    start, arrive, end = {}, {}, {}
    now = 0.0
    while any(queue for own in lanes for queue in own.values()):
        moved = True
        while moved:
            moved = False
            for worker in everyone:
                for queue in lanes[worker].values():
                    if not queue:
                        continue
                    task = queue[0]
                    key = (worker, task)
                    if end.get(key, now + 1) <= now:
                        queue.popleft()
                        moved = True
                        continue
                    finished = [
                        all(end.get((worker, t), now + 1) <= now for t in tasks if t.batch == batch)
                        for batch in range(task.batch - schedule.batches_in_flight + 1)
                    ]
                    waits = [(worker, other) for other in schedule.waits_for(task, micro_batches)]
                    if key not in start and all(finished) and all(end.get(w, now + 1) <= now for w in waits):
                        start[key] = now
                        arrive[key] = now + cost(task).seconds * workers.slowness[worker]
                        moved = True
            for worker in everyone:
                while links[worker] and end.get((worker, links[worker][0]), now + 1) <= now:
                    links[worker].popleft()
                    moved = True
            for worker, task in [key for key in arrive if key not in end]:
                group = group_of(task, worker)
                there = all(arrive.get((w, task), now + 1) <= now for w in group)
                free = not uses_link(task) or all(links[w] and links[w][0] == task for w in group)
                if there and free:
                    for w in group:
                        end[w, task] = now + cost(task).transfer
                    moved = True
        later = [time for time in (*arrive.values(), *end.values()) if time > now]
        if not later:
            break
        now = min(later)
    return start, end


@st.composite
def schedules(draw):
    """A table of a few stages before, in and after a window, with random lanes, edges and collectives."""
    lanes = st.sampled_from(["compute", "communication", "reduce", "retrieval"])
    touches = st.sampled_from(
        [(), GROUP, *((Access("update", f"{each}_group", group="device"),) for each in ("replica", "reduce"))]
    )
    counts = [draw(st.integers(0, 2)), draw(st.integers(0, 3)), draw(st.integers(0, 2))]
    kinds = [False] * counts[0] + [True] * counts[1] + [False] * counts[2]
    kinds = kinds or [False]
    stages = []
    for place, per_micro_batch in enumerate(kinds):
        edges = []
        for other, many in enumerate(kinds):
            back = draw(st.sampled_from([None, None, 0, 1, 2]))
            if back is None or (back == 0 and other >= place):
                continue
            if not many:
                rule = "none"
            elif back == 0 and per_micro_batch:
                rule = draw(st.sampled_from(["same", "previous"]))
            else:
                rule = "all"
            edges.append(Edge(f"s{other}", rule, back))
        stages.append(Stage(f"s{place}", draw(lanes), tuple(edges), draw(touches), per_micro_batch))
    return Schedule("drawn", tuple(stages), draw(st.integers(1, 3)), draw(st.booleans()))


@given(st.data())
def test_vectors_give_the_times_of_single_workers(data):
    schedule = data.draw(schedules())
    micro_batches = data.draw(st.integers(1, 3))
    whole = st.integers(0, 5).map(float)
    prices = {
        stage.name: [data.draw(st.builds(Cost, whole, whole, whole)) for _ in range(2)]
        for stage in schedule.stages
    }

    def cost(task):
        return prices[task.stage][(task.batch + (task.micro_batch or 0)) % 2]

    count = data.draw(st.sampled_from([1, 2, 4]))
    slowness = np.array(data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)), float)
    workers = Workers(count, slowness)
    groups = {} if count < 4 else {"communication_group": 2, "replica_group": -2}
    timeline = simulate(schedule, cost, micro_batches, 4, workers, groups)
    start, end = one_by_one(schedule, cost, micro_batches, 4, workers, groups)
    assert len(end) == count * len(timeline.end)
    for task in timeline.end:
        assert timeline.start[task].tolist() == [start[worker, task] for worker in range(count)], task
        assert timeline.end[task].tolist() == [end[worker, task] for worker in range(count)], task


TWO_STAGES = Schedule(
    "two",
    (
        Stage("work", "compute", (Edge("send", batch=1),), ()),
        Stage("send", "communication", (Edge("work"),), GROUP),
    ),
    batches_in_flight=1,
)


def test_exposed_time_is_what_no_computation_hides():
    window = Schedule(
        "window",
        (
            Stage("exchange", "communication", (), GROUP, per_micro_batch=True),
            Stage("compute", "compute", (Edge("exchange", "same"),), (), per_micro_batch=True),
            Stage("update", "compute", (Edge("compute", "all"),), ()),
        ),
        batches_in_flight=1,
    )
    prices = {"exchange": Cost(transfer=2.0), "compute": Cost(5.0), "update": Cost(1.0)}
    found = measure(simulate(window, lambda task: prices[task.stage], 3, 4))
    assert (found.step, found.compute, found.communication, found.exposed) == (18, 16, 6, 2)
    assert found.exposed_ratio == 1 / 3


def test_jitter_is_seeded_and_has_mean_one():
    def run(seed):
        workers = Workers(20_000, jitter=0.3, seed=seed)
        return simulate(TWO_STAGES, lambda task: Cost(1.0), 1, 1, workers, observe=20_000)

    work = Task("work", 0)
    assert np.array_equal(run(1).end[work], run(1).end[work])
    assert not np.array_equal(run(1).end[work], run(2).end[work])
    assert abs(run(1).end[work].mean() - 1) < 0.02
    assert 0.28 < np.log(run(1).end[work]).std() < 0.32


def test_a_share_of_the_workers_straggles():
    workers = Workers.drawn(10_000, stragglers=0.1, slowdown=2.5, seed=3)
    assert set(workers.slowness) == {1.0, 2.5}
    assert 900 < (workers.slowness == 2.5).sum() < 1100


@pytest.mark.parametrize("name", list(TABLES))
def test_in_lockstep_the_step_is_the_sum_and_in_a_pipeline_the_longest_resource(name):
    plan = Plan(name, 1 if name == "sequential" else 4)
    schedule = plan.schedule()
    found = measure(simulate(schedule, lambda task: Cost(1.0), plan.micro_batches, 30))
    total = sum(plan.micro_batches if stage.per_micro_batch else 1 for stage in schedule.stages)
    assert found.step <= total
    assert found.step == pytest.approx(total) if name == "sequential" else found.step < total
    assert found.compute == pytest.approx(plan.micro_batches + 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Workers(0), "at least one worker"),
        (lambda: Workers(2, np.array([1.0, -1.0])), "positive factors"),
        (lambda: Workers(1, jitter=-0.1), "jitter"),
        (lambda: Workers.drawn(4, stragglers=2), "stragglers"),
        (lambda: Cost(seconds=-1), "seconds"),
        (lambda: Cost(transfer=float("nan")), "transfer"),
        (
            lambda: simulate(TWO_STAGES, lambda _: Cost(), 1, 1, Workers(3), {"communication_group": 2}),
            "3 workers",
        ),
        (
            lambda: simulate(TWO_STAGES.with_edges("work", Edge("send")), lambda _: Cost(), 1, 1),
            "queued behind it",
        ),
        (lambda: measure(simulate(TWO_STAGES, lambda _: Cost(1.0), 1, 1)), "run more"),
        (lambda: Plan("fast"), "pipeline"),
        (lambda: Plan("nestpipe", 0), "micro_batches"),
        (lambda: Plan("nestpipe", 4, taper=1.5), "taper"),
        (lambda: Plan("nestpipe", depth=0), "depth"),
        (lambda: Plan("sequential", skip_fetch=True), "two buffers"),
        (lambda: Plan("nestpipe", 2, depth=1, skip_fetch=True), "does not read ahead"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_plans_make_tables_and_fractions():
    assert Plan("nestpipe", 4, taper=0.5).fractions == pytest.approx((1 / 6, 1 / 3, 1 / 3, 1 / 6))
    assert Plan("nestpipe", depth=2).schedule().batches_in_flight == 2
    names = [stage.name for stage in Plan("nestpipe", replicas=2).schedule().stages]
    assert names.index("gradient_exchange") < names.index("replica_reduce") < names.index("sparse_update")
    assert replace(Plan("nestpipe", replicas=2), replicas=1).groups() == {}
