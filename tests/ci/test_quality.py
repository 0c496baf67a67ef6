"""Promise: quality is measured on the split that the page names, and the pages show what was measured."""

import contextlib
import io
import json
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from tritonrec.data import NextItemLoader, evaluate

ROOT = Path(__file__).resolve().parents[2]
DATA = "zipf:users=30,items=60,seed=2"


@pytest.fixture
def quality(monkeypatch):
    module = import_module("quality")
    monkeypatch.setattr(module, "EPOCHS", 1)
    monkeypatch.setattr(module, "EVERY", 1)
    return module


def test_each_users_last_item_is_kept_for_the_test(quality):
    split = quality.Split.of(DATA)
    whole, training = split.whole.sequences, split.training.sequences
    assert np.array_equal(training.lengths, whole.lengths[whole.lengths > 1] - 1)
    for user, start, end in zip(whole.user_ids, whole.offsets[:-1], whole.offsets[1:] - 1, strict=True):
        place = np.flatnonzero(training.user_ids == user)
        if end > start:
            first, last = training.offsets[place[0]], training.offsets[place[0] + 1]
            assert np.array_equal(training.items[first:last], whole.items[start:end])


@pytest.mark.if_changed
@pytest.mark.parametrize("system", ["sasrec", "hstu"])
def test_ours_are_scored_on_the_validation_and_the_test(quality, system):
    row = quality.train(quality.Setting(system, 3e-3, 0.2, 1), quality.Split.of(DATA))
    assert row["epoch"] == 1 and 0 < row["valid"] < 1 and 0 < row["test"] < 1


def test_recboles_model_gets_the_same_batches(quality):
    pytest.importorskip("recbole", reason="not installed: the head of ci/benchmarks/quality.py says how")
    split = quality.Split.of(DATA)
    loader = NextItemLoader(split.training, 8, 50, 1, seed=1)
    items = torch.from_numpy(np.unique(split.whole.item))
    (score,) = quality.recbole(quality.Setting("recbole", 3e-3, 0.5, 1), loader, items)
    assert 0 < evaluate(partial(score, catalogue=loader.catalogue), loader, (10,))["NDCG@10"] < 1


@pytest.mark.parametrize(
    ("name", "page", "file"),
    [("quality", "models", "quality"), ("beside_torchrec", "training", "torchrec_sasrec")],
)
def test_the_page_has_the_tables_of_the_file(name, page, file):
    found = json.loads((ROOT / "ci" / "baselines" / f"{file}.json").read_text())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        import_module(name).report(found["rows"] if name == "quality" else found)
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for line in printed.getvalue().splitlines():
        assert line in text, line
