"""Promise: rows in 8 bits are at most half a step off, the same wherever they are read, and named as such."""

import json
import random
import re
from importlib import import_module

import pytest
import torch
from test_exporter import DIM, columns_of, loader, next_item
from typer.testing import CliRunner

from tritonrec.harness import cli
from tritonrec.harness.job import Job
from tritonrec.harness.train.evaluate import evaluate_export, evaluate_model
from tritonrec.pipeline import RowsOfRanks
from tritonrec.serving import ExportedTable, Predictor, export
from tritonrec.serving.exported_table import decoded, encoded


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "400"}).invoke(cli.app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return next_item(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    for weights in ("float32", "int8"):
        export(trained.folder, folder / weights, trained.model, weights=weights, shard_rows=7)
    return folder


def drawn(rows, dim, spread):
    draw = torch.Generator().manual_seed(rows * dim)
    return torch.randn(rows, dim, generator=draw) * 10.0 ** torch.randint(-spread, spread + 1, (rows, 1))


@pytest.mark.parametrize(("rows", "dim", "spread"), [(0, 3, 0), (1, 1, 0), (257, 5, 12), (1000, 64, 3)])
def test_a_weight_is_at_most_half_a_step_off(rows, dim, spread):
    weights = drawn(rows, dim, spread)
    columns = encoded(weights)
    found = decoded(columns["weights"], columns["least"], columns["step"])
    assert columns["weights"].dtype == torch.uint8 and columns["step"].shape == (rows,)
    # sums of float32 round once more, by the largest number in them
    slack = 2e-7 * weights.abs().amax(1, keepdim=True) if rows else 0.0
    assert bool(((found - weights).abs() <= columns["step"][:, None] * 0.5 + slack).all())
    if rows:
        ends = columns["weights"].amin(1), columns["weights"].amax(1)
        assert bool((ends[0] == 0).all()) and bool(((ends[1] == 255) | (columns["step"] == 0)).all())


def test_a_constant_row_is_exact():
    weights = torch.tensor([[0.1, 0.1, 0.1], [0.0, 0.0, 0.0], [-3e30, -3e30, -3e30], [1e-45, 0.0, 0.0]])
    columns = encoded(weights)
    found = decoded(columns["weights"], columns["least"], columns["step"])
    assert torch.equal(found[:3], weights[:3]) and found[3].isfinite().all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_row_that_8_bits_do_not_hold_is_named(wrong):
    weights = torch.zeros(4, 3)
    weights[2] = torch.tensor([-3e38, 0.0, wrong])
    with pytest.raises(ValueError, match="row 2 has weights from"):
        encoded(weights)


@pytest.mark.if_changed
def test_a_table_reads_alike_by_id_and_whole_in_a_quarter_of_the_memory(exported):
    table, exact = (Predictor.load(exported / each).tables["item"] for each in ("int8", "float32"))
    assert torch.equal(table.ids, exact.ids) and table.weights.dtype == torch.uint8
    unknown = torch.tensor([10**15, -7])
    ids = torch.cat([table.ids.flip(0), unknown, table.ids[3:5]])
    rows = table.rows(ids)
    assert torch.equal(rows[: len(table.ids)], table.whole.flip(0)) and torch.equal(
        rows[-2:], table.whole[3:5]
    )
    assert torch.equal(
        rows[len(table.ids) :][:2], exact.rows(unknown)
    )  # as initialised, which takes no memory
    off = (table.whole - exact.whole).abs()
    assert off.max() > 0 and bool((off <= 0.5001 * table.step[:, None]).all())


def test_other_tools_read_codes_least_and_step(exported):
    found = columns_of(exported / "int8")
    order = found["ids"].argsort()
    table = Predictor.load(exported / "int8").tables["item"]
    least, step = (found[name][order].to(torch.float32) for name in ("least", "step"))
    codes = found["weights"][order]
    assert codes.shape[1] == DIM and torch.equal(least[:, None] + codes.float() * step[:, None], table.whole)


def test_a_predictor_ranks_by_the_rounded_rows(trained, exported):
    rounded, exact = (Predictor.load(exported / each) for each in ("int8", "float32"))
    history = [[3, 1, 2], [5]]
    ids, scores = rounded.retrieve(history, 4)
    for user in range(2):
        assert torch.equal(scores[user], rounded.scores(history, ids[user])[user])
    assert torch.equal(rounded.scores(history)[:, 2], rounded.scores(history, rounded.item_ids[2:3])[:, 0])
    assert not torch.equal(rounded.scores(history), exact.scores(history))
    torch.testing.assert_close(rounded.scores(history), exact.scores(history), rtol=0.05, atol=0.05)
    found = evaluate_export(exact, loader())
    assert found == evaluate_model(trained.evaluated, RowsOfRanks(trained.tables), loader())


@pytest.mark.parametrize("weights", ["int4", 8, None])
def test_other_words_are_refused(trained, tmp_path, weights):
    with pytest.raises(ValueError, match="weights must be one of float32, int8"):
        export(trained.folder, tmp_path / "out", weights=weights)
    assert not (tmp_path / "out").exists()


def test_a_manifest_that_calls_codes_float32_is_refused(exported, tmp_path):
    from tritonrec.checkpoint.manifest import add_checksum

    body = json.loads((exported / "int8" / "manifest.json").read_text())
    for file in (exported / "int8").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    del body["manifest_sha256"]
    for weights, message in ((None, "the manifest describes"), ("int3", "weights is 'int3'")):
        body["tables"]["item"].pop("weights", None)
        body["tables"]["item"] |= {} if weights is None else {"weights": weights}
        (tmp_path / "manifest.json").write_text(json.dumps(add_checksum(body)))
        with pytest.raises(ValueError, match=message):
            Predictor.load(tmp_path)


def test_a_table_made_by_hand_has_float32_rows():
    table = ExportedTable(torch.arange(3), torch.eye(3), 1, 2, 0.1, "zeros")
    assert table.whole is table.weights and torch.equal(
        table.rows(torch.tensor([2, 7])), torch.eye(3)[[2]].new_tensor([[0, 0, 1], [0, 0, 0]])
    )


@pytest.mark.if_changed
def test_the_command_prints_what_rounding_costs_or_why_it_does_not(tmp_path, monkeypatch):
    log, run = tmp_path / "log.csv", tmp_path / "run"
    draw = random.Random(3)
    events = [f"u{user},item {draw.randrange(30)},{day}" for user in range(40) for day in range(8)]
    log.write_text("\n".join(["user,item,timestamp", *events]) + "\n")
    words = ["train", "--data", f"csv:{log}?ids=words", "--dim", "8", "--heads", "2", "--steps", "3"]
    assert invoke(*words, "--checkpoint", run).exit_code == 0
    steps, command = [], import_module("tritonrec.harness.cli.export")
    monkeypatch.setattr(command, "export_to", lambda *a, **k: steps.append(k["step"]) or export(*a, **k))
    out = tmp_path / "out"
    told = " ".join(invoke("export", run, out, "--step", "3", "--weights", "int8").output.split())
    assert steps == [3, 3]  # rows in float32, beside them, are of the same step
    found = dict(re.findall(r"((?:HR|NDCG)@\d+) \d\.\d{4} \(([+-]0\.\d{4})\)", told))
    assert found.keys() == {"HR@10", "NDCG@10", "HR@50", "NDCG@50"}, told
    rounded, exact = Predictor.load(tmp_path / "out"), tmp_path / "exact"

    def epochs(job):
        raise ValueError("the log is not here")

    monkeypatch.setattr(Job, "epochs", epochs)
    told = invoke("export", run, exact, "--weights", "int8")
    assert told.exit_code == 0 and "what int8 costs was not measured: the log is not here" in told.output
    assert torch.equal(Predictor.load(exact).tables["item"].whole, rounded.tables["item"].whole)
