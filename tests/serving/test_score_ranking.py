"""Promise: `tritonrec score` of a DLRM, with bags or without, and of a GRM writes the bits of the trainer's
model; a killed run goes on to the same bytes, and a setting that the model does not use is refused.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fastapi.testclient import TestClient
from live_parts import until
from served_models import export_dlrm
from test_export_grm import loader, trained_on, with_genres
from test_score_file import digest
from test_server_impressions import samples_of
from typer.testing import CliRunner

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer
from tritonrec.data import KeyedJaggedTensor, Lookup, load_clicks
from tritonrec.harness.cli import app
from tritonrec.harness.verify.jobs import WeightedClickLoader, WeightedClicks
from tritonrec.nn import DLRM, DLRMConfig
from tritonrec.serving import Predictor, export
from tritonrec.serving.score_file import ScoreConfig, score_file
from tritonrec.serving.server.app import create_app
from tritonrec.serving.server.model import Served


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """A model, a table of its rows, and the probabilities of the trainer's."""
    path, source = export_dlrm(tmp_path_factory.mktemp("clicks"))
    batch = source.global_batch(0)
    features = {name: lookup.ids.tolist() for name, lookup in batch.lookups().items()}
    table = pa.table({"row": range(len(batch.labels)), "dense": batch.dense.tolist(), **features})
    return path, table, Predictor.load(path).predict(batch)


@pytest.fixture(scope="module")
def bags(tmp_path_factory):
    """As `clicks`; every second feature has bags of 0 to 3 ids."""
    folder = tmp_path_factory.mktemp("bags")
    source = WeightedClickLoader(load_clicks("criteo:samples=60,scale=0.0001,seed=4"), 16, 0)
    first = source.batch(0)
    names = list(first.lookups())
    torch.manual_seed(5)
    model = DLRM(DLRMConfig(dim=8, dense=first.dense.shape[1], features=tuple(names), bottom=(8,), top=(8,)))
    how = {name: ("sum", "mean", "none")[at % 3] for at, name in enumerate(names)}
    tables = HashTableCollection(
        [FeatureConfig(name, 8, pooling=how[name]) for name in names], RowOptimizer("adam", lr=0.05)
    )

    def plain(batch):
        """Without weights; a feature that is not pooled has one id, how many its bag has."""
        ones = torch.arange(len(batch.labels) + 1)
        found = {
            name: Lookup(each.offsets.diff(), ones) if how[name] == "none" else Lookup(each.ids, each.offsets)
            for name, each in batch.lookups().items()
        }
        kept = KeyedJaggedTensor.from_dict(found)
        return WeightedClicks(batch.step, batch.sample_ids, kept, batch.dense, batch.labels)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with Trainer(model, tables, optimizer, Communicators.local()) as trainer:
        trainer.step(plain(first))
        trainer.save(folder / "run")
        batch = plain(source.batch(1))
        want = model.eval().predict(batch, tables.peek(batch.lookups()))
    export(folder / "run", folder / "out", model)
    assert torch.equal(Predictor.load(folder / "out").predict(batch), want)
    columns = {"row": range(len(want)), "dense": batch.dense.tolist()}
    for name, (ids, offsets) in batch.lookups().items():
        lists = [each.tolist() for each in ids.split(offsets.diff().tolist())]
        columns[name] = ids.tolist() if how[name] == "none" else pa.array(lists, pa.list_(pa.int64()))
    return folder / "out", pa.table(columns), want


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "genres"])
def grm(request, tmp_path_factory):
    """A model, a table of its samples, and the probabilities of the trainer's, by item shown."""
    folder, source = tmp_path_factory.mktemp("grm"), loader(("age", "city"))
    trained = trained_on(folder / "c", source, request.param)
    export(folder / "c", folder / "out", trained.model)
    batch = with_genres(source.batch(0)) if request.param else source.batch(0)
    samples = samples_of(batch)
    columns = {name: [each["context"][name] for each in samples] for name in batch.context}
    event = {
        "item": pa.int64(),
        "timestamp": pa.int64(),
        "genres": pa.list_(pa.int64()),
        "action": pa.int64(),
    }
    for name in ("history", "exposed"):
        columns[name] = pa.array([each[name] for each in samples], pa.list_(pa.struct(event)))
    return folder / "out", pa.table(columns), Predictor.load(folder / "out").predict(batch)


NO_NUMBERS, NO_BAG = (pa.array([None], pa.list_(kind)) for kind in (pa.float32(), pa.int64()))
SMALL = ScoreConfig(batch=3, part=4)
SHOWN = ScoreConfig(batch=3, part=4, candidates="exposed")


def scored(model, table, folder, config):
    pq.write_table(table, folder / "in.parquet", row_group_size=3)
    assert score_file(folder / "in.parquet", folder / "out.parquet", Predictor.load(model), config) == len(
        table
    )
    return pq.read_table(folder / "out.parquet")


def float32(values):
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.if_changed
@pytest.mark.parametrize("kind", ["clicks", "bags"])
def test_a_click_models_probabilities(kind, tmp_path, request):
    model, table, want = request.getfixturevalue(kind)
    found = scored(model, table, tmp_path, SMALL)
    lists = [name for name in table.column_names if pa.types.is_list(table.schema.field(name).type)]
    assert found.column_names == [*(n for n in table.column_names if n not in lists), "probability"]
    assert torch.equal(float32(found["probability"].to_pylist()), want)
    assert found["row"].to_pylist() == table["row"].to_pylist()


@pytest.mark.if_changed
def test_a_grms_probabilities_are_a_column_for_each_task(grm, tmp_path):
    model, table, want = grm
    found = scored(model, table, tmp_path, SHOWN)
    tasks = Predictor.load(model).manifest["dense"]["tasks"]
    assert found.column_names == ["age", "city", "user_id", *tasks] and len(tasks) > 1
    for at, task in enumerate(tasks):
        lists = found[task].to_pylist()
        assert [*map(len, lists)] == [*map(len, table["exposed"].to_pylist())]
        assert torch.equal(float32([each for own in lists for each in own]), want[:, at])


@pytest.mark.if_changed
def test_a_server_answers_for_bags(bags):
    model, table, want = bags
    names = Predictor.load(model).manifest["dense"]["features"]
    with TestClient(
        create_app(lambda: Served(lambda: Predictor.load(model))), base_url="http://localhost"
    ) as there:
        columns = {name: table[name].to_pylist() for name in names}
        body = {"dense": table["dense"].to_pylist(), "features": columns}
        answer = there.post("/predict", json=body).json()
        assert torch.equal(float32(answer["probabilities"]), want), answer
        wrong = body | {"features": columns | {names[0]: [1] * len(want)}}
        assert "is pooled: give a bag" in there.post("/predict", json=wrong).json()["error"]["message"]


@pytest.mark.if_changed
@pytest.mark.parametrize("kind", ["clicks", "bags"])
def test_a_killed_run_of_clicks_goes_on(kind, tmp_path, request, monkeypatch):
    check_killed(*request.getfixturevalue(kind)[:2], SMALL, tmp_path, monkeypatch)


@pytest.mark.if_changed
def test_a_killed_run_of_impressions_goes_on(grm, tmp_path, monkeypatch):
    check_killed(*grm[:2], SHOWN, tmp_path, monkeypatch)


def check_killed(model, table, config, tmp_path, monkeypatch):
    """The same bytes, and the part before is not computed again."""
    predict, calls, last = Predictor.predict, [], [0]

    def dies(self, *given):
        calls.append(1)
        if len(calls) == last[0]:
            raise KeyboardInterrupt
        return predict(self, *given)

    monkeypatch.setattr(Predictor, "predict", dies)
    scored(model, table, tmp_path, config)
    out, count = tmp_path / "out.parquet", len(calls)
    whole = digest(out)
    out.unlink()
    calls.clear()
    last[0] = 3  # two batches a part
    with pytest.raises(KeyboardInterrupt):
        scored(model, table, tmp_path, config)
    assert not out.exists() and len([*tmp_path.glob(".out.parquet.parts/*.parquet")]) == 1
    calls.clear()
    last[0] = 0
    score_file(tmp_path / "in.parquet", out, Predictor.load(model), config)
    assert digest(out) == whole and len(calls) == count - 2


@pytest.mark.if_changed
def test_a_process_that_is_killed_goes_on_with_the_same_bytes(clicks, tmp_path):
    model, table, _ = clicks
    table = pa.concat_tables([table] * 30)
    pq.write_table(table, source := tmp_path / "in.parquet")
    config = ScoreConfig(batch=1, part=8)
    score_file(source, tmp_path / "whole.parquet", Predictor.load(model), config)
    out, root = tmp_path / "out.parquet", str(Path(__file__).resolve().parents[2])
    words = ["-m", "tritonrec", "score", source, out, "--model", model, "--batch", "1", "--part", "8"]
    command = subprocess.Popen([sys.executable, *map(str, words)], env={**os.environ, "PYTHONPATH": root})
    parts = tmp_path / ".out.parquet.parts"
    try:
        until(lambda: len([*parts.glob("*.parquet")]) > 3, 240)
    finally:
        os.kill(command.pid, signal.SIGKILL)
        command.wait()
    kept = {each: each.stat().st_mtime_ns for each in parts.glob("*.parquet")}
    assert kept and not out.exists()
    anew = []
    score_file(
        source,
        out,
        Predictor.load(model),
        config,
        lambda *_: anew.append(
            all(each.stat().st_mtime_ns == at for each, at in kept.items() if each.exists())
        ),
    )
    assert all(anew) and digest(out) == digest(tmp_path / "whole.parquet")


@pytest.mark.if_changed
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "changed", "options", "says"),
    [
        ("clicks", {}, ["--dense", "numbers"], "has no column 'numbers'"),
        ("clicks", {"dense": None}, [], "has no column 'dense'"),
        ("clicks", {"dense": [[1.0]]}, [], "row 0: column 'dense' must have 13 numbers in each row"),
        ("clicks", {"dense": [[None] * 13]}, [], "row 0: column 'dense' must have 13 numbers"),
        ("clicks", {"dense": [[float("nan")] * 13]}, [], "row 0: column 'dense' must have finite float32"),
        ("clicks", {"dense": [["a"] * 13]}, [], "row 0: column 'dense' must have 13 numbers"),
        (
            "clicks",
            {"dense": pa.array([None], pa.list_(pa.float32()))},
            [],
            "row 0: column 'dense' has no list",
        ),
        ("clicks", {"C1": [None]}, [], "row 0: "),
        ("clicks", {"C1": [[1]]}, [], "column 'C1' of"),
        ("clicks", {"probability": [1.0]}, [], "has a column 'probability' already"),
        ("bags", {"C1": [1]}, [], "give a list for each row"),
        ("bags", {"C1": NO_BAG}, [], "row 0: column 'C1' has no list here"),
        ("bags", {"C1": [[1, None]]}, [], "row 0: "),
    ],
)
def test_what_cannot_be_scored_is_named(request, tmp_path, kind, changed, options, says):
    model, table, _ = request.getfixturevalue(kind)
    columns = {name: table[name].slice(0, 1) for name in table.column_names} | changed
    pq.write_table(pa.table({n: c for n, c in columns.items() if c is not None}), tmp_path / "in.parquet")
    refused(model, tmp_path, options, says)


@pytest.mark.if_changed
def test_what_is_wrong_with_impressions_is_named(grm, tmp_path):
    model, table, _ = grm
    first = table.slice(0, 1).to_pylist()[0]
    event = {"item": 1, "timestamp": 2, "genres": [], "action": 1}
    for changed, options, says in [
        ({}, [], "name their column as candidates"),
        ({}, ["--candidates", "exposed", "--k", "3"], "k has no meaning with a model of impressions"),
        ({"exposed": [1]}, ["--candidates", "exposed"], "lists of int64, and no 'item': give structs"),
        (
            {"history": [{"item": 1, "timestamp": 2, "genres": []}]},
            ["--candidates", "exposed"],
            "no 'action'",
        ),
        ({"history": [event | {"action": None}]}, ["--candidates", "exposed"], "has an event without"),
        ({"history": [event] * 99}, ["--candidates", "exposed"], "tokens, the model takes"),
        ({"age": None}, ["--candidates", "exposed"], "row 0: "),
        ({}, ["--candidates", "shown"], "has no column 'shown'"),
    ]:
        pq.write_table(pa.Table.from_pylist([first | changed]), tmp_path / "in.parquet")
        refused(model, tmp_path, options, says)


def refused(model, folder, options, says):
    words = [
        "score",
        str(folder / "in.parquet"),
        str(folder / "out.parquet"),
        "--model",
        str(model),
        *options,
    ]
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, words)
    assert result.exit_code == 2 and says in " ".join(result.output.split()), (says, result.output)
    assert not (folder / "out.parquet").exists()
