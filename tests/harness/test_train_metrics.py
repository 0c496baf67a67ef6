"""Promise: a click model's run logs metrics of its training, alike at any world size and after a restart."""

import json
from dataclasses import replace

import pytest

from tritonrec.distributed import Communicators
from tritonrec.harness.train import streaming
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import WindowConfig

KINDS = [f"{p}_{k}" for p in ("lifetime", "window") for k in ("ne", "logloss", "calibration", "ctr")]


@pytest.fixture
def run(job, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "EVERY", 3)
    job = replace(job, model="dlrm", data="criteo:samples=300,scale=0.001", batch_size=16)
    return Run(job, "nestpipe", WindowConfig(2), steps=8, json_lines=tmp_path / "log.jsonl")


def logged(path):
    """By step the metrics of training."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {
        row["step"]: {n: v for n, v in row.items() if n.startswith(("lifetime", "window"))} for row in rows
    }
    return {step: values for step, values in found.items() if values}


@pytest.mark.if_changed
def test_a_click_model_logs_them_at_any_world_size_and_after_a_restart(run, tmp_path):
    train(Communicators.local(), run, quiet=True)
    alone = logged(run.json_lines)
    assert list(alone) == [3, 6] and set(alone[6]) == {*KINDS, "window_auc"}
    two = replace(run, json_lines=tmp_path / "two.jsonl")
    run_ranks(2, lambda each: train(each, two, quiet=True))
    assert logged(two.json_lines) == alone

    again = replace(run, json_lines=tmp_path / "again.jsonl", checkpoint=tmp_path / "saved", steps=5)
    train(Communicators.local(), again, quiet=True)
    run_ranks(2, lambda each: train(each, replace(again, steps=8, resume=True), quiet=True))
    after = logged(again.json_lines)
    assert after == {3: alone[3], 6: {name: alone[6][name] for name in KINDS}}  # AUC has not its window yet


@pytest.mark.if_changed
def test_each_task_of_impressions_has_its_own(run, tmp_path):
    log = tmp_path / "log.csv"
    lines = ["user,item,timestamp,rating"]
    lines += [f"{n % 9},{n * 7 % 23},{n},{1 + n * n % 5}" for n in range(200)]
    log.write_text("\n".join(lines))
    job = replace(run.job, data=f"csv:{log}", model="grm", max_exposed=3, batch_size=4)
    train(Communicators.local(), replace(run, job=job), quiet=True)
    values = logged(run.json_lines)[6]
    names = {
        f"{name}/{task}" for name in [*KINDS, "window_auc", "window_gauc"] for task in ("click", "conversion")
    }
    assert set(values) == names


def test_a_next_item_model_has_none(run):
    job = replace(run.job, model="hstu", data="zipf:users=40,items=60,seed=3")
    train(Communicators.local(), replace(run, job=job), quiet=True)
    assert logged(run.json_lines) == {}
