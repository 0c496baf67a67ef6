"""`ci/gpu/run.sh` runs here too, in the interpreter on tiny shapes; on a GPU it runs for real."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def script(*arguments, out):
    environment = {**os.environ, "OUT": str(out)}
    return subprocess.run(
        ["bash", "ci/gpu/run.sh", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="rehearses what this machine can run")
def test_the_rehearsal_passes_and_leaves_its_files(tmp_path):
    # verify has tests of its own and takes longer than the others together
    done = script("--rehearse", "correctness", "bench", "tune", "pipeline", "profile", out=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"tests.xml", "launches.json", "bench.json", "bench.md", "roofs.json", "pipeline.json"} <= names
    assert {"pipeline.pftrace", "kernels.trace.json", "profile.json"} <= names
    pipeline = json.loads((tmp_path / "pipeline.json").read_text())
    assert len(pipeline["identical"]) == 12 and all(pipeline["identical"].values())
    assert "silu" in (tmp_path / "bench.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = script("bench", out=tmp_path)
    assert done.returncode == 2 and "torch sees no GPU" in done.stderr


def test_an_unknown_stage_is_refused(tmp_path):
    done = script("--rehearse", "benhc", out=tmp_path)
    assert done.returncode == 2 and "no stage benhc" in done.stderr
