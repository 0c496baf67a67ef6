"""Promise: a command says how far it is and that it compiles; compilation is in no figure."""

import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from tritonrec.distributed import Communicators
from tritonrec.harness import progress
from tritonrec.harness.progress import CommandProgress, Pace
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.kernels import compilation
from tritonrec.pipeline import WindowConfig


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_now_and_then_where_the_output_is_no_terminal(monkeypatch, terminal):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with CommandProgress(console) as bar:
        bar.disable = False
        task = bar.add_task("training", total=100, loss="")
        for step in range(1, 101):
            now[0] += 1.0
            bar.update(task, completed=step, loss=f"loss {step / 10}")
    lines = re.findall(r"training: .*", console.file.getvalue())
    expected = [f"training: {step} of 100, loss {step / 10}" for step in range(1, 100, 10)]
    assert lines == ([] if terminal else expected)


def paced(seconds, accumulate=1, compiled=()):
    """The pace, and the steps that count towards it; kernels are compiled in some of them."""
    before = list(compilation.compiling)
    with Pace(accumulate) as pace:
        steady = []
        for step, each in enumerate(seconds):
            if step in compiled:
                hooks, compilation.compiling[:] = list(compilation.compiling), []
                for hook in hooks:
                    hook()
            if pace.on_step_end(step, each, step + 1 == len(seconds)) is not None:
                steady.append(step)
    assert compilation.compiling == [each for each in before if each in compilation.compiling]
    return pace.seconds_per_step, steady


def test_steps_in_which_kernels_are_compiled_are_in_no_figure():
    seconds = [50.0, 40.0, 0.2, 30.0, 0.2, 20.0, 0.4, 0.3]
    assert paced(seconds, compiled=(0, 1, 3, 5)) == (0.25, [2, 4, 6, 7])
    assert paced(seconds[:6], compiled=(0, 1, 3, 5)) == (None, [2, 4])


@pytest.mark.parametrize(("steps", "said"), [(3, "too few steps to time"), (9, "ms per step")])
def test_training_says_the_pace_or_that_there_is_none(job, capsys, steps, said):
    summary = train(Communicators.local(), Run(job, "reference", WindowConfig(1), steps=steps))
    out = " ".join(capsys.readouterr().out.split())
    assert said in out and f"training: 1 of {steps}, loss " in out
    assert (summary["seconds_per_step"] is None) == (steps < 4)


COMPILE = """
import sys
from tritonrec.kernels import compilation
compilation.announcement._left = float(sys.argv[1])
import kernel
print(kernel.twice(2), kernel.thrice(2))
"""
KERNEL = """
from tritonrec.kernels.caches import njit
@njit(cache=True)
def twice(number): return 2 * number
@njit(cache=True)
def thrice(number): return 3 * number
"""


@pytest.mark.slow
def test_compilation_is_said_once_and_only_where_it_takes_long(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "run.py").write_text(COMPILE)

    def run(seconds, rank=0):
        done = subprocess.run(
            [sys.executable, "run.py", str(seconds)], cwd=tmp_path, capture_output=True, text=True,
            timeout=120, env={**os.environ, "RANK": str(rank)},
        )  # fmt: skip
        assert done.stdout == "4 6\n", done.stderr
        return done.stderr

    def forget():
        for path in tmp_path.rglob("*.nb?"):
            path.unlink()

    assert run(1e3) == ""
    forget()
    assert run(1e-6, rank=1) == ""
    forget()
    said = run(1e-6)
    assert said.startswith("tritonrec: compiling kernels, on the first run only") and said.count("\n") == 1
    assert run(1e-6) == ""
