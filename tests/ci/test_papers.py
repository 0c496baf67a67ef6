"""Promise: docs/papers.md is what its JSON says, and leaves out nothing that a text numbers."""

import copy
import json
import re
import sys
from importlib import import_module

import numpy as np
import pytest
import torch

from tritonrec.data import clustering
from tritonrec.harness.papers import computed, runs
from tritonrec.harness.papers.page import PAGE as PACKAGED
from tritonrec.harness.papers.page import between, rows_of, with_figures

papers = import_module("papers")

RECORD = json.loads(papers.RECORD.read_text())
PAGE = (papers.DOCS / "papers.md").read_text()
TEXTS = {name: rows_of(between(PAGE, name)[1]) for name in papers.TEXTS}
NUMBERED = {
    "nestpipe": {"Fig": range(1, 11), "Table": range(1, 5), "eq": range(1, 6)},
    "mtgrboost": {"Fig": range(2, 18), "Table": range(1, 4), "eq": range(1, 9)},
    "2d": {"Fig": range(1, 3)},
    "bounded lag": {"Fig": range(1, 9), "Listing": range(1, 3), "Table": range(1, 2)},
    "slipstream": {"Fig": range(1, 11), "Table": range(1, 4), "eq": range(1, 9)},
}
"""What the texts number; MTGRBoost's Figure 1 is a picture of applications."""
ROMAN = {"I": 1, "II": 2, "III": 3, "IV": 4}


NUMBER = r"(?:\d+[a-e]?|[IV]+)\b"


def numbers(items, kind):
    """The numbers that `items` name: "Figs 5, 6", "eq. 1 to 4", "Fig. 10a", "Table II"."""
    found = set()
    for lists in re.findall(
        rf"\b{kind}s?\.? ({NUMBER}(?:(?:, | and | to ){NUMBER})*)", "; ".join(items), re.I
    ):
        for part in re.split(", | and ", lists):
            ends = [ROMAN.get(word) or int(word.rstrip("abcde")) for word in part.split(" to ")]
            found.update(range(ends[0], ends[-1] + 1))
    return found


@pytest.mark.parametrize("name", papers.PAGES)
def test_the_page_is_what_the_json_says(name):
    text = (papers.DOCS / name).read_text()
    assert papers.page(name, text, RECORD["rows"]) == text, "run python ci/papers.py"


def test_another_figure_makes_another_page():
    text, other = (papers.DOCS / "papers.md").read_text(), copy.deepcopy(RECORD["rows"])
    for cell in other["simulate"]["figures"]["cells"].values():
        cell["model"] *= 1.01
    assert papers.page("papers.md", text, other) != text


@pytest.mark.parametrize("name", papers.TEXTS)
def test_everything_that_a_text_numbers_has_a_row(name):
    items = [row.item for row in TEXTS[name]]
    assert len(set(items)) == len(items)
    for kind, known in NUMBERED[name].items():
        missing = set(known) - numbers(items, kind)
        assert not missing, f"{kind} {sorted(missing)} of {name}"


@pytest.mark.parametrize("name", papers.TEXTS)
def test_a_row_shows_its_run_or_says_where(name):
    for row in TEXTS[name]:
        run = row.run.strip("`")
        assert row.state in ("works", "differs", "not here"), row.item
        assert row.item not in papers.TEXTS[name] or run in runs.RUNS, row.item
        assert not run or run in RECORD["rows"], f"{row.item}: {run} has not been run"
        assert row.here, f"{row.item}: neither a word nor a page"
        assert row.state == "works" or not row.here.startswith("(["), f"{row.item}: no reason"


def test_a_figure_without_a_row_and_a_row_of_other_columns_are_refused():
    with pytest.raises(ValueError, match=r"the page has no row Fig\. 99"):
        with_figures("| a |\n| - |\n", {"Fig. 99": str}, RECORD["rows"])
    with pytest.raises(ValueError, match=r"got \| one \| two \|"):
        rows_of("| a |\n| - |\n| one | two |\n")


def test_a_simulated_row_works_within_five_percent():
    compared = 0
    for row in TEXTS["nestpipe"]:
        if row.run != "`simulate`":
            continue
        paper, ours = (
            [float(number) for number in re.findall(r"\d+\.\d+", text.replace(",", ""))]
            for text in (row.paper, row.ours)
        )
        close = len(paper) == len(ours) and all(
            abs(b / a - 1) <= 0.05 for a, b in zip(paper, ours, strict=True)
        )
        assert close == (row.state == "works"), (row.item, paper, ours)
        compared += len(paper)
    assert compared > 30


def test_every_figure_of_the_simulator_is_the_papers():
    cells = RECORD["rows"]["simulate"]["figures"]["cells"]
    of_paper = {str(cell["paper"]) for cell in cells.values()}
    printed = "".join(row.paper for row in TEXTS["nestpipe"] if row.run == "`simulate`").replace(",", "")
    for number in ("5793.83", "1895.98", "44.34", "25.2", "12.9", "165.12"):
        assert number in printed and number in of_paper, number


def test_runs_are_taken_over_into_the_record_and_the_others_stay(tmp_path, monkeypatch):
    for name in papers.PAGES:
        (tmp_path / name).write_text((papers.DOCS / name).read_text())
    (tmp_path / "record.json").write_text(json.dumps(RECORD))
    monkeypatch.setattr(papers, "DOCS", tmp_path)
    monkeypatch.setattr(papers, "RECORD", tmp_path / "record.json")
    other = copy.deepcopy(RECORD["rows"]["growth"])
    other["figures"]["keys"] += 7
    (tmp_path / "new.json").write_text(json.dumps({"rows": {"growth": other}}))
    monkeypatch.setattr(sys, "argv", ["papers.py", str(tmp_path / "new.json")])
    assert papers.main() == 0
    kept = json.loads((tmp_path / "record.json").read_text())
    assert kept["rows"] == {**RECORD["rows"], "growth": other}
    assert f"{other['figures']['keys']:,} keys" in (tmp_path / "papers.md").read_text()


def test_the_package_has_the_page():
    assert PACKAGED.read_text() == PAGE


def test_a_page_without_its_marks_is_refused():
    with pytest.raises(ValueError, match=r"the page has no <!-- nestpipe -->"):
        papers.page("papers.md", "# Papers\n", RECORD["rows"])


@pytest.mark.if_changed
@pytest.mark.parametrize("seed", range(4))
def test_offline_clusters_are_those_that_no_swap_betters(seed):
    draw = np.random.default_rng(seed)
    samples = computed.samples_of(
        [torch.from_numpy(draw.integers(0, 14, draw.integers(1, 6))) for _ in range(11)]
    )
    lengths = samples.offsets.diff().numpy()
    before = draw.permutation(np.arange(11) % 3)
    sizes = np.bincount(before, lengths).astype(np.int64)
    place, keys = before.copy(), np.unique(samples.keys, return_inverse=True)[1]
    payloads = clustering._swap(samples.offsets.numpy(), keys, keys.max() + 1, place, sizes)
    assert sizes.tolist() == np.bincount(place, lengths).tolist() and sorted(place) == sorted(before)
    found = computed.inflation(samples, place)
    assert payloads.sum() == found * len(set(keys))
    assert computed.bound(samples, int(sizes.max())) <= found < computed.inflation(samples, before)
    for one, other in zip(*np.triu_indices(11, 1), strict=True):
        swap = place.copy()
        swap[[one, other]] = place[[other, one]]
        largest = [np.bincount(each, lengths)[[place[one], place[other]]].max() for each in (place, swap)]
        assert largest[1] > largest[0] or computed.inflation(samples, swap) >= found
