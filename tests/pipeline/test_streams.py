"""Promise: on an accelerator, where the host runs ahead, events hold every edge of a schedule.

The accelerator is made of threads that run each lane's work later than the host believes. A missing wait
shows as other bits, as it would on a device.
"""

import threading
from collections import Counter
from itertools import product

import pytest
import torch
from fake_accelerator import FakeAccelerator
from speeds import slow_except
from test_switches import POLICY, batches, parts, run, same, state

from tritonrec.distributed import Communicators
from tritonrec.pipeline import PIPELINED, Edge, StageFailedError, Trainer, WindowConfig, schedule_of, streams
from tritonrec.pipeline.program import Program
from tritonrec.settings import with_values


def run_on(accelerator, mode, made, schedule=None, **window):
    config = with_values(WindowConfig(3, seed=4), window)
    with Trainer(
        *made, Communicators.local(), mode, config, schedule=schedule, checked=schedule is None,
        streams=accelerator,
    ) as training:  # fmt: skip
        return [result.losses for result in training.run(batches())]


@pytest.mark.parametrize(
    ("mode", "seed"), slow_except([("nestpipe", 0), ("fwp", 1)], product(PIPELINED, (0, 1)))
)
def test_deferred_work_gives_the_bits_of_synchronous_training(mode, seed):
    expected, _ = run("reference", parts(policy=POLICY))
    made = parts(policy=POLICY)
    switches = {"first_use": bool(seed), "skip_fetch": bool(seed) and mode != "fwp"}
    losses = run_on(FakeAccelerator(seed), mode, made, **switches)
    assert same(state(made), expected)
    assert len(losses) == 6 and all(each.isfinite().all() for each in losses)


@pytest.mark.parametrize("mode", PIPELINED)
def test_each_piece_waits_for_the_events_of_the_lanes_it_depends_on(mode):
    accelerator = FakeAccelerator()
    run_on(accelerator, mode, parts())
    schedule, count = schedule_of(mode, WindowConfig(3)), 3
    expected = Counter()
    for batch in range(6):
        for task in schedule.tasks(batch, count):
            lane = schedule[task.stage].lane
            lanes = [schedule[other.stage].lane for other in schedule.waits_for(task, count)]
            expected[lane, tuple(sorted(each for each in lanes if each != lane))] += 1
    assert Counter(accelerator.log) == expected


@pytest.mark.if_changed
@pytest.mark.parametrize(
    ("stage", "edge", "slow"),
    [
        ("copy_kept_rows", Edge("sparse_update", batch=1), "compute"),
        ("sparse_update", Edge("gradient_exchange", "all"), "communication"),
        ("dense_update", Edge("dense_reduce"), "reduce"),
        ("exchange", Edge("copy_kept_rows"), "copy"),
    ],
)
def test_a_lost_wait_shows(stage, edge, slow):
    expected, _ = run("reference", parts())
    made = parts()
    broken = schedule_of("nestpipe", WindowConfig(3)).without_edge(stage, edge)
    try:
        run_on(FakeAccelerator(slow=slow), "nestpipe", made, broken)
    except StageFailedError:
        return
    assert not same(state(made), expected)


@pytest.mark.parametrize("mode", slow_except(["nestpipe"], ["dbp", "nestpipe"]))
def test_the_host_waits_for_the_device_once_and_not_whenever_it_is_ahead(mode):
    accelerator = FakeAccelerator(slow="compute")
    run_on(accelerator, mode, parts())
    assert accelerator.begun == 1


def test_an_error_that_the_device_reports_late_names_its_stage_and_keeps_what_it_works_on():
    made = parts()
    forward = made[0].forward

    def failing(batch, rows, seed):
        if batch.step == 2:
            raise FloatingPointError("loss is not finite")
        return forward(batch, rows, seed)

    made[0].forward = failing
    config = WindowConfig(3, seed=4)
    training = Trainer(*made, Communicators.local(), "nestpipe", config, streams=FakeAccelerator())
    with pytest.raises(StageFailedError, match=r"stage compute\(2, .*loss is not finite"):
        list(training.run(batches()))
    assert 2 in [places.window.step for places in training._pending.abandoned]


class RecordedStream:
    log: list[str]  # of all streams

    def __init__(self, device):
        self.name = f"stream {len([1 for each in self.log if each.startswith('new')])}"
        self.log.append(f"new {self.name} on {device}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.log.append(f"{self.name} records")
        return f"event of {self.name}"

    def __enter__(self):
        self.log.append(f"{self.name} entered")

    def __exit__(self, *exc):
        self.log.append(f"{self.name} left")


def test_device_streams_use_one_stream_a_lane_and_wait_before_they_work(monkeypatch):
    log = RecordedStream.log = []
    monkeypatch.setattr(torch, "Stream", RecordedStream)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: log.append(f"synchronised {device}"))
    on = streams.DeviceStreams(torch.device("cuda:0"))
    on.begin()
    first = on.run("compute", [], lambda: log.append("work 1"))
    second = on.run("communication", [first], lambda: log.append("work 2"))
    on.run("compute", [second], lambda: log.append(f"work 3, {on.mark('compute')}"))
    assert log == [
        "synchronised cuda:0",
        "new stream 0 on cuda:0", "stream 0 entered", "work 1", "stream 0 left", "stream 0 records",
        "new stream 1 on cuda:0", "stream 1 waits for event of stream 0", "stream 1 entered", "work 2",
        "stream 1 left", "stream 1 records",
        "stream 0 waits for event of stream 1", "stream 0 entered", "stream 0 records",
        "work 3, event of stream 0", "stream 0 left", "stream 0 records",
    ]  # fmt: skip


def test_a_tensor_of_the_device_stays_where_it_is_also_without_the_number_of_the_device():
    values = torch.empty(3, device="meta")
    assert streams.to_device(values, torch.device("meta:1")) is values


def test_the_host_needs_neither_streams_nor_copies():
    values = torch.arange(3)
    cpu = torch.device("cpu")
    assert type(streams.streams_for(cpu)) is streams.Streams
    assert streams.to_device(values, cpu) is values and streams.to_host(values) is values


def test_copies_go_through_page_locked_memory(monkeypatch):
    steps = []

    class Staged:
        device = torch.device("cpu")

        def pin_memory(self):
            steps.append("pinned")
            return self

        def to(self, device, non_blocking):
            steps.append((device.type, non_blocking))
            return "copy"

    assert streams.to_device(Staged(), torch.device("cuda")) == "copy"
    assert steps == ["pinned", ("cuda", True)]


def test_a_model_on_another_device_is_refused():
    made = parts()
    with pytest.raises(ValueError, match=r"parameter .* is on cpu, and the trainer works on cuda"):
        Trainer(*made, Communicators.local(), "nestpipe", device="cuda")


def test_lanes_of_one_rank_on_the_host_share_a_thread(monkeypatch):
    names, span = {}, Program.span

    def noted(self, lane, task, places):
        names.setdefault(lane, set()).add(threading.current_thread().name)
        return span(self, lane, task, places)

    monkeypatch.setattr(Program, "span", noted)
    expected, _ = run("reference", parts(policy=POLICY))
    made = parts(policy=POLICY)
    run_on(None, "nestpipe", made)
    assert same(state(made), expected)
    together = ("copy", "communication", "compute", "reduce")
    assert names == {lane: {f"lane {'compute' if lane in together else lane}"} for lane in names}
    assert names.keys() > set(together)


def test_lanes_that_wait_for_others_have_threads_of_their_own():
    assert streams.lanes_of_one_thread(streams.Streams(), 1, False)
    assert not streams.lanes_of_one_thread(streams.Streams(), 1, True)
    assert not streams.lanes_of_one_thread(streams.Streams(), 2, False)
    assert not streams.lanes_of_one_thread(FakeAccelerator(), 1, False)
