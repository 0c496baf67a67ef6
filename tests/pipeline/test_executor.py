"""Promise: tasks run after all they wait for, lanes overlap, a failure stops the rank and is named."""

import os
import re
import signal
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speeds import examples

from tritonrec.kernels.compilation import announcement
from tritonrec.pipeline import (
    NESTPIPE,
    SCHEDULES,
    Edge,
    Executor,
    ScheduleError,
    StageFailedError,
    Task,
    Tasks,
    with_replicas,
)
from tritonrec.pipeline import executor as executor_module
from tritonrec.pipeline.exchange_groups import joined_groups
from tritonrec.pipeline.schedule import with_early_dense

pytestmark = pytest.mark.smoke


def idle_span(lane, task, context):
    return nullcontext()


SHARED = ("copy", "communication", "compute", "reduce")


def run(tasks, batches, action, delay=None, **options):
    actions = {
        stage.name: (lambda context, i, name=stage.name: action(Task(name, context, i)))
        for stage in tasks.schedule.stages
    }
    with Executor(tasks, actions, idle_span, delay, **options) as executor:
        for batch in range(batches):
            executor.submit(batch, batch)
        for batch in range(batches):
            executor.wait(batch)


@settings(max_examples=examples(30))
@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32),
    st.sets(st.sampled_from(sorted({stage.lane for stage in NESTPIPE.stages}))),
    st.sampled_from([None, False, True]), st.booleans(),
)  # fmt: skip
def test_every_task_runs_once_and_after_all_it_waits_for(
    mode, micro_batches, batches, seed, shared, overlap, in_turn
):
    """On lanes that share threads; or where another task does its work, in turn with those of other ranks."""
    schedule, doers, options = SCHEDULES[mode], {}, {"shared": shared}
    if overlap is not None:
        schedule = with_replicas(schedule)  # whose reductions follow a micro-batch's gradients
        doers = joined_groups(micro_batches, overlap and schedule.overlaps_window, ordered=False).doers
        options = {"in_turn": in_turn}
    tasks, random = Tasks(schedule, micro_batches, doers), Random(seed)
    finished, lock = list[Task](), threading.Lock()

    def action(task):
        with lock:
            seen = set(finished)
        missing = [other for other in tasks.waits_for(task) if other not in seen]
        assert not missing, f"{task} started before {missing}"
        with lock:
            finished.append(task)

    run(tasks, batches, action, lambda task: random.random() * 0.002, **options)
    expected = [task for batch in range(batches) for task in tasks.of(batch)]
    assert sorted(map(str, finished)) == sorted(map(str, expected))


@settings(max_examples=examples(15))
@given(
    st.sampled_from(["fwp", "nestpipe"]), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3),
    st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_a_part_of_a_task_ends_when_that_says_so_or_with_it(
    mode, micro_batches, batches, buckets, in_turn, seed
):
    schedule, random = with_early_dense(SCHEDULES[mode], buckets), Random(seed)
    lock, finished, executors, spans = threading.Lock(), set(), [], []

    def action(task):
        with lock:
            missing = [each for each in schedule.waits_for(task, micro_batches) if each not in finished]
            assert not missing, f"{task} started before {missing}"
        if task.stage == "compute" and task.micro_batch == micro_batches - 1:
            for j in range(buckets):
                with lock:
                    finished.add(Task("early_gradients", task.batch, j))
                    speaks = random.random() < 0.7
                if speaks:
                    executors[0].end_part()
                time.sleep(random.random() * 0.004)
            if speaks:
                for _ in range(buckets):
                    executors[0].end_part()  # once is enough
        with lock:
            finished.add(task)

    @contextmanager
    def span(lane, task, context):
        spans.append(("begin", task))
        yield
        spans.append(("end", task))

    actions = {
        stage.name: (lambda context, i, name=stage.name: action(Task(name, context, i)))
        for stage in schedule.stages
    }
    with Executor(Tasks(schedule, micro_batches), actions, span, in_turn=in_turn) as executor:
        executors.append(executor)
        for batch in range(batches):
            executor.submit(batch, batch)
        for batch in range(batches):
            executor.wait(batch)
    every = [task for batch in range(batches) for task in schedule.tasks(batch, micro_batches)]
    assert finished == set(every)
    for each in every:
        assert spans.index(("begin", each)) < spans.index(("end", each))
        if each.stage == "early_gradients":  # slices inside of the other, one after the other
            whole = Task("compute", each.batch, micro_batches - 1)
            before = (
                ("end", each._replace(micro_batch=j - 1)) if (j := each.micro_batch) else ("begin", whole)
            )
            assert spans.index(before) < spans.index(("begin", each))
            assert spans.index(("end", each)) < spans.index(("end", whole))


def test_what_waits_for_a_part_does_not_wait_for_the_rest():
    schedule, reduced = with_early_dense(NESTPIPE), threading.Event()
    with pytest.raises(StageFailedError, match="compute"):

        def compute(context, i):
            executors[0].end_part()
            assert reduced.wait(60)
            raise KeyError("the rest fails")

        actions = {stage.name: lambda context, i: None for stage in schedule.stages}
        actions |= {"compute": compute, "early_dense_reduce": lambda context, i: reduced.set()}
        executors = [Executor(Tasks(schedule, 1), actions, idle_span)]
        with executors[0] as executor:
            executor.submit(0, 0)
            executor.wait(0)
    assert reduced.is_set()


def test_a_lane_is_woken_when_it_can_go_on_and_for_nothing_else(monkeypatch):
    """It sleeps for work, for what a task waits for, and once more where a batch comes meanwhile."""
    slept = Counter()
    wait = threading.Condition.wait

    def counted(self, timeout=None):
        slept[threading.current_thread().name] += 1
        return wait(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", counted)
    batches, micro_batches = 3, 8
    run(Tasks(NESTPIPE, micro_batches), batches, lambda task: time.sleep(0.0003))
    tasks = Counter(NESTPIPE[task.stage].lane for task in NESTPIPE.tasks(0, micro_batches))
    for lane, count in tasks.items():
        assert 0 < slept[f"lane {lane}"] <= 2 * batches * count + batches + 1, lane
    for lane in ("prefetch", "h2d", "routing", "retrieval", "copy", "write_back"):
        assert slept[f"lane {lane}"] <= 3 * batches + 1  # however many micro-batches end meanwhile


@pytest.mark.parametrize("shared, thread", [(SHARED, "compute"), (("prefetch",), "prefetch")])
def test_lanes_that_share_a_thread_take_their_tasks_as_submitted(shared, thread):
    ran = []
    run(
        Tasks(NESTPIPE, 3), 4, lambda task: ran.append((threading.current_thread().name, task)), shared=shared
    )
    of_lane = {stage.name: stage.lane for stage in NESTPIPE.stages}
    submitted = [task for batch in range(4) for task in NESTPIPE.tasks(batch, 3)]
    together = [task for task in submitted if of_lane[task.stage] in shared]
    assert [task for name, task in ran if name == f"lane {thread}"] == together
    assert {name for name, _ in ran} == {
        f"lane {lane}" for lane in of_lane.values() if lane not in shared or lane == thread
    }


@pytest.mark.parametrize(
    ("beside", "micro_batches", "batches"), [(Task("exchange", 0, 1), 2, 1), (Task("retrieve", 1), 1, 2)]
)
def test_rows_of_what_comes_next_are_fetched_beside_computation(beside, micro_batches, batches):
    """The computation can only end while they are."""
    fetching, computed = threading.Event(), threading.Event()

    def action(task):
        if task == beside:
            fetching.set()
            assert computed.wait(10)
        elif task == Task("compute", 0, 0):
            assert fetching.wait(10)
            computed.set()

    run(Tasks(NESTPIPE, micro_batches), batches, action)


def test_a_failing_stage_is_named_and_nothing_later_starts():
    started = []

    def action(task):
        started.append(task)
        if task == Task("compute", 1, 0):
            raise FloatingPointError("loss is not finite")

    with pytest.raises(StageFailedError, match=r"stage compute\(1, 0\) .* loss is not finite") as caught:
        run(Tasks(NESTPIPE, 2), 4, action)
    assert isinstance(caught.value.__cause__, FloatingPointError)
    assert Task("sparse_update", 1) not in started


def test_a_failure_ends_waits_at_once():
    began = time.monotonic()

    def action(task):
        if task.stage == "route":
            raise ValueError("no route")

    with pytest.raises(StageFailedError):
        run(
            Tasks(NESTPIPE, 1),
            1,
            action,
            delay=lambda task: 30.0 if task.stage == "prefetch" and task.batch else 0,
        )
    assert time.monotonic() - began < 10


def test_every_task_waits_for_its_delay():
    delayed, schedule = [], SCHEDULES["nestpipe"]
    run(Tasks(schedule, 2), 2, lambda task: None, delay=lambda task: delayed.append(task) or 0.0)
    assert set(delayed) == {task for batch in range(2) for task in schedule.tasks(batch, 2)}


def test_what_takes_long_is_named_once(monkeypatch):
    monkeypatch.setattr(executor_module, "SILENT_SECONDS", 0.1)
    release = threading.Event()

    def action(task):
        if task.stage == "retrieve":
            release.wait(0.5)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(Tasks(NESTPIPE, 1), 3, action)
    texts = [str(each.message).partition("stages under way: ")[2] for each in told]
    named = [frozenset(re.findall(r"([\w-]+)\(", each.partition(". A disk")[0])) for each in texts]
    assert any("retrieve(0)" in each for each in texts)
    assert len(named) == len({*named})  # a busy machine holds up others too


def test_a_kernel_that_is_compiled_is_no_silence(monkeypatch):
    monkeypatch.setattr(executor_module, "SILENT_SECONDS", 0.05)

    def action(task):
        if task.stage == "retrieve":
            time.sleep(0.3)

    announcement.begin()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run(Tasks(NESTPIPE, 1), 1, action)
    finally:
        announcement.end()
    assert not [each for each in told if "training has waited" in str(each.message)]


def test_closing_waits_for_the_stages_that_run():
    begun, ended = threading.Event(), threading.Event()

    def act(context, micro_batch):
        begun.set()
        time.sleep(0.2)
        ended.set()

    actions = {stage.name: act for stage in NESTPIPE.stages}
    with Executor(Tasks(NESTPIPE, 1), actions, idle_span) as executor:
        executor.submit(0, 0)
        assert begun.wait(10)
    assert ended.is_set()


def test_no_more_batches_are_in_flight_than_the_schedule_allows():
    schedule = replace(NESTPIPE, batches_in_flight=2)
    release = threading.Event()
    actions = {s.name: lambda context, i: release.wait(10) for s in schedule.stages}
    with Executor(Tasks(schedule, 1), actions, idle_span) as executor:
        executor.submit(0, None)
        executor.submit(1, None)
        blocked = threading.Thread(target=executor.submit, args=(2, None), daemon=True)
        blocked.start()
        blocked.join(0.1)
        assert executor.in_flight() == [0, 1]
        release.set()
        executor.wait(1)
        blocked.join(10)
        assert not blocked.is_alive()


def test_an_unsound_schedule_does_not_start():
    unsound = NESTPIPE.without_edge("write_back", Edge("sparse_update"))
    with pytest.raises(ScheduleError):
        Executor(Tasks(unsound, 1), {}, idle_span)


def test_a_window_without_micro_batches_is_refused():
    with pytest.raises(ValueError, match="at least one micro-batch"):
        Tasks(NESTPIPE, 0)


class Noting:
    """Streams whose event is the name of the work, but in one lane, where work has ended."""

    def __init__(self, ended):
        self.ended, self.after, self.finished = ended, {}, []
        self.running = {}

    def begin(self):
        pass

    def run(self, lane, after, work):
        work()
        task = self.running[threading.current_thread()]
        self.after[task] = set(after)
        return None if lane == self.ended else task

    def mark(self, lane):
        return f"in {self.running.get(threading.current_thread())}"

    def finish(self, event):
        self.finished.append(event)


def test_a_part_ends_on_the_thread_of_its_task_with_the_event_of_what_that_has_queued():
    schedule, streams, part = with_early_dense(NESTPIPE), Noting(""), Task("early_gradients", 0, 0)

    def noted(name):
        def action(batch, i):
            streams.running[threading.current_thread()] = Task(name, batch, i)
            if name == "compute":
                other = threading.Thread(target=executor.end_part)  # that of a stream which runs work later
                other.start()
                other.join()
                assert part in executor._unfinished
                executor.end_part()
                assert part not in executor._unfinished

        return action

    actions = {stage.name: noted(stage.name) for stage in schedule.stages}
    with Executor(Tasks(schedule, 1), actions, idle_span, streams=streams) as executor:
        executor.submit(0, 0)
        executor.wait(0)
    assert streams.after[Task("early_dense_reduce", 0, 0)] == {"in compute(0, 0)"}


@pytest.mark.parametrize("mode", sorted(SCHEDULES))
def test_work_waits_for_the_events_of_every_edge_that_may_be_under_way(mode):
    """Also of batches whose results have been taken, and for no event of what has ended."""
    schedule, streams = SCHEDULES[mode], Noting("retrieval")
    lanes = {stage.name: stage.lane for stage in schedule.stages}

    def noted(name):
        return lambda batch, i: streams.running.update({threading.current_thread(): Task(name, batch, i)})

    actions = {stage.name: noted(stage.name) for stage in schedule.stages}
    with Executor(Tasks(schedule, 2), actions, idle_span, streams=streams) as executor:
        for batch in range(4):
            executor.submit(batch, batch)
            executor.wait(batch)
    every = [task for batch in range(4) for task in schedule.tasks(batch, 2)]
    for task in every:
        others = {each for each in schedule.waits_for(task, 2) if each.batch >= 0}
        expected = {each for each in others if lanes[each.stage] not in ("retrieval", lanes[task.stage])}
        assert streams.after[task] == expected, task
    assert sorted(streams.finished, key=str) == sorted(
        (task for task in every if lanes[task.stage] != "retrieval"), key=str
    )


def test_a_call_behind_a_stage_that_fails_raises_its_error():
    begun, failing = threading.Event(), threading.Event()

    def act(context, micro_batch):
        begun.set()
        failing.wait(10)
        raise ValueError("no route")

    with Executor(Tasks(NESTPIPE, 1), {stage.name: act for stage in NESTPIPE.stages}, idle_span) as executor:
        executor.submit(0, 0)
        assert begun.wait(10)
        call = executor.call("prefetch", lambda: None)
        failing.set()
        with pytest.raises(StageFailedError, match="no route"):
            executor.result(call)


def test_a_forked_process_has_no_lanes_and_says_so():
    actions = {stage.name: lambda *_: None for stage in NESTPIPE.stages}
    with Executor(Tasks(NESTPIPE, 1), actions, idle_span) as executor:
        executor.ensure_running()
        read, write = os.pipe()
        with executor._lock:  # as a lane may have it at any time
            process = os.fork()
            if not process:
                signal.alarm(20)  # ends it where it hangs
                try:
                    executor.close()
                    executor.ensure_running()
                except RuntimeError as error:
                    os.write(write, str(error).encode())
                os._exit(0)
        os.close(write)
        os.waitpid(process, 0)
        assert os.read(read, 999).startswith(b"this process was forked from %d," % os.getpid())
        os.close(read)
        executor.ensure_running()
