"""`ci/gpu/run.sh` runs here too, in the interpreter on tiny shapes; on a GPU it runs for real."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import first
import launch_all
import pipeline
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def script(*arguments, out, **more):
    # pytest-benchmark writes no report in what it takes for one of xdist's processes
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = {**inherited, "OUT": str(out), **more}
    return subprocess.run(
        ["bash", "ci/gpu/run.sh", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="rehearses what this machine can run")
def test_the_rehearsal_passes_and_leaves_its_files(tmp_path):
    # verify has tests of its own and takes longer than the others together
    done = script("--rehearse", "first", "correctness", "bench", "tune", "pipeline", "profile", out=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    names = {path.name for path in tmp_path.iterdir()}
    assert "hstu_attention" in first.page(json.loads((tmp_path / "first.json").read_text()))
    assert {"tests.xml", "launches.json", "bench.json", "bench.txt", "pipeline.json"} <= names
    assert {"pipeline.pftrace", "kernels.trace.json", "profile.json"} <= names
    pipeline = json.loads((tmp_path / "pipeline.json").read_text())
    assert len(pipeline["identical"]) == 15 and all(pipeline["identical"].values())
    assert "silu" in (tmp_path / "bench.txt").read_text()


@pytest.mark.if_changed
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = script("bench", out=tmp_path)
    assert done.returncode == 2 and "torch sees no GPU" in done.stderr


def test_an_unknown_stage_is_refused(tmp_path):
    done = script("--rehearse", "benhc", out=tmp_path)
    assert done.returncode == 2 and "no stage benhc" in done.stderr


def test_a_stage_that_fails_is_named_and_the_others_run(tmp_path):
    done = script("--rehearse", "tune", "bench", "verify", out=tmp_path, PYTHON="false")
    assert done.returncode == 1 and "failed: tune bench verify" in done.stdout


@pytest.mark.parametrize("broken", [None, "silu", "unique"])
def test_a_launch_that_fails_is_named(tmp_path, monkeypatch, broken):
    def case(label):
        if label == broken:
            raise ValueError("an invalid argument")

    cases = {label: lambda label=label: case(label) for label in ("silu", "unique")}
    made = SimpleNamespace(CASES=cases, sized=lambda rows, most: nullcontext())
    monkeypatch.setitem(sys.modules, "launches", made)
    monkeypatch.setattr(launch_all, "interpreted", True)
    monkeypatch.setattr(launch_all.pkgutil, "walk_packages", lambda *_: [])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    file = tmp_path / "launches.json"
    monkeypatch.setattr(sys, "argv", ["launch_all.py", "--json", str(file)])
    assert launch_all.main() == (broken is not None)
    errors = {label: case.get("error") for label, case in json.loads(file.read_text())["cases"].items()}
    assert errors == {
        label: "ValueError: an invalid argument" if label == broken else None for label in cases
    }


@pytest.mark.parametrize("other", [None, "fwp host", "nestpipe cached", "an error"])
def test_other_losses_in_a_mode_or_storage_fail(tmp_path, monkeypatch, other):
    def run(job, mode, storage, *_):
        if other == "an error" and storage == "cached":
            raise RuntimeError("an error")
        return torch.tensor([1.0, 2.0 + (f"{mode} {storage}" == other)], dtype=torch.float64), 0.1

    monkeypatch.setattr(pipeline, "run", run)
    file = tmp_path / "pipeline.json"
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "--device", "cpu", "--json", str(file)])
    assert pipeline.main() == (other is not None)
    found = json.loads(file.read_text())
    # without a GPU the steps with graphs are those without
    wrong = [name for name in found["identical"] if name.replace(" graphs", "") == other]
    assert [name for name, same in found["identical"].items() if not same] == wrong
    assert len(found["identical"]) == (10 if other == "an error" else 15)
    assert ("errors" in found) is (other == "an error")


def test_rows_that_are_wrong_fail_and_the_others_are_kept(tmp_path, monkeypatch, capsys):
    """An output that differs, and a group of rows that breaks off."""

    def rows(device, size):
        yield "right", 8, "bytes", lambda: None, None, lambda: 0.0
        yield "wrong", 8, "flop", lambda: None, lambda: None, lambda: float("nan")

    def broken(device, size):
        raise RuntimeError("a kernel that does not compile")
        yield

    file = tmp_path / "first.json"
    for name in ("on_keys", "on_rows", "on_tokens", "on_attention"):
        monkeypatch.setattr(first, name, broken if name == "on_keys" else lambda *_: iter(()))
    monkeypatch.setattr(first, "on_attention", rows)
    monkeypatch.setattr(sys, "argv", ["first.py", "--device", "cpu", "--json", str(file)])
    assert first.main() == 1 and "does not compile" in capsys.readouterr().err
    assert list(json.loads(file.read_text())["rows"]) == ["right", "wrong"]
    monkeypatch.setattr(first, "on_keys", lambda *_: iter(()))
    assert first.main() == 1  # for the wrong row alone
    monkeypatch.setattr(first, "on_attention", lambda *_: iter([next(rows("", 1))]))
    assert first.main() == 0
    monkeypatch.setattr(sys, "argv", ["first.py", "--json", str(file), "--page"])
    assert first.main() == 0 and "| right |" in capsys.readouterr().out
