"""Promise: the examples of the documentation run as they stand."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run(name, *args):
    command = [sys.executable, str(EXAMPLES / name), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def losses(text):
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith("loss")]


def test_plain_pytorch():
    found = losses(run("plain.py"))
    assert len(found) == 3 and found[0] > found[1] > found[2]


def test_torch_compile_traces_every_op_with_its_backward():
    assert run("compiled.py", "aot_eager").count("agrees") == 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler; aot_eager runs above")
def test_torch_compile_with_inductor():
    assert run("compiled.py").count("agrees") == 3


def test_torchrec():
    pytest.importorskip("torchrec", reason="not installed: ci/torchrec.sh makes an environment that has it")
    text = run("torchrec_model.py")
    found = losses(text)
    assert len(found) == 3 and found[0] > found[1] > found[2]
    assert "{'clicked': [3, 0, 1], 'bought': [1, 2, 0]}" in text
