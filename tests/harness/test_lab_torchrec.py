"""Promise: beside TorchRec, no time is printed unless every step's loss is equal to float tolerance."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "ci" / "benchmarks"))
    yield importlib.import_module("bench_torchrec")
    sys.path.remove(str(ROOT / "ci" / "benchmarks"))


def test_equal_losses_pass_and_the_largest_difference_is_told(bench):
    runs = {"first": bench.Run([0.1], [2.0, 1.0]), "other": bench.Run([0.1], [2.00002, 1.0])}
    assert bench.compare(runs, "first") == {"first": 0.0, "other": pytest.approx(1e-5)}


@pytest.mark.parametrize("losses", [[2.0, 1.01], [2.0, float("nan")], [float("inf"), 1.0], [2.0], []])
def test_another_loss_ends_it(bench, losses):
    runs = {"first": bench.Run([0.1], [2.0, 1.0]), "other": bench.Run([0.1], losses)}
    with pytest.raises(SystemExit, match="other"):
        bench.compare(runs, "first")


def test_ids_are_renamed_the_same_in_every_batch(bench, job):
    loader = job.loader()
    items = 1 + int(max(loader.catalogue))
    first, again = bench.dealt(loader.batch(0), items, 5), bench.dealt(loader.batch(0), items, 5)
    assert torch.equal(first.negatives, again.negatives)
    batch, names = loader.batch(0), {}
    for old, new in (
        (batch.ids, first.ids),
        (batch.labels, first.labels),
        (batch.negatives, first.negatives),
    ):
        for a, b in zip(old.flatten().tolist(), new.flatten().tolist(), strict=True):
            assert names.setdefault(a, b) == b
    assert len(set(names.values())) == len(names) and any(a != b for a, b in names.items())


@pytest.mark.slow
@pytest.mark.multi_rank
def test_the_benchmark_from_end_to_end(bench, tmp_path):
    if not (ROOT / "out" / "torchrec" / "torchrec").is_dir():
        pytest.skip("not installed: bash ci/benchmarks/torchrec.sh puts TorchRec under out/torchrec")
    command = "--rate 0 --ranks 2 --rounds 1 --steps 6 --batch-size 16 --dim 8 --optimizer rowwise_adagrad"
    data = ["--data", "zipf:users=60,items=80,seed=3", "--json", str(tmp_path / "a.json")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "benchmarks" / "bench_torchrec.py"), *command.split(), *data],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["system"] for row in rows] == [
        system.name for system in bench.systems(4, {"first_use": True})
    ]
    assert all(len(row["losses"]) == 6 for row in rows)
