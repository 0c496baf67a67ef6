"""Promise: `tritonrec report` shows what is recorded, needs no network, names what is missing, fails where
one of its figures did; docs/results.md is what it makes of the committed files."""

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from browser import BROWSER, opened
from typer.testing import CliRunner

from tritonrec.harness.cli import app
from tritonrec.harness.report import build, contract_digest, html, markdown, sections
from tritonrec.harness.report.section import Section, Table
from tritonrec.trace.analysis import EdgeReport

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).resolve().parents[2]
VERIFIED = json.loads((ROOT / "ci/baselines/verify.json").read_text())
EMPTY = {"area", "br", "circle", "col", "hr", "img", "input", "link", "meta", "polyline"}


class Page(HTMLParser):
    """What stands in a page: tags that were closed in order, text, and every address."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.addresses = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture
def alone(monkeypatch):
    """As in an installed package."""
    monkeypatch.setattr(build, "checkout", lambda: None)


def test_the_page_of_this_checkout_needs_no_network(tmp_path):
    file = tmp_path / "report.html"
    result = invoke("--folder", tmp_path, "--html", file)
    assert result.exit_code == 0, result.output
    page = Page(file.read_text())
    text = " ".join(page.words)
    titles = ["Contract", "Injected faults", "Benchmarks", "Compiled kernels", "Simulator", "Traces"]
    assert all(title in page.words for title in titles)
    assert contract_digest(VERIFIED) in text and "Fig. 9" in text and "hstu_attention" in text
    assert page.tags.count("img") == 4 and page.tags.count("script") == 0
    assert all(each.startswith(("#s", "data:image/png;base64,")) for each in page.addresses)
    assert f'content="{html.POLICY}"' in file.read_text() and "url(" not in file.read_text()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; the parser above reads the page")
def test_a_browser_shows_the_page(tmp_path):
    file = tmp_path / "report.html"
    assert invoke("--folder", tmp_path, "--html", file).exit_code == 0
    shown = opened(file, "--enable-logging=stderr", "--dump-dom")
    assert contract_digest(VERIFIED) in shown.stdout and "Content Security Policy" not in shown.stderr


def test_the_mark_of_each_section_says_whether_it_passed():
    found = [Section(str(passed), "", "x", passed=passed) for passed in (True, False, True)]
    marks = re.findall(r'<h2><span class="(passed|failed)">&#(\d+);</span>', html.page("x", found))
    assert marks == [("passed", "10003"), ("failed", "10007"), ("passed", "10003")]


def test_docs_results_is_made_from_the_committed_files():
    found, missing = build.collect(ROOT / "ci/baselines", ROOT)
    assert markdown.page(found) == (ROOT / "docs/results.md").read_text(), "run make results"
    assert missing == []


def test_text_is_not_markup():
    hostile = Section(
        "<b>", "a & <script>", "x", [Table("t", ("c|d",), [("<i>|\n*",)], frozenset([0]))], passed=False
    )
    page = Page(html.page("<title>", [hostile], ["<missing>"]))
    assert {"<b>", "a & <script>", "<i>|\n*", "<missing>"} <= set(page.words)
    assert "| **&lt;i>\\| \\*** |" in markdown.page([hostile])


@pytest.mark.parametrize(
    ("change", "title"),
    [
        (lambda report: report["cases"][7].update(identical=False), "Contract"),
        (lambda report: report["cases"][7].update(error="a rank ended"), "Contract"),
        (lambda report: report["faults"][3].update(caught=False), "Injected faults"),
    ],
)
def test_a_failure_fails(change, title, tmp_path, alone):
    report = copy.deepcopy(VERIFIED)
    (tmp_path / "verify.json").write_text(json.dumps(report))
    assert invoke("--folder", tmp_path).exit_code == 0
    change(report)
    (tmp_path / "verify.json").write_text(json.dumps(report))
    result = invoke("--folder", tmp_path, "--html", tmp_path / "page.html")
    assert result.exit_code == 1 and f"FAILED  {title}" in result.output
    assert (tmp_path / "page.html").read_text().count('<tr class="bad">') == 1
    assert f"No {tmp_path / 'bench.json'}: tritonrec bench --json" in result.output


def test_a_contract_without_cases_has_not_passed():
    assert not sections.contract({**VERIFIED, "cases": []}, "x").passed


def test_a_lab_that_emulates_nothing_says_nothing_of_it():
    report = json.loads((ROOT / "ci/baselines/lab.json").read_text())
    assert "emulated" in sections.lab(report, "x").text
    report["emulated"]["seconds_per_step"] = {}
    assert "emulated" not in sections.lab(report, "x").text


def test_a_kernel_that_a_target_lacks_fails():
    report = json.loads((ROOT / "ci/baselines/compile.json").read_text())
    assert sections.compiled(report, "x").passed
    for key in report["kernels"]:
        if key.startswith("bucketize.count_kernel"):
            del report["kernels"][key]["gfx942"]
    found = sections.compiled(report, "x")
    assert not found.passed and "There is no bucketize.count_kernel for gfx942." in found.text
    assert not sections.compiled({**report, "uncovered": ["unique.slow_kernel"]}, "x").passed


def test_a_launch_that_does_not_compile_fails():
    report = json.loads((ROOT / "ci/baselines/compile.json").read_text())
    kernels = report["kernels"]
    next(iter(kernels.values()))["sm_90"] |= {"error": "CompilationError: no registers"}
    found = sections.compiled(report, "x")
    assert not found.passed and f"{len(kernels) - 1} of {len(kernels)}" in found.text


def test_a_run_without_faults_says_so():
    assert "--inject-faults" in sections.faults({**VERIFIED, "faults": []}, "x").text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is not what tritonrec verify"),
        ("[]", "is not what"),
        ("{", "is no JSON"),
        ("\xff", "is no JSON"),
        ("[" * 100_000, "verify.json is no JSON"),
    ],
)
def test_another_file_is_one_clear_line(text, message, tmp_path, alone):
    (tmp_path / "verify.json").write_bytes(text.encode("latin-1"))
    result = invoke("--folder", tmp_path)
    assert result.exit_code == 2 and result.output.startswith("error: ") and message in result.output
    assert result.output.count("\n") <= 2


@pytest.mark.parametrize("folder", ["out/reports", "memory://out", "file"])
def test_a_folder_that_is_named_and_is_not_there_is_not_replaced_by_the_checkout(
    folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    result = invoke("--folder", folder)
    assert result.exit_code == 2 and ("is no folder" in result.output or "at a URL" in result.output)
    assert invoke().exit_code == 0  # with out, which is not there either


def test_an_empty_folder_is_one_clear_line(tmp_path, alone):
    result = invoke("--folder", tmp_path)
    assert result.exit_code == 2 and "has none of the files of a report: verify.json" in result.output


def test_a_damaged_trace_is_one_clear_line(tmp_path, alone):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/dbp.pftrace").write_bytes(b"nothing of a trace")
    result = invoke("--folder", tmp_path)
    assert result.exit_code == 2 and "dbp.pftrace is no trace of a run" in result.output


def test_the_digest_is_of_the_contract_only():
    expected = contract_digest(VERIFIED)
    report = copy.deepcopy(VERIFIED)
    report["environment"]["platform"] = "another"
    report["cases"][0] |= {"seconds": 99.0, "bytes_compared": 1, "tensors_compared": 1}
    report["cases"][0]["counts"]["check_microseconds"] = 7
    report["faults"][0] |= {"by": ["error"], "evidence": "another"}
    assert contract_digest(dict(reversed(report.items()))) == expected
    for change in (
        lambda report: report["cases"].pop(),
        lambda report: report["cases"][0].update(identical=False),
        lambda report: report["cases"][0].update(tensors_compared=0),
        lambda report: report["cases"][0]["counts"].update(found=1),
        lambda report: report["faults"][0].update(caught=False),
        lambda report: report["environment"].update(tritonrec="0.0"),
    ):
        other = copy.deepcopy(VERIFIED)
        change(other)
        assert contract_digest(other) != expected


@pytest.mark.parametrize("broken", [None, 0, 1])
def test_a_trace_that_proves_nothing_fails_as_one_that_breaks_its_order(monkeypatch, broken):
    """An edge was never exercised in it, so there is no violation either."""
    edge = ("compute", "exchange", 0, "same")
    trace = SimpleNamespace(metadata={"world_size": 2}, spans=[])
    monkeypatch.setattr(sections, "read", lambda file: trace)
    reports = [EdgeReport({edge: int(place != broken)}, [], [edge] * (place == broken)) for place in (0, 1)]
    monkeypatch.setattr(sections, "check_trace", lambda _: reports.pop(0))
    figures = SimpleNamespace(step_ns=1, exposed_ratio=None, hidden_lookup_ratio=None)
    monkeypatch.setattr(sections, "summarise", lambda _: [figures])
    found = sections.traces([Path("a.pftrace"), Path("b.pftrace")], "x")
    assert found.passed is (broken is None) and found.tables[0].bad == {broken} - {None}
    assert [row[-1] for row in found.tables[0].rows] == [
        "VIOLATED" if place == broken else "1 honoured" for place in (0, 1)
    ]
