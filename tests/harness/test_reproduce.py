"""Promise: a figure of a text is found by its name, made again by its run, and shown beside the text's."""

import copy
import json
import sys
from pathlib import Path

import commands
import pytest
from rich.console import Console

from tritonrec.harness.papers import TEXTS, reproduce, runs
from tritonrec.harness.papers.page import PAGE, Row
from tritonrec.harness.papers.tables import TABLES

RECORD = Path(__file__).resolve().parents[2] / "ci" / "baselines" / "papers.json"
FIGURES = json.loads(RECORD.read_text())["rows"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["growth"], ["growth"]),
        (["Fig. 13"], ["grm"]),
        (["fig. 17", "lab"], ["lab", "scaling"]),
        (["Table II"], ["simulate", "lab"]),
        (["Table I"], []),  # a comparison in words, which no run makes
        (["Fig. 1"], []),
        ([""], []),
        ([" "], []),
        (["e"], []),
        (["2d"], ["switches", "curves", "averaging"]),
        (
            ["bounded lag"],
            ["serve", "hosts", "hosts-computing", "links", "window", "all-to-alls", "repetitions"],
        ),
        (["all"], [*runs.RUNS]),
    ],
)
def test_a_run_is_found_by_its_name_its_text_or_words_of_a_row(words, names):
    if names:
        assert reproduce.chosen(words) == names
    else:
        with pytest.raises(
            ValueError, match=f"no run gives '{words[0]}': name a run, a text .*reproduce list"
        ):
            reproduce.chosen(words)


@pytest.mark.parametrize(
    ("cell", "numbers"),
    [
        ("5,793.83 / 4,914.01 / 2,919.76 / 1,895.98 ms", [5793.83, 4914.01, 2919.76, 1895.98]),
        ("0.37, 0.72, 1.43", [0.37, 0.72, 1.43]),
        ("44.34, 94.07 %", [44.34, 94.07]),
        ("HR@10 minus TorchRec's: 2D-SP -1.0e-3, NestPipe within 0.3e-3", [-1.0e-3, 0.3e-3]),
        ("dbp 1.97x, fwp 1.17x", [1.97, 1.17]),
        ("N = 8: payload 7.67, k = 4: 9", [7.67, 9]),
        ("bls 8.73 ± 0.43, 7.29 ± 0.37 ms at k = 0, 1, 4", [8.73, 7.29]),
        ("stale -3.2e-3 (deviation 3.8e-3)", [-3.2e-3]),
        ("3.06x on 1,536 NPUs", [3.06]),
        ("no figure in the text", []),
    ],
)
def test_the_numbers_of_a_cell_are_those_that_it_states(cell, numbers):
    assert reproduce.numbers(cell) == numbers


def say(console):
    return " ".join(console.file.getvalue().split())


@pytest.fixture
def console(tmp_path):
    with open(tmp_path / "said.txt", "w+") as file:
        console = Console(file=file, width=300)
        console.file.getvalue = lambda: (file.flush(), (tmp_path / "said.txt").read_text())[1]
        yield console


@pytest.mark.if_changed
def test_each_run_is_shown_beside_the_text_and_kept_and_the_others_stay(tmp_path, monkeypatch, console):
    """The ranks' loads are new, the lab is not possible, the others' figures are kept."""
    folder, grown = tmp_path / "figures", copy.deepcopy(FIGURES["growth"]["figures"])
    grown["largest_load"] = 0.123
    simulated = copy.deepcopy(FIGURES["simulate"]["figures"])
    simulated["cells"]["Fig. 8, 2D-SP, utilization %, 1536 npu"]["model"] = 31.5

    def refuse():
        raise runs.UnavailableError("needs what is not here")

    made = {"growth": lambda: grown, "simulate": lambda: simulated, "lab": refuse}
    for name, how in made.items():
        monkeypatch.setitem(runs.RUNS, name, runs.Run(made=how))
    folder.mkdir()
    (folder / "papers.json").write_text(
        json.dumps({"rows": {"mch": FIGURES["mch"], "growth": FIGURES["growth"]}})
    )
    assert reproduce.reproduce([*made], folder, console)
    said = say(console)
    assert "lab is left out: it needs what is not here" in said
    assert "0.75 │ largest load 0.801 of 200,000 keys │ largest load 0.123 of 200,000 keys" in said
    assert "29.6 and 34.8 % │ 30.2 and 34.4 % │ 30.2 and 31.5 %" in said
    kept = json.loads((folder / "papers.json").read_text())["rows"]
    assert set(kept) == {"mch", "growth", "simulate"} and kept["mch"] == FIGURES["mch"]
    assert kept["growth"]["figures"] == grown and kept["growth"]["environment"]["torch"]
    report = (folder / "papers.md").read_text()
    assert (
        "| 29.6 and 34.8 % | 30.2 and 31.5 % |" in report
        and TABLES["mch"](FIGURES["mch"]["figures"]) in report
    )
    assert sorted(path.name for path in folder.iterdir()) == ["papers.json", "papers.md", "simulate.png"]


def test_figures_that_are_computed_are_shown_as_those_that_a_file_has(tmp_path, console):
    """A bound is a number where it is made, and a text in the record."""
    assert reproduce.reproduce(["window"], tmp_path, console)
    assert "KB for each k, 1,839 KB at k = 0 │ 1,836 KB for each k, 1,839 KB at k = 0" in say(console)


def test_operations_are_those_of_weights_and_of_the_pairs_that_see_each_other():
    found = runs.operations({"dim": 8, "layers": 3, "heads": 2, "qk_dim": 4, "v_dim": 6}, 5)
    weights = 8 * 2 * (2 * 6 + 2 * 4) + 2 * 6 * 8
    assert found == {"weights": 3 * 2 * 5 * weights, "attention": 3 * 2 * 15 * 2 * (4 + 6)}


def test_a_run_that_fails_is_named_and_the_next_ones_are_done(tmp_path, monkeypatch, console):
    monkeypatch.setitem(runs.RUNS, "probing", runs.Run(f"{sys.executable} -c print(1)"))
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setitem(runs.RUNS, "growth", runs.Run("tritonrec no-command"))
    monkeypatch.setitem(runs.RUNS, "balance", runs.Run(made=lambda: FIGURES["balance"]["figures"]))
    assert not reproduce.reproduce(["growth", "probing", "balance"], tmp_path / "out", console)
    said = say(console)
    assert "growth failed: tritonrec no-command ended with 2:" in said and "No such command" in said
    assert "probing is left out: it needs a clone of the repository, for -c" in said
    assert set(json.loads((tmp_path / "out" / "papers.json").read_text())["rows"]) == {"balance"}


def test_a_picture_has_the_numbers_of_rows_whose_text_has_as_many(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        reproduce, "_bars", lambda axis, item, sides: drawn.append((item, sides)) or axis.bar(0, 1)
    )
    assert reproduce.draw("simulate", FIGURES, tmp_path / "some.png")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
    sides = dict(drawn)["nestpipe: Fig. 8, utilization of TorchRec and 2D-SP at 1,536"]
    assert sides["paper"] == [29.6, 34.8] and sides["here"] == pytest.approx([30.2, 34.4])
    assert not any("Fig. 10e" in item for item, _ in drawn)  # the text has one number less
    assert not reproduce.draw("growth", {**FIGURES}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"rows": []}', '{"rows": {"lab": {"seconds": 1}}}', "[" * 10**5]
)
def test_a_folder_with_another_file_of_that_name_is_refused_before_any_run(
    tmp_path, monkeypatch, console, content
):
    (tmp_path / "papers.json").write_text(content)
    monkeypatch.setitem(runs.RUNS, "growth", runs.Run(made=lambda: pytest.fail("it has begun")))
    with pytest.raises(
        ValueError, match=r"papers\.json was not written by tritonrec reproduce: name another"
    ):
        reproduce.reproduce(["growth"], tmp_path, console)
    assert (tmp_path / "papers.json").read_text() == content


def test_the_list_shows_every_run_with_its_rows():
    code, output, _ = commands.invoke("reproduce", "list")
    assert code == 0 and all(name in output for name in runs.RUNS)
    assert "mtgrboost: Fig. 13: throughput as techniques are added" in output


def test_every_made_cell_belongs_to_a_row_of_its_run():
    for name, figures in FIGURES.items():
        for text, row in reproduce.made_rows(name, {name: figures}):
            assert isinstance(row, Row) and row.item in TEXTS[text] and row.ours
    assert PAGE.exists()


def test_words_that_name_nothing_end_before_any_run(tmp_path):
    code, output, _ = commands.invoke("reproduce", "Fig. 99", "--folder", tmp_path / "none")
    assert code == 2 and "error: no run gives 'Fig. 99'" in output and not (tmp_path / "none").exists()
