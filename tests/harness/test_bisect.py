"""Promise: `bisect` names the first step, tensor, key and column at which two runs differ, and no other."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from tritonrec import checkpoint
from tritonrec.checkpoint import CheckpointStream
from tritonrec.harness.bisect import Part, bisect
from tritonrec.harness.cli import app

EMBEDDING = {"embedding": {"tables": {"item": {"dim": 3}}}}


def state(seed=0, rows=500):
    draw = torch.Generator().manual_seed(seed)
    dense = {
        "model/norm.weight": torch.randn(4, 2, generator=draw),
        "optimizers/0/state/norm.weight/exp_avg": torch.randn(4, 2, generator=draw),
        "model/steps": torch.tensor(7),
    }
    keys = torch.randperm(4 * rows, generator=draw)[:rows] - rows
    table = {
        "keys": keys, "rows": torch.randn(rows, 5, generator=draw), "score": torch.arange(rows).int(),
        "recent": torch.arange(rows) % 2 == 0,
    }  # fmt: skip
    return dense, {"item": table}


def save(folder, step=4, of=None, world_size=1, meta=EMBEDDING, **options):
    dense, tables = of or state()
    return checkpoint.save(folder, step, dense, tables, meta, **options)


def test_equal_runs_have_no_difference_whatever_layers_they_come_from(tmp_path):
    dense, tables = state()
    half = {name: values[:200] for name, values in tables["item"].items()}
    rest = {name: values[200:] for name, values in tables["item"].items()}
    base = save(tmp_path / "a", 3, (dense, {"item": half}))
    save(tmp_path / "a", 4, (dense, {"item": rest}), base=base, erased={"item": torch.empty(0).long()})
    save(tmp_path / "b")
    found = bisect(tmp_path / "a", tmp_path / "b")
    assert found.step is None and found.equal == [4] and not found.parts


def test_a_changed_weight_is_named_by_key_and_column(tmp_path):
    dense, tables = state()
    save(tmp_path / "a", 4)
    save(tmp_path / "a", 6)
    save(tmp_path / "b", 4)
    order = tables["item"]["keys"].argsort()
    rows = tables["item"]["rows"]
    changed = order[[100, 7]]
    rows[changed[0], 4] += 1
    before = float(rows[changed[1], 2])
    rows[changed[1], 2] = torch.nextafter(rows[changed[1], 2], torch.tensor(torch.inf))
    after = float(rows[changed[1], 2])
    save(tmp_path / "b", 6, (dense, tables))
    found = bisect(tmp_path / "a", tmp_path / "b")
    assert (found.equal, found.step) == ([4], 6)
    key = int(tables["item"]["keys"][order[7]])
    assert found.parts == [Part("table item", 2, 500, (key, "weight 2"), (before, after), 1)]


def test_the_smallest_key_is_named_whatever_part_it_is_read_in(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.CheckpointStream, "slices_of", lambda stream, table: 16)
    save(tmp_path / "a")
    dense, tables = state()
    tables["item"]["rows"][:, 1] += 1
    save(tmp_path / "b", of=(dense, tables))
    (part,) = bisect(tmp_path / "a", tmp_path / "b").parts
    assert part.place == (int(tables["item"]["keys"].min()), "weight 1")
    assert (part.count, part.of) == (500, 500)


def test_missing_rows_states_and_metadata_are_named(tmp_path):
    save(tmp_path / "a")
    _, tables = state()
    first = tables["item"]["keys"].argmin()
    keep = torch.arange(500) != first
    without = {"item": {name: values[keep] for name, values in tables["item"].items()}}
    save(tmp_path / "b", of=(state()[0], without))
    (part,) = bisect(tmp_path / "a", tmp_path / "b").parts
    key = int(tables["item"]["keys"][first])
    assert part == Part("table item", 1, 500, (key,), ("present", "missing"))
    for column, name in (("rows", "state 1"), ("score", "score"), ("recent", "recent")):
        dense, tables = state()
        values = tables["item"][column]
        index = (first, 4) if column == "rows" else first
        values[index] = ~values[index] if column == "recent" else values[index] + 1
        save(tmp_path / column, of=(dense, tables))
        (part,) = bisect(tmp_path / "a", tmp_path / column).parts
        assert part.place == (key, name) and part.count == 1


@pytest.mark.parametrize("lacks", ["a", "b"])
def test_a_row_that_one_run_alone_has_is_named_whichever_it_is(tmp_path, lacks):
    dense, tables = state()
    fewer = {name: values[1:] for name, values in tables["item"].items()}
    for name in ("a", "b"):
        save(tmp_path / name, of=(dense, {"item": fewer}) if name == lacks else None)
    (part,) = bisect(tmp_path / "a", tmp_path / "b").parts
    assert part.place == (int(tables["item"]["keys"][0]),) and part.count == 1
    assert part.values == (("missing", "present") if lacks == "a" else ("present", "missing"))


def test_world_sizes_are_among_the_settings_that_differ(tmp_path, monkeypatch):
    class OfRanks(CheckpointStream):
        def __init__(self, path, *step):
            super().__init__(path, *step)
            self.world_size = 2 if path.name == "b" else 1

    monkeypatch.setattr(sys.modules[bisect.__module__], "CheckpointStream", OfRanks)
    for name in ("a", "b"):
        save(tmp_path / name)
    assert bisect(tmp_path / "a", tmp_path / "a").settings == {}
    assert bisect(tmp_path / "a", tmp_path / "b").settings == {"world_size": (1, 2)}


def test_dense_tensors_come_before_tables_and_the_model_before_its_optimizer(tmp_path):
    save(tmp_path / "a")
    dense, tables = state()
    dense["optimizers/0/state/norm.weight/exp_avg"][1, 1] = float("nan")
    dense["model/norm.weight"][3, 0] = -0.0
    dense["model/steps"] += 1
    tables["item"]["rows"][0, 0] = 9
    save(tmp_path / "b", of=(dense, tables))
    parts = bisect(tmp_path / "a", tmp_path / "b").parts
    assert [part.name for part in parts] == [
        "dense/model/norm.weight", "dense/model/steps", "dense/optimizers/0/state/norm.weight/exp_avg",
        "table item",
    ]  # fmt: skip
    assert parts[0].place == (3, 0) and parts[1].values == (7, 8) and parts[2].ulps is None


def test_other_shapes_tables_and_values_are_named(tmp_path):
    save(tmp_path / "a", meta={**EMBEDDING, "dense": {"dict": [["lr", 0.1], ["x", {"float": "nan"}]]}})
    dense, tables = state()
    dense["model/norm.weight"] = dense["model/norm.weight"][:3]
    dense["more"] = torch.zeros(2)
    tables["other"] = tables["item"]
    meta = {**EMBEDDING, "dense": {"dict": [["lr", 0.2], ["x", {"float": "nan"}]]}}
    save(tmp_path / "b", of=(dense, tables), meta=meta)
    parts = {part.name: part.values for part in bisect(tmp_path / "a", tmp_path / "b").parts}
    assert parts["dense/model/norm.weight"] == ("torch.float32 (4, 2)", "torch.float32 (3, 2)")
    assert parts["dense/more"] == ("missing", "torch.float32 (2,)")
    assert parts["dense/dict/0/1"] == (0.1, 0.2)
    assert "columns of table other" in parts and len(parts) == 4


def log(path, *values):
    lines = (json.dumps({"step": step, "loss": loss, "seconds": step * 0.1}) for step, loss in values)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_logs_are_compared_without_what_is_measured(tmp_path):
    left = log(tmp_path / "a.jsonl", (1, 0.5), (2, 0.25), (3, 0.1))
    right = log(tmp_path / "b.jsonl", (2, 0.25), (3, 0.1000001), (4, 0.0))
    found = bisect(left, right)
    assert (found.equal, found.step) == ([2], 3)
    assert found.parts == [Part("loss", 1, 1, (), (0.1, 0.1000001))]
    assert bisect(left, log(tmp_path / "c.jsonl", (2, 0.25))).step is None


def test_values_that_one_run_lacks_are_named_and_only_equal_bits_are_equal(tmp_path):
    def values(name, **values):
        (tmp_path / name).write_text(json.dumps({"step": 1, **values}) + "\n")
        return tmp_path / name

    left = values("a", loss=float("nan"), auc=0.5, zero=0.0, only=1)
    right = values("b", loss=float("nan"), auc=float("nan"), zero=-0.0, more=2)
    parts = bisect(left, right).parts
    assert [part.name for part in parts] == ["auc", "zero", "only", "more"]
    assert parts[0].values[0] == 0.5 and str(parts[1].values) == "(0.0, -0.0)"
    assert parts[2].values == (1, "missing") and parts[3].values == ("missing", 2)


def test_nothing_is_compared_behind_the_first_difference(tmp_path):
    left = log(tmp_path / "a.jsonl", (1, 0.5), (2, 0.25), (3, 0.1))
    found = bisect(left, log(tmp_path / "b.jsonl", (1, 0.5), (2, 0.2), (3, 0.1)))
    assert (found.equal, found.step) == ([1], 2)


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["bisect", *map(str, arguments)])


def test_the_command_prints_the_difference_and_its_exit_status(tmp_path):
    config = 'mode = "{}"\n[window]\nmicro_batches = {}\n'
    save(tmp_path / "a", meta={**EMBEDDING, "config": config.format("nestpipe", 4)})
    dense, tables = state()
    save(tmp_path / "b", meta={**EMBEDDING, "config": config.format("nestpipe", 2)})
    equal = invoke(tmp_path / "a", tmp_path / "b")
    assert equal.exit_code == 0, equal.output
    assert equal.output == "equal in every bit: step 4\nother setting: window.micro_batches is 4 and 2\n"
    dense["model/norm.weight"][0, 1] = 1.5
    save(tmp_path / "c", of=(dense, tables))
    found = invoke(tmp_path / "a", tmp_path / "c", "--json", tmp_path / "found.json")
    assert found.exit_code == 1, found.output
    assert (
        "step 4 differs in 1 part:\n  dense/model/norm.weight: 1 of 8 differ; first [0, 1] " in found.output
    )
    assert json.loads((tmp_path / "found.json").read_text())["parts"][0]["place"] == [0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: save(folder / "b", 5), "no step in common: .*a has steps 4, and .*b has steps 5"),
        (lambda folder: log(folder / "b", (1, 0.5)), "must both be directories of checkpoints, or both logs"),
        (lambda folder: (folder / "b").mkdir(), "no step in common: .*a has steps 4, and .*b has none"),
    ],
)
def test_runs_that_cannot_be_compared_are_named(tmp_path, make, message):
    save(tmp_path / "a")
    make(tmp_path)
    with pytest.raises(ValueError, match=message):
        bisect(tmp_path / "a", tmp_path / "b")


def test_a_line_that_is_no_log_is_named(tmp_path):
    left = log(tmp_path / "a", (1, 0.5))
    for text in ("no json", '["step"]', '{"loss": 1}', '{"step": 1.5}', "[" * 100_000, "\xff"):
        (tmp_path / "b").write_bytes(f'{{"step": 1}}\n{text}\n'.encode("latin-1"))
        with pytest.raises(ValueError, match="b:2 is no line of a log"):
            bisect(left, tmp_path / "b")


def test_a_step_that_two_runs_wrote_into_one_log_is_named(tmp_path):
    left = log(tmp_path / "a", (1, 0.5), (2, 0.25))
    right = log(tmp_path / "b", (1, 0.5), (1, 0.75), (2, 0.25))
    with pytest.raises(ValueError, match=r"b:2 has another loss of step 1 than a line before: two runs"):
        bisect(left, right)
    assert bisect(left, log(tmp_path / "c", (1, 0.5), (2, 0.25), (1, 0.5))).equal == [1, 2]
