"""Promise: a log of words trains, goes on with the next day's words, and is exported and asked in words."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv

from tritonrec.data import ClickStream
from tritonrec.distributed import Communicators
from tritonrec.harness.job import Job
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run, StoppingRule
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import WindowConfig, saved_vocabularies
from tritonrec.serving import Predictor, export

pytestmark = pytest.mark.if_changed

SIZES = HSTUConfig(dim=8, layers=1, heads=2, qk_dim=4, v_dim=4, max_seq_len=6)


def write_day(path, seed, items):
    rng = np.random.default_rng(seed)
    lines = ["user,item,timestamp,rating"]
    for time in range(240):
        lines.append(
            f"U{rng.integers(30)},B{rng.integers(items):03}X,{1_600_000_000 + time},{rng.integers(1, 6)}"
        )
    path.write_text("\n".join(lines) + "\n")
    return f"{path}?ids=words"


@pytest.fixture
def days(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    return write_day(tmp_path / "day1.csv", 1, 40), write_day(tmp_path / "day2.csv", 2, 70)


def run_of(data, checkpoint, **job):
    job = Job(data, batch_size=8, max_seq_len=6, num_negatives=3, sizes=SIZES, **job)
    return Run(job, "fwp", WindowConfig(2), steps=6, checkpoint=checkpoint)


@pytest.mark.parametrize("stream", [True, False])
def test_the_next_day_goes_on_with_the_words_of_the_first(days, tmp_path, stream):
    first = run_of(days[0], tmp_path / "run", stream=stream)
    train(Communicators.local(), first, quiet=True)
    words = saved_vocabularies(tmp_path / "run")
    assert words.keys() == {"user", "item"} and len(words["item"]) == 40
    second = replace(first, job=replace(first.job, data=days[1]), resume=True, steps=12)
    with pytest.raises(ValueError, match=r"made with other settings: .*data .*day1.csv"):
        train(Communicators.local(), second, quiet=True)
    train(Communicators.local(), replace(second, new_data=True), quiet=True)
    later = saved_vocabularies(tmp_path / "run")
    assert later["item"].words.to_pylist()[:40] == words["item"].words.to_pylist()
    assert len(later["item"]) > 60
    whole = replace(first, job=replace(first.job, data=days[1]), resume=True, steps=15)
    train(Communicators.local(), whole, quiet=True)  # the same log again
    assert saved_vocabularies(tmp_path / "run") == later
    export(tmp_path / "run", tmp_path / "out", first.job.build("adam")[0])
    predictor = Predictor.load(tmp_path / "out")
    assert predictor.vocabularies == later
    found, _ = predictor.retrieve([["B003X", "B061X"], ["B001X"]], 4)
    assert {len(each) for each in found} == {4} and all(word[0] == "B" for word in found[0])
    assert not {"B003X", "B061X"} & {*found[0]}


@pytest.mark.parametrize("stream", [True, False])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(days, tmp_path, stream):
    whole = run_of(days[0], None, stream=stream)
    part = replace(whole, checkpoint=tmp_path / "run", steps=2)
    train(Communicators.local(), part, quiet=True)
    again = train(Communicators.local(), replace(part, steps=6, resume=True), quiet=True)
    assert again["digest"] == train(Communicators.local(), whole, quiet=True)["digest"]


def test_streamed_and_whole_the_words_have_the_same_ids_and_train_the_same(days, tmp_path):
    digests = []
    for stream in (True, False):
        run = run_of(
            days[0], tmp_path / str(stream), stream=stream, model="grm", max_exposed=3, context_dim=4
        )
        train(Communicators.local(), run, quiet=True)
        digests.append(saved_vocabularies(run.checkpoint))
    assert digests[0] == digests[1]


def test_clicks_of_rated_words_train_and_keep_their_words(days, tmp_path):
    run = run_of(days[0], tmp_path / "run", model="dlrm", bottom=(4,), top=(4,))
    summary = train(Communicators.local(), run, quiet=True)
    assert summary["metrics"]["AUC"] > 0
    assert len(saved_vocabularies(tmp_path / "run")["item"]) == 40
    export(tmp_path / "run", tmp_path / "out", run.job.build("adam")[0])
    predictor = Predictor.load(tmp_path / "out")
    words = {"item": ["B003X", "B001X"], "user": ["U4", "U5"]}
    ids = {name: torch.from_numpy(predictor.vocabularies[name].encode(each)) for name, each in words.items()}
    dense = torch.zeros(2, 2)
    assert torch.equal(predictor.predict(dense, words), predictor.predict(dense, ids))
    with pytest.raises(ValueError, match="'no such' in row 1"):
        predictor.predict(dense, {**words, "user": ["U4", "no such"]})


def write_clicks(path, seed, sites):
    """Text, or Parquet by the path's suffix; a category's name is no name of a file."""
    rng = np.random.default_rng(seed)
    columns = {
        "clicked": rng.integers(2, size=200),
        "age": rng.random(200).round(3),
        "site/page": [f"s{n}" for n in rng.integers(sites, size=200)],
        "device": [f"d{n}" for n in rng.integers(5, size=200)],
    }
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path, row_group_size=20)
    else:
        csv.write_csv(pa.table(columns), path)
    return f"{path}?label=clicked&dense=age&categories=site/page,device&ids=words"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_streamed_clicks_of_words_go_on_with_the_next_day(days, tmp_path, suffix):
    data = [write_clicks(tmp_path / f"{day}.{suffix}", day, 20 + 20 * day) for day in (1, 2)]
    first = run_of(data[0], tmp_path / "run", model="dlrm", bottom=(4,), top=(4,))
    assert isinstance(first.job.loader(), ClickStream)
    train(Communicators.local(), first, quiet=True)
    words = saved_vocabularies(tmp_path / "run")
    assert words == replace(first.job, stream=False).vocabularies()
    assert words.keys() == {"site/page", "device"}
    second = replace(first, job=replace(first.job, data=data[1]), resume=True, steps=12, new_data=True)
    train(Communicators.local(), second, quiet=True)
    later = saved_vocabularies(tmp_path / "run")
    later["site/page"].check_extends(words["site/page"])
    assert len(later["site/page"]) > len(words["site/page"])
    again = replace(second.job, words=str(tmp_path / "run"))
    assert rows_of(again.loader()) == rows_of(replace(again, stream=False).loader())


def rows_of(loader):
    batches = [loader.global_batch(step) for step in range(loader.steps_per_epoch)]
    ids = torch.cat([torch.stack([each.ids for each in batch.lookups().values()], 1) for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    return sorted(zip(ids.tolist(), labels.tolist(), strict=True))


def test_a_log_that_has_changed_is_not_gone_on_with(days, tmp_path):
    run = run_of(days[0], tmp_path / "run", stream=False)
    train(Communicators.local(), run, quiet=True)
    write_day(tmp_path / "day1.csv", 3, 60)
    again = replace(run, resume=True, steps=9)
    with pytest.raises(ValueError, match="the position is one of a loader with data"):
        train(Communicators.local(), again, quiet=True)
    train(Communicators.local(), replace(again, new_data=True), quiet=True)


@pytest.mark.parametrize("model", ["hstu", "dlrm", "grm"])
def test_early_stopping_goes_by_validation_and_the_last_figure_by_test(days, tmp_path, model, capsys):
    log = tmp_path / "log.jsonl"
    sizes = {"bottom": (4,), "top": (4,), "max_exposed": 3, "context_dim": 4}
    run = run_of(days[0], None, model=model, stream=False, **sizes)
    metric = {"hstu": "NDCG@10", "dlrm": "AUC", "grm": "AUC/click"}[model]
    run = replace(run, evaluate_every=3, early_stopping=StoppingRule(metric, 3), json_lines=log)
    summary = train(Communicators.local(), run)
    assert summary["validation"].keys() == summary["metrics"].keys()
    assert summary["validation"] != summary["metrics"]
    assert summary["early_stopping"]["best"] in [
        pytest.approx(value) for value in validated(log, f"validation/{metric}")
    ]
    assert "early stopping goes by validation" in capsys.readouterr().out
    parted = replace(run, early_stopping=None, json_lines=None)
    parted = replace(parted, job=replace(run.job, split="leave-one-out:validation"))
    assert train(Communicators.local(), parted, quiet=True)["digest"] == summary["digest"]
    whole = replace(parted, job=replace(run.job, split="leave-one-out"))
    plain = train(Communicators.local(), whole, quiet=True)
    assert plain["digest"] != summary["digest"] and "validation" not in plain


def validated(log, name):
    import json

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row[name] for row in rows if name in row]
