"""Promise: the recipes learn what there is to learn, and give the same bits however a batch is cut."""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tritonrec.data import load_clicks

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
RATINGS = "zipf:users=150,items=60,ratings=1,seed=2"


def example(name):
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.if_changed
def test_dlrm_comes_near_the_best_that_its_log_allows(tmp_path):
    dlrm = example("dlrm")
    best = dlrm.write_log(tmp_path / "clicks.tsv", 12_000)
    log = load_clicks(f"criteo-tsv:{tmp_path}/clicks.tsv")
    found, epochs = dlrm.train(log, 4, 1, tmp_path / "checkpoints")
    ours = dlrm.measured(found.probabilities, found.labels)
    possible = dlrm.measured(best[found.sample_ids], found.labels)
    assert len(found.labels) == 1200 and possible["ne"] < ours["ne"] < 0.85
    assert possible["auc"] - 0.06 < ours["auc"] and 0.85 < ours["calibration"] < 1.15
    # validation likes an epoch before the last one best, and the test is of that one
    entropies = [epoch["ne"] for epoch in epochs]
    assert np.argmin(entropies) == len(epochs) - 2
    again, _ = dlrm.train(log, len(epochs) - 1, 1, tmp_path / "again", "reference", 1)
    assert torch.equal(again.probabilities, found.probabilities)


def test_calibration_by_tenths_sees_what_the_mean_does_not():
    dlrm = example("dlrm")
    labels = torch.tensor([0] * 50 + [1] * 50)
    flat = torch.linspace(0.49, 0.51, 100, dtype=torch.float64)
    assert abs(dlrm.measured(flat, labels)["calibration"] - 1) < 1e-9
    groups = list(dlrm.calibration_by_tenths(flat, labels))
    assert len(groups) == 10 and groups[0][1] == 0 and groups[-1][1] == 1
    assert all(abs(predicted - 0.5) < 0.02 for predicted, _ in groups)


@pytest.mark.if_changed
@pytest.mark.parametrize("experts", [1, 3])
def test_tasks_are_learned_together_in_the_same_bits_for_any_cut(experts):
    multi_task = example("multi_task")
    log = multi_task.Log(RATINGS)

    def trained(mode, micro_batches):
        torch.manual_seed(0)
        return multi_task.train(multi_task.MultiTask(log, experts), log, 3, mode, micro_batches)

    found = trained("nestpipe", 4)
    assert found == trained("reference", 1)
    assert found.keys() == {"liked", "loved"} and min(found.values()) > 0.6


def test_a_task_alone_is_the_one_that_it_names(capsys):
    multi_task = example("multi_task")
    multi_task.main(RATINGS, 1)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-4:-1:2] for line in lines[:2]] == [["liked", "loved"]] * 2
    assert [(line[0], line[-2]) for line in lines[2:]] == [("liked", "liked"), ("loved", "loved")]
    log = multi_task.Log(RATINGS)
    batch, model = log.batch(0, torch.arange(64)), multi_task.MultiTask(log, 1, [1])
    rows = {name: torch.randn(64, multi_task.DIM) for name in log.features}
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(
        model.logits(batch, rows)[:, 0], batch.labels[:, 1].float(), reduction="none"
    )
    torch.testing.assert_close(model(batch, rows, 0), wanted)


@pytest.mark.if_changed
@pytest.mark.parametrize("name", ["gru4rec", "bert4rec"])
def test_next_items_are_learned_in_the_same_bits_for_any_cut(name, capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # of which one imports the other's loop
    module = example(name)
    data, loop = "zipf:users=60,items=90,communities=6,affinity=1,seed=2", example("gru4rec").main
    found = loop(data, 4, 9, make=module.model_of)
    assert found == loop(data, 4, 9, "reference", 1, make=module.model_of)
    assert found["NDCG@10"] > 0.25  # the most popular items for all have 0.16
    assert capsys.readouterr().out.count("epoch 4: loss") == 2


def test_bert4rec_sees_both_sides_in_training_and_never_what_comes_next(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    bert4rec = example("bert4rec")
    torch.manual_seed(0)
    model = bert4rec.model_of().eval()
    batch = SimpleNamespace(offsets=torch.tensor([0, 4, 6]))
    rows = torch.randn(6, bert4rec.DIM)

    def changed(at):
        other = rows.clone()
        other[at] += 1
        return (model.encode(batch, other) != model.encode(batch, rows)).any(1).tolist()

    assert changed(3) == [True] * 4 + [False] * 2  # the last known item, of all positions of its user
    assert changed(0) == [False] * 6 and changed(4) == [False] * 6  # a user's first item has no place


@pytest.mark.if_changed
def test_the_notebook_runs_and_prints_what_it_shows():
    import nbclient as client
    import nbformat

    shown = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    again = nbformat.from_dict(json.loads(json.dumps(shown)))
    for cell in again.cells:
        cell.pop("outputs", None) and cell.update(outputs=[])
    client.NotebookClient(again, timeout=240, kernel_name="python3").execute(cwd=str(EXAMPLES))

    def printed(notebook):
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        return ["".join(o.text for o in cell.outputs if o.get("name") == "stdout") for cell in cells]

    assert printed(again) == printed(shown) and len(printed(shown)) >= 6


def test_the_page_of_what_is_around_counts_the_lines_of_what_it_names():
    page = EXAMPLES.parent / "ecosystem.md"
    found = re.findall(r"\[(\d+)\]\(([^)]+)\)", page.read_text())
    assert len(found) >= 20
    for lines, name in found:
        assert int(lines) == (page.parent / name).read_text().count("\n") <= 200, name
