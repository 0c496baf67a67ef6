"""Promise: a command that judges exits with 1 where its judge found something, and with 0 only elsewhere."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tritonrec.harness import bisect as bisection
from tritonrec.harness.cli import app
from tritonrec.harness.fuzz.report import Failure, FuzzReport
from tritonrec.harness.verify import user_model
from tritonrec.harness.verify.cases import Case
from tritonrec.harness.verify.corpus import SELECTIONS
from tritonrec.harness.verify.record_traces import MODES, record_traces
from tritonrec.harness.verify.report import CaseResult, Report
from tritonrec.harness.verify.state import Difference
from tritonrec.harness.verify.user_model import ModelReport
from tritonrec.pipeline.diagnosis import Diagnosis

pytestmark = pytest.mark.every_case

CASE = Case("nestpipe", "batch", 2, 3, False, "adam", 2)
OTHER = Difference(1, "loss", [7], 0.5, 0.25, 4)
FAILURE = Failure({"mode": "dbp"}, "step 0, loss[3]", "tritonrec fuzz", 3)
PART = bisection.Part("loss", 1, 1, (), (0.1, 0.2))


def status(*arguments):
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code


@pytest.mark.parametrize(
    ("identical", "sound", "expected"), [(True, True, 0), (False, True, 1), (True, False, 1), (True, None, 0)]
)
def test_verify(monkeypatch, job, tmp_path, identical, sound, expected):
    outcome = Report(job, [CaseResult(CASE, True), CaseResult(CASE, identical, None if identical else OTHER)])
    monkeypatch.setattr("tritonrec.harness.cli.verify.verify_contract", lambda *_: outcome)
    monkeypatch.setattr("tritonrec.harness.cli.verify.record_traces", lambda *_: sound)
    traced = [] if sound is None else ["--trace", tmp_path]
    assert status("verify", "--data", "zipf:users=60,items=80,seed=3", "--quick", *traced) == expected


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("corpus", [False, True])
def test_verify_injects_the_faults_that_were_chosen(monkeypatch, job, faults, corpus):
    given = []
    monkeypatch.setattr(
        "tritonrec.harness.cli.verify.verify_contract",
        lambda job, cases, injected, *_: given.append(injected) or Report(job, [CaseResult(CASE, True)]),
    )
    words = ["--inject-faults"] * faults + ["--corpus"] * corpus
    assert status("verify", "--data", "zipf:users=60,items=80,seed=3", *words) == 0
    assert given == [SELECTIONS[faults, corpus]]


@pytest.mark.parametrize(("failures", "expected"), [([], 0), ([FAILURE], 1)])
@pytest.mark.parametrize("one", [False, True])
def test_fuzz(monkeypatch, failures, expected, one):
    outcome = FuzzReport(0, failures=failures)
    for name in ("search", "try_one"):
        monkeypatch.setattr(f"tritonrec.harness.fuzz.run.{name}", lambda *_: outcome)
    assert status("fuzz", *(["--configuration", "{}"] if one else [])) == expected


@pytest.mark.parametrize(("step", "parts", "expected"), [(None, [], 0), (0, [PART], 1), (3, [PART], 1)])
def test_bisect(monkeypatch, step, parts, expected):
    monkeypatch.setattr(bisection, "bisect", lambda *_: bisection.Bisection([], step, parts))
    assert status("bisect", "a", "b") == expected


@pytest.mark.parametrize("broken", [None, MODES[0], MODES[-1]])
def test_traces_are_sound_if_those_of_all_modes_are(monkeypatch, job, tmp_path, broken):
    """Recording and measuring are left out; `test_record_traces.py` has them."""
    module = "tritonrec.harness.verify.record_traces"
    pool = SimpleNamespace(run=lambda *_: None)
    monkeypatch.setattr(f"{module}.rank_pool", lambda *_: nullcontext(pool))
    monkeypatch.setattr(f"{module}.save_joined", lambda parts, path: path)
    monkeypatch.setattr(
        f"{module}.read",
        lambda path: SimpleNamespace(mode=path.stem, spans=[], metadata={"exchanges": "each"}),
    )
    monkeypatch.setattr(f"{module}.draw", lambda *_: None)
    monkeypatch.setattr(f"{module}.check_trace", lambda trace: SimpleNamespace(honoured=trace.mode != broken))
    figures = SimpleNamespace(step_ns=1, exposed_ratio=None, hidden_lookup_ratio=None)
    monkeypatch.setattr(f"{module}.summarise", lambda *_: [figures])
    console = Console(record=True, width=100)
    assert record_traces(job, str(tmp_path), console) is (broken is None)
    assert console.export_text().count("VIOLATED") == (broken is not None)


# --- one's own model


@pytest.mark.parametrize(
    ("report", "passed"),
    [
        (ModelReport([(CASE, None)], None), True),
        (ModelReport([], None), False),
        (ModelReport([(CASE, None), (CASE, OTHER)], None), False),
        (ModelReport([(CASE, None), (CASE, "it failed")], None), False),
        (ModelReport([(CASE, None)], "layer", "it mixes samples"), False),
        (ModelReport([(CASE, None)], None, error="in layer: it failed"), False),
    ],
)
def test_a_model_passes_if_nothing_was_found(tritonrec_verify, monkeypatch, report, passed):
    assert report.passed is passed
    monkeypatch.setattr("tritonrec.harness.verify.verify", lambda *_, **__: report)
    if passed:
        assert tritonrec_verify() is report
        return
    with pytest.raises(pytest.fail.Exception) as failed:
        tritonrec_verify()
    assert str(report) in str(failed.value)


@pytest.mark.parametrize(
    ("consistency", "wrong", "first", "second", "module"),
    [
        ("batch", OTHER, None, "mix", "mix"),  # the first batch does not show it
        ("batch", OTHER, "norm", "mix", "norm"),
        ("batch", None, None, "mix", None),  # nothing differs, so no later batch is looked at
        ("batch", None, "norm", "mix", "norm"),
        ("window", OTHER, "drop", None, "drop"),
        ("window", None, "drop", None, None),  # a draw in the order of micro-batches is the same in all modes
    ],
)
def test_who_is_to_blame(monkeypatch, consistency, wrong, first, second, module):
    batches = [SimpleNamespace(step=step, validate=lambda: None) for step in (0, 1)]
    blamed = {0: Diagnosis(module=first, reason="r"), 1: Diagnosis(module=second, reason="r")}
    monkeypatch.setattr(user_model, "diagnose", lambda model, batch, *_: blamed[batch.step])
    monkeypatch.setattr(user_model._Runs, "cases", lambda *_: [(CASE, None), (CASE, wrong)])
    report = user_model.verify(lambda: None, batches, [], consistency=consistency)
    assert report.not_invariant == module
    assert report.passed is (wrong is None and module is None)
