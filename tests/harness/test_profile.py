"""Promise: `profile` leaves a trace whose operators lie where they ran, and a whole flame graph or none."""

import os
import threading
import time
from datetime import timedelta

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tritonrec.harness.cli import app
from tritonrec.harness.profile import flame
from tritonrec.harness.profile.flame import NOT_INSTALLED, NOT_PERMITTED, FlameError, PySpy
from tritonrec.harness.profile.run import Profile, profile
from tritonrec.harness.trace_report import trace_report
from tritonrec.pipeline import WindowConfig
from tritonrec.trace import read

TOLERANCE_NS = 20_000
"""How far outside of its stage's slice an operator may seem to be, by the conversion of clocks."""

MINUTE = timedelta(seconds=60)
GRAPH = "<svg>mul (ops.py:8)</svg>"


@pytest.fixture
def pyspy(tmp_path, monkeypatch):
    """Make a program called py-spy, which notes its arguments and runs the given lines of shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(body):
        (folder / "graph.svg").write_text(GRAPH)
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
    for part in ("nestpipe", "compute", "exposed ratio", "tritonrec::segment_sum", "flame.svg"):
        assert part in text
    assert (out / "flame.svg").read_text() == GRAPH


BROKEN = {
    "not permitted": ("echo 'Permission Denied: Try sudo' >&2; exit 1", NOT_PERMITTED),
    "not permitted to attach": ("echo 'Error: Operation not permitted (os error 1)'; exit 1", NOT_PERMITTED),
    "not permitted to look": ("echo 'Error: No python processes found in process 7'; exit 1", NOT_PERMITTED),
    "fails": ("echo 'Error: no version'; echo Stack backtrace; echo 0: x; exit 3", "Error: no version$"),
    "fails at the end": (SAMPLES.replace("exit 0", "echo no disk; exit 1"), "status 1.*no disk"),
    "writes nothing": (SAMPLES.replace("cp $graph '$2'; ", ""), "status 0"),
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
        spy.finish(out / "flame.svg")
    assert not list(out.iterdir())


ARGUMENTS = [
    "profile", "--data", "zipf:users=60,items=80,seed=3", "--steps", "3", "--batch-size", "8", "--dim", "8",
    "--layers", "1", "--micro-batches", "2", "--flame-seconds", "0",
]  # fmt: skip


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
            spy.finish(target)
    except FlameError as error:
        if str(error) == NOT_PERMITTED:
            pytest.skip(NOT_PERMITTED)
        raise
    finally:
        stop.set()
        thread.join()
    assert "lane compute" in target.read_text() and "busy_until" in target.read_text()
