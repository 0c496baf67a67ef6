"""Promise: the Python and TOML of docs/training.md on logging, stopping and config files works as pasted."""

import csv
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tritonrec.harness.cli.train import RUN
from tritonrec.harness.train.config import read_config
from tritonrec.harness.train.run import StoppingRule

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def blocks(language, first, last):
    section = PAGE[PAGE.index(f"\n## {first}\n") : PAGE.index(f"\n## {last}\n")]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def test_the_loop(tmp_path, monkeypatch):
    sent = []
    run = SimpleNamespace(log=lambda values, step: sent.append((values, step)), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project: run))
    mlflow = SimpleNamespace(start_run=lambda: None, end_run=lambda: None, log_metrics=run.log)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks("python", "Logging", "Config files"):
        exec(block, names)
    with open("metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 9)]
    assert {float(row["lr"]) for row in rows} == {3e-3}
    assert sent == [(names["values"], 8)] * 2 and "tokens_per_second" in names["values"]
    stopping, end = names["stopping"], names["steps"].stop
    assert stopping.step == end and names["trainer"].next_step == end
    saved = []
    names["trainer"].load("checkpoints", saved.append)
    assert saved == [{"early_stopping": stopping.state_dict()}]


@pytest.mark.slow
def test_the_file(tmp_path):
    (text,) = blocks("toml", "Config files", "While windows are in flight")
    (tmp_path / "run.toml").write_text(text)
    run = read_config(tmp_path / "run.toml", RUN)
    assert run.early_stopping == StoppingRule("NDCG@10", 3) and run.job.policy.eviction.capacity == 1000
