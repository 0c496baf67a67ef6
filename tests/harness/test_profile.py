"""Promise: `profile` leaves a trace whose operators lie where they ran, and a whole flame graph or none."""

import io
import os
import re
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tritonrec.harness.cli import app
from tritonrec.harness.profile import flame
from tritonrec.harness.profile.flame import NO_SAMPLE, NOT_INSTALLED, NOT_PERMITTED, FlameError, PySpy, count
from tritonrec.harness.profile.operators import MAIN, operators
from tritonrec.harness.profile.report import lane_times, own_times, print_profile
from tritonrec.harness.profile.run import Profile, profile
from tritonrec.harness.trace_report import trace_report
from tritonrec.pipeline import WindowConfig
from tritonrec.trace import Operator, Recorder, Span, Trace, read
from tritonrec.trace.analysis import summarise

TOLERANCE_NS = 20_000
"""How far outside of its stage's slice an operator may seem to be, by the conversion of clocks."""

MINUTE = timedelta(seconds=60)
FRAMES = [  # depth, first sample, samples, name
    (0, 0, 20, "all"),
    (1, 0, 12, 'process 77:"python &lt;x&gt;"'),
    (2, 0, 12, "thread (7): lane compute"),
    (3, 0, 12, "step (run.py:3)"),
    (4, 0, 7, "mul (ops.py:8)"),
    (5, 2, 4, "step (run.py:3)"),
    (6, 2, 3, "at::native::copy(char*) (libtorch_cpu.so)"),
    (4, 8, 3, "Condition.wait (threading.py:295)"),
    (5, 8, 2, "sem_wait (nptl/sem_wait.c:42)"),
    (1, 12, 8, "process 78:&quot;other&quot;"),
    (2, 12, 8, "mul (ops.py:8)"),
]


def svg(frames):
    boxes = "".join(
        f"<g><title>{name} ({width:,} samples, {width / 0.2:.2f}%)</title>"
        f'<rect x="1%" y="{52 + 16 * depth}" width="1%" fg:x="{first}" fg:w="{width}"/></g>'
        for depth, first, width, name in frames
    )
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:fg="http://github.com/jonhoo/inferno"'
    return f'<svg {names}><text id="title" x="1">py-spy record</text><svg id="frames">{boxes}</svg></svg>'


@pytest.fixture
def pyspy(tmp_path, monkeypatch):
    """Make a program called py-spy, which notes its arguments and runs the given lines of shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(body, frames=FRAMES):
        (folder / "graph.svg").write_text(svg(frames))
        program = folder / "py-spy"
        program.write_text(f'#!/bin/bash\necho "$@" > {folder}/arguments\ngraph={folder}/graph.svg\n{body}\n')
        program.chmod(0o755)
        return folder / "arguments"

    return make


SAMPLES = """
while [ "$1" != --output ]; do shift; done
trap "cp $graph '$2'; exit 0" INT
echo "py-spy> Sampling process 100 times a second."
while true; do sleep 0.01; done
"""


def outside(trace):
    """By how many nanoseconds each operator of a lane lies outside of the nearest slice of that lane."""
    slices = {}
    for span in trace.spans:
        slices.setdefault((span.rank, span.lane), []).append((span.start_ns, span.end_ns))
    return [
        max(0, min(max(start - each.start_ns, each.end_ns - end) for start, end in slices[where]))
        for each in trace.operators
        if (where := (each.rank, each.thread)) in slices
    ]


def run(job, out, world_size=1, console=None, **settings):
    plan = Profile(job, "nestpipe", WindowConfig(2), steps=3, warm_up=1, **settings)
    profile(plan, str(out), world_size, console or Console(quiet=True), MINUTE)
    return read(out / "trace.pftrace")


@pytest.mark.slow
@pytest.mark.multi_rank
def test_ranks_come_in_one_trace_with_their_operators_and_one_flame_graph(job, tmp_path, pyspy):
    arguments, out = pyspy(SAMPLES), tmp_path / "out"
    console = Console(record=True, width=100)
    trace = run(job, out, 2, console, flame_seconds=0.0, rate=250)

    assert sorted(path.name for path in out.iterdir()) == ["flame.svg", "trace.pftrace"]
    assert trace.ranks == (0, 1) and trace.metadata["world_size"] == 2
    assert {span.batch for span in trace.spans} == {4, 5, 6}, "steps that warm up are left out"
    ran = {(each.rank, each.thread, each.name) for each in trace.operators}
    for rank in (0, 1):
        assert (rank, "routing", "tritonrec::unique") in ran
        assert (rank, "compute", "tritonrec::sampled_softmax_by_sample") in ran
        assert (rank, "communication", "c10d::alltoall_base_") in ran
    inside = outside(trace)
    assert len(inside) > 1000 and max(inside) <= TOLERANCE_NS

    quiet = Console(record=True, width=100)
    assert trace_report(out / "trace.pftrace", console=quiet) == 0  # every edge honoured, none unexercised
    assert "exposed ratio" in quiet.export_text()
    words = arguments.read_text().split()
    watched = int(words[words.index("--pid") + 1])  # the server that forks ranks
    assert watched != os.getpid() and "--subprocesses" in words
    assert words[words.index("--rate") + 1] == "250"
    text = console.export_text()
    for part in ("nestpipe", "compute", "segment_sum", "outside operators", "mul (ops.py:8)", "flame.svg"):
        assert part in text


def test_no_row_takes_two_lines_of_eighty_columns(tmp_path):
    recorder = Recorder(0, 1, {"mode": "dbp", "consistency": "batch", "world_size": 1, "micro_batches": 1})
    longest = "tritonrec::norm_mul_dropout_backward_into"
    for batch in range(3):
        begin = 10**8 * batch
        for lane, stage in (("compute", "compute"), ("communication", "exchange")):
            recorder.add(lane, stage, begin, begin + 10**8, batch=batch)
        recorder.operator("communication", longest, begin, begin + 9 * 10**7)
    folder = "site-packages/tritonrec/kernels/norm_linear_silu/__init__.py:212"
    frames = [(0, 0, 9, "all"), (1, 0, 9, f"_backward_in_place.&lt;locals&gt;.run ({folder})")]
    (tmp_path / "flame.svg").write_text(svg(frames))
    console = Console(record=True, width=80, file=io.StringIO())
    print_profile(recorder.save(tmp_path / "trace"), tmp_path / "flame.svg", 1.5, console)
    text = console.export_text()
    assert " _backward_in_place.run (norm_linear_silu/__init__.py:212) " in text
    assert re.search(r"│ communication │ 100.00 │ norm_mul_dropout_backward_into +│ +90.00 │ +1.0 │", text)


def test_operators_of_a_thread_with_several_lanes_belong_to_the_lane_at_work(tmp_path):
    metadata = {"mode": "nestpipe", "consistency": "batch", "world_size": 1, "micro_batches": 1}
    recorder = Recorder(0, 1, {**metadata, "one_thread": ["communication", "compute"]})
    for batch in range(3):
        begin = 10**8 * batch
        recorder.add("retrieval", "retrieve", begin, begin + 10**8, batch=batch)
        recorder.add("communication", "exchange", begin, begin + 4 * 10**7, batch=batch, micro_batch=0)
        recorder.add("compute", "compute", begin + 5 * 10**7, begin + 10**8, batch=batch, micro_batch=0)
        recorder.operator("compute", "aten::copy_", begin, begin + 10**7)
        recorder.operator("compute", "aten::mul", begin + 6 * 10**7, begin + 8 * 10**7)
        recorder.operator("retrieval", "aten::sort", begin, begin + 3 * 10**7)
    trace = read(recorder.save(tmp_path / "trace"))
    found = {lane: dict(times.own) for lane, times in lane_times(trace, summarise(trace.spans)).items()}
    assert found == {
        "retrieval": {"aten::sort": 30.0}, "communication": {"aten::copy_": 10.0},
        "compute": {"aten::mul": 20.0},
    }  # fmt: skip


def test_what_an_operator_is_called_by_and_where_it_ran(tmp_path):
    recorder = Recorder(0, 1)
    go, done = threading.Event(), threading.Event()

    def lane():
        for batch in range(40):
            go.wait()
            with recorder.span("compute", "compute", batch=batch):
                (torch.ones(9, 9) @ torch.ones(9, 9)).exp()
        done.set()

    thread = threading.Thread(target=lane, name="lane compute")
    thread.start()
    with operators(recorder) as names:
        names |= {thread.native_id: "compute", threading.main_thread().native_id: MAIN}
        torch.zeros(3).tanh()
        go.set()
        thread.join()
    trace = read(recorder.save(tmp_path / "t"))
    ran = Counter((each.thread, each.name) for each in trace.operators)
    assert ran["compute", "aten::exp"] == ran["compute", "aten::mm"] == 40
    assert ran["main", "aten::tanh"] == 1 and {thread for thread, _ in ran} == {"compute", "main"}
    # The operators of batch b lie in the slice of batch b, not merely in one of the lane.
    for span, each in zip(trace.spans, [o for o in trace.operators if o.name == "aten::exp"], strict=True):
        assert span.start_ns - TOLERANCE_NS <= each.start_ns
        assert each.end_ns <= span.end_ns + TOLERANCE_NS


def ops(*pieces, thread="compute", rank=0):
    return [Operator(rank, thread, name, start, end) for name, start, end in pieces]


def test_own_time_is_without_the_operators_called():
    ran = ops(("a", 0, 100), ("b", 10, 60), ("c", 10, 30), ("b", 60, 70), ("z", 65, 65), ("a", 100, 105))
    assert own_times(ran) == [40, 30, 20, 10, 0, 5]


@pytest.mark.parametrize("mode", ["nestpipe", "sequential"])
def test_times_of_lanes_are_those_of_the_steps_measured(mode):
    ms = 1_000_000
    spans, ran = [], []
    for batch in range(3):  # the first fills the pipeline
        at = 100 * batch * ms
        for rank, length in ((0, 40), (1, 20)):
            spans.append(Span(rank, "routing", "route", at, at + 10 * ms, batch))
            spans.append(Span(rank, "compute", "compute", at + 20 * ms, at + (20 + length) * ms, batch))
            lane = {"nestpipe": ("routing", "compute"), "sequential": ("main", "main")}[mode]
            ran += ops(("unique", at + 2 * ms, at + 5 * ms), thread=lane[0], rank=rank)
            ran += ops(
                ("linear", at + 25 * ms, at + 35 * ms), ("mm", at + 26 * ms, at + 29 * ms),
                thread=lane[1], rank=rank,
            )  # fmt: skip
            ran += ops(("index", at + 85 * ms, at + 90 * ms), thread="main", rank=rank)
    ran.sort(key=lambda each: (each.start_ns, -each.end_ns))
    trace = Trace(spans, [], {"mode": mode, "world_size": 2}, (0, 1), ran)
    times = lane_times(trace, summarise(spans))
    assert list(times) == ["routing", "compute", "main"]
    assert times["compute"].busy == pytest.approx(30)
    assert times["compute"].own == pytest.approx({"linear": 7, "mm": 3})
    assert times["compute"].outside == pytest.approx(20)
    assert times["compute"].calls == pytest.approx({"linear": 1, "mm": 1})
    assert times["routing"].own == pytest.approx({"unique": 3})
    assert times["routing"].outside == pytest.approx(7)
    assert times["main"].own == pytest.approx({"index": 5}) and times["main"].busy == 0


def test_samples_of_a_flame_graph_without_its_waits():
    samples = count(svg(FRAMES).encode())
    assert (samples.working, samples.waiting) == (17, 3)
    assert [(each.name, each.place, each.own, each.total) for each in samples.functions] == [
        ("mul", "ops.py:8", 11, 15),
        ("step", "run.py:3", 6, 9),
    ]


def test_a_flame_graph_names_ranks_and_what_it_shows(tmp_path, pyspy):
    pyspy(SAMPLES)
    target = tmp_path / "flame.svg"
    with PySpy(os.getpid()) as spy:
        spy.finish(target, "a & b", {77: "rank 0"})
    text = target.read_text()
    assert "<title>rank 0 (12 samples, 60.00%)</title>" in text
    assert "<title>process 78 (8 samples, 40.00%)</title>" in text
    assert '<text id="title" x="1">a &amp; b</text>' in text


def test_py_spy_is_stopped_from_a_job_in_the_background_too(tmp_path, pyspy, monkeypatch):
    """A shell starts such jobs with SIGINT ignored, which a child inherits and bash cannot trap."""
    pyspy(SAMPLES)
    monkeypatch.setattr(flame, "STOP_SECONDS", 5)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with PySpy(os.getpid()) as spy:
            spy.finish(tmp_path / "flame.svg", "t", {})
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "flame.svg").exists()


BROKEN = {
    "not permitted": ("echo 'Permission Denied: Try sudo' >&2; exit 1", NOT_PERMITTED),
    "not permitted to attach": ("echo 'Error: Operation not permitted (os error 1)'; exit 1", NOT_PERMITTED),
    "not permitted to look": ("echo 'Error: No python processes found in process 7'; exit 1", NOT_PERMITTED),
    "fails": ("echo 'Error: no version'; echo Stack backtrace; echo 0: x; exit 3", "Error: no version$"),
    "fails at the end": (SAMPLES.replace("exit 0", "echo no disk; exit 1"), "status 1.*no disk"),
    "writes nothing": (SAMPLES.replace("cp $graph '$2'; ", ""), "status 0"),
    "writes half": (SAMPLES.replace("cp $graph", "head -c 400 $graph >"), "wrote no flame graph"),
    "does not stop": ('trap "" INT; ' + SAMPLES.replace('trap "cp', 'true "'), "did not write its samples"),
    "does not begin": ("while true; do sleep 0.01; done", "did not begin to sample"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_what_fails_is_told_and_leaves_no_half_file(what, tmp_path, pyspy, monkeypatch):
    body, message = BROKEN[what]
    pyspy(body)
    monkeypatch.setattr(flame, "START_SECONDS", 0.3 if what == "does not begin" else 20)
    monkeypatch.setattr(flame, "STOP_SECONDS", 0.3 if what == "does not stop" else 20)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(FlameError, match=message.replace("(", r"\(")), PySpy(os.getpid()) as spy:
        spy.finish(out / "flame.svg", "t", {})
    assert not list(out.iterdir())


def test_no_sample_is_no_flame_graph(tmp_path, pyspy):
    pyspy(SAMPLES, [(0, 0, 4, "all"), (1, 0, 4, "Condition.wait (threading.py:295)")])
    with pytest.raises(FlameError, match=NO_SAMPLE), PySpy(os.getpid()) as spy:
        spy.finish(tmp_path / "flame.svg", "t", {})
    assert not (tmp_path / "flame.svg").exists()


def test_py_spy_ends_with_a_run_that_fails(pyspy):
    pyspy(SAMPLES)
    with suppress(ZeroDivisionError), PySpy(os.getpid()) as spy:
        process = spy._process
        raise ZeroDivisionError
    assert process.poll() is not None


ARGUMENTS = [
    "profile", "--data", "zipf:users=60,items=80,seed=3", "--steps", "3", "--batch-size", "8", "--dim", "8",
    "--layers", "1", "--micro-batches", "2", "--flame-seconds", "0",
]  # fmt: skip


def test_the_command_goes_on_without_py_spy(tmp_path, monkeypatch):
    monkeypatch.setattr(flame, "_find", lambda: None)
    stale = tmp_path / "flame.svg"
    stale.write_text("of an earlier run")
    result = CliRunner().invoke(app, [*ARGUMENTS, "--mode", "reference", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert NOT_INSTALLED in text and "reference" in text and "outside operators" in text
    assert [path.name for path in tmp_path.iterdir()] == ["trace.pftrace"]
    assert read(tmp_path / "trace.pftrace").metadata["mode"] == "reference"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--steps", "2"], {}, "--steps"),
        (["--data", "movies"], {}, "unknown data 'movies'"),
        (["--out", "/proc/nowhere"], {}, "/proc/nowhere"),
        ([], {"RANK": "1", "WORLD_SIZE": "2"}, "without torchrun"),
        ([], {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "without SLURM"),
        ([], {"WORLD_SIZE": "x"}, "WORLD_SIZE='x' must be a whole number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_error(arguments, environment, message, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, [*ARGUMENTS, "--no-flame", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def busy_until(stop):
    while not stop.is_set():
        sum(range(1000))


def test_py_spy_itself_samples_the_lanes_by_name(tmp_path):
    if flame._find() is None:
        pytest.skip(NOT_INSTALLED)
    stop, target = threading.Event(), tmp_path / "flame.svg"
    thread = threading.Thread(target=busy_until, args=(stop,), name="lane compute")
    thread.start()
    try:
        with PySpy(os.getpid(), rate=200) as spy:
            time.sleep(0.5)
            spy.finish(target, "t", {})
    except FlameError as error:
        if str(error) == NOT_PERMITTED:
            pytest.skip(NOT_PERMITTED)
        raise
    finally:
        stop.set()
        thread.join()
    assert "lane compute" in target.read_text()
    found = {each.name: each for each in count(target.read_bytes()).functions}
    assert found["busy_until"].own > 0.5 * found["busy_until"].total > 5
    assert all(each.name != "Condition.wait" for each in found.values())
