"""Promise: a command that judges exits with 1 where its judge found something, and with 0 only elsewhere."""

import signal
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tritonrec.harness import bisect as bisection
from tritonrec.harness.cli import app
from tritonrec.harness.fuzz.report import Failure, FuzzReport
from tritonrec.harness.train.stopping import Stop
from tritonrec.harness.verify import user_model
from tritonrec.harness.verify.cases import Case
from tritonrec.harness.verify.record_traces import MODES, record_traces
from tritonrec.harness.verify.report import CaseResult, Report
from tritonrec.harness.verify.state import Difference
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.harness.verify.tools import SELECTIONS
from tritonrec.harness.verify.user_model import ModelReport
from tritonrec.nn import Linear
from tritonrec.ops import ExactSumError
from tritonrec.pipeline.diagnosis import LAST_BITS, Diagnosis, _Change, _reason

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


@pytest.mark.parametrize(
    ("summary", "number", "expected"),
    [
        ({}, 0, 0), ({"stopped": True}, signal.SIGINT, 130), ({"stopped": True}, 0, 128 + signal.SIGTERM),
        ({"stopped": True, "out_of_memory": True}, signal.SIGINT, 1),
    ],
)  # fmt: skip
def test_train(monkeypatch, summary, number, expected):
    monkeypatch.setattr(
        "tritonrec.harness.train.launch.Launch.train", lambda *_: (summary, True, Stop(number))
    )
    assert status("train", "--data", "zipf:users=60,items=80,seed=3", "--steps", "2") == expected


@pytest.mark.parametrize("found", [0, 1, 2])
def test_those_that_return_their_status(monkeypatch, found):
    for name in ("bench.bench", "trace_report.trace_report", "doctor.doctor"):
        monkeypatch.setattr(f"tritonrec.harness.{name}", lambda *_, **__: found)
    assert [status(*words) for words in (("bench",), ("trace", "x"), ("doctor",))] == [found] * 3


@pytest.mark.if_changed
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


def test_the_differences_of_all_ranks_are_a_models(monkeypatch):
    runs = user_model._Runs(lambda: None, [], [], "batch", "adam", 0.1, 0, "float32")
    later = replace(OTHER, step=2)
    for ranks in ([None, OTHER], [later, OTHER], [OTHER, None]):
        monkeypatch.setattr(user_model, "run_ranks", lambda *_, ranks=ranks: ranks)
        assert runs._compare(CASE, []) == OTHER
    monkeypatch.setattr(user_model, "run_ranks", lambda *_: [None, None])
    assert runs._compare(CASE, []) is None


@pytest.mark.parametrize(("size", "last_bits"), [(1e-6, True), (0.02, False), (float("nan"), False)])
def test_only_a_small_change_is_laid_to_rounding(size, last_bits):
    reason = _reason(_Change("layer", Linear(2, 2), "", size), LAST_BITS["float32"])
    assert reason.startswith("last bits only") is last_bits
    assert reason.startswith("it depends on the values of other samples") is not last_bits


@pytest.mark.parametrize("fails", ["reference", "sequential", "dbp"])
def test_an_error_of_a_run_is_the_cases(monkeypatch, fails):
    """The reference's own ends all; of a case, that case alone."""
    consistency = "window" if fails == "sequential" else "batch"
    runs = user_model._Runs(lambda: None, [None], [], consistency, "adam", 0.1, 0, "float32")

    def states(self, mode, world_size, count):
        if mode == fails and count == 2:
            raise RuntimeError("it failed")
        return [[{}]] * world_size

    def compared(self, case, expected):
        if case.mode == fails and case.micro_batches == 2:
            raise RuntimeError("it failed")

    monkeypatch.setattr(user_model._Runs, "_states", states)
    monkeypatch.setattr(user_model._Runs, "_compare", compared)
    if fails == "reference":
        monkeypatch.setattr(user_model._Runs, "_states", lambda *_: _raise())
    found = {
        (case.mode, case.micro_batches): wrong for case, wrong in runs.cases(("dbp", "fwp"), (1,), (1, 2))
    }
    assert {mode for (mode, count), wrong in found.items() if wrong == "it failed"} == {fails}
    assert sum(wrong is not None for wrong in found.values()) == 1
    assert len(found) == {"reference": 1, "sequential": 3, "dbp": 4}[fails]


def _raise():
    raise RuntimeError("it failed")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_error_of_one_rank_is_that_of_all(number):
    def fails(ranks):
        if ranks.rank == number:
            raise KeyError("it failed")
        if ranks.rank == 0:  # it waits for the others, and is ended
            ranks.control.all_reduce(torch.ones(1, dtype=torch.int64), "ones")

    with pytest.raises(KeyError, match="it failed"):
        run_ranks(3, fails)
    assert run_ranks(3, lambda ranks: ranks.rank) == [0, 1, 2]


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


@pytest.mark.parametrize("sign", [1, -1])
def test_ranks_that_are_threads_refuse_a_sum_that_overflows(sign):
    def summed(ranks):
        return ranks.control.all_reduce(torch.tensor([sign << 62], dtype=torch.int64), "sums")

    with pytest.raises(ExactSumError, match=r"sums\[0\]"):
        run_ranks(2, summed)
