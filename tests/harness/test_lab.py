"""Promise: the lab compares losses before it measures, and its figures are those of the traces."""

import io
import json
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from tritonrec.files import save_json
from tritonrec.harness.lab import figures as lab_figures
from tritonrec.harness.lab import report
from tritonrec.harness.lab.figures import Figures
from tritonrec.harness.lab.rounds import LabConfig, Measurement, Result, measure, rows
from tritonrec.harness.lab.run import TOLERANCE, LabRun, RankRun, compare_losses, run_once
from tritonrec.harness.lab.settings import (
    BASELINE,
    Setting,
)
from tritonrec.harness.network import LabError
from tritonrec.trace import LANES, read
from tritonrec.trace.analysis import summarise

# Losses first.


def run_with(losses, setting=BASELINE):
    return LabRun(setting, len(losses), None, losses, {}, 0, 0)


def test_a_loss_that_differs_in_one_bit_is_found():
    ids = np.array([3, 7, 9])
    expected = {0: (ids, np.float32([0.5, 1.5, 2.5])), 1: (ids, np.float32([0.25, -0.0, 4.0]))}
    reference, nest = run_with(expected), Setting("nestpipe", 4)
    assert compare_losses(run_with(expected, nest), reference, tolerance=0) == "identical"
    one_bit = np.nextafter(np.float32(1.5), np.float32(2))
    off = {**expected, 0: (ids, np.float32([0.5, one_bit, 2.5]))}
    with pytest.raises(LabError, match=r"nestpipe N=4, step 0, sample 7: .*sequential N=1; no figure"):
        compare_losses(run_with(off, nest), reference, tolerance=0)
    assert compare_losses(run_with(off, nest), reference, tolerance=TOLERANCE).startswith("within")
    zero = {**expected, 1: (ids, np.float32([0.25, 0.0, 4.0]))}
    with pytest.raises(LabError, match="sample 7"):
        compare_losses(run_with(zero, nest), reference, tolerance=0)
    for far in (1.51, np.nan, np.inf):
        other = {**expected, 0: (ids, np.float32([0.5, far, 2.5]))}
        for tolerance in (TOLERANCE, *([] if np.isfinite(far) else [np.inf])):
            with pytest.raises(LabError, match="sample 7"):
                compare_losses(run_with(other, nest), reference, tolerance)
    assert compare_losses(run_with({**expected, 0: (ids, np.float32([0.5, 9, 2.5]))}), reference, np.inf)


def test_bytes_of_a_link_are_those_that_its_ranks_sent_in_the_run(monkeypatch, tmp_path):
    """A link counts from its beginning, for all ranks of its machine, which read it at other times."""
    sent = {"a": [(1000, 1500), (1010, 1700)], "b": [(5000, 5100), (4990, 5050)]}
    one = {0: (np.array([1]), np.float32([0.5]))}
    homes = [RankRun(one, {"rows": 2}, 1, 0, name, each) for name in sent for each in sent[name]]
    monkeypatch.setattr("tritonrec.harness.lab.run.save_joined", lambda parts, path: None)
    for rank in range(4):
        (tmp_path / f"trace.{rank}").write_text("")
    pool = SimpleNamespace(run=lambda *given, **mesh: homes)
    run = run_once(pool, 4, None, BASELINE, {}, 1, tmp_path / "trace")
    assert run.link_bytes == (700 + 110) / 2 and run.counts == {"rows": 8} and run.tasks == 4


def test_missing_steps_and_other_samples_are_errors():
    ids, values = np.array([3, 7]), np.float32([0.5, 1.5])
    reference = run_with({0: (ids, values), 1: (ids, values)})
    with pytest.raises(LabError, match=r"finished steps \[0\], not \[0, 1\]"):
        compare_losses(run_with({0: (ids, values)}), reference, tolerance=0)
    with pytest.raises(LabError, match="finished steps"):
        compare_losses(run_with({}), run_with({}), tolerance=0)
    with pytest.raises(LabError, match="other samples"):
        compare_losses(run_with({0: (ids, values), 1: (ids + 1, values)}), reference, tolerance=0)


# A run over the loopback interface: everything but the links.


@pytest.fixture(scope="module")
def plan(job):
    switches, seconds = {"consistency": "window", "clustering": True}, {"compute": 0.03}
    return LabConfig(job, 2, 100.0, ["nestpipe"], [3], switches, seconds, steps=5, rounds=2)


def all_runs(pool, plan, folder):
    def run(number, setting):
        path = folder / f"{number} {setting}.pftrace"
        return run_once(pool, 2, plan.job, setting, plan.seconds, plan.steps, path)

    return [[run(number, setting) for setting in plan.settings] for number in range(plan.rounds)]


@pytest.fixture(scope="module")
def runs(pool, plan, tmp_path_factory):
    return all_runs(pool, plan, tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def result(plan, runs):
    measured = [[measure(run, plan, runs[0][0]) for run in one] for one in runs]
    return Result(plan, rows(plan, measured), dict(plan.seconds))


@pytest.mark.if_changed
@pytest.mark.multi_rank
def test_losses_are_equal_across_modes_and_rounds(result):
    assert [row.losses for row in result.rows[:2]] == ["identical", "identical"]
    assert result.rows[2].losses.startswith("within")


@pytest.mark.multi_rank
@pytest.mark.if_changed
def test_a_wrong_loss_prints_no_figure(plan, runs):
    ids, values = runs[0][1].losses[3]
    spoilt = replace(runs[0][1], losses={**runs[0][1].losses, 3: (ids, values + np.float32(1e-3))})
    with pytest.raises(LabError, match="step 3"):
        measure(spoilt, plan, runs[0][0])


@pytest.mark.multi_rank
def test_figures_are_those_of_the_trace(plan, runs, result):
    for run, row in zip(runs[-1], result.rows, strict=True):
        spans = read(run.trace).spans
        seen = row.figures
        sent = sum(span.args.get("bytes", 0) for span in spans) / 2 / plan.steps
        assert seen.row_bytes == sent > 0  # other programs may send over links of this machine
        assert seen.compute >= 0.03  # emulated
        assert 0 <= seen.exposed <= seen.communication and 0 <= seen.exposed_lookup <= seen.lookup
        assert row.tasks == 2 * plan.rounds * plan.steps * row.setting.micro_batches
        cost = row.costs["compute"]
        assert cost.tasks == row.setting.micro_batches and cost.seconds * cost.tasks >= 0.02
        assert row.costs["exchange"].bytes + row.costs["gradient_exchange"].bytes > 0
    whole, cut = result.rows[0].figures, result.rows[1].figures
    assert whole.exposed == whole.communication and whole.exposed_lookup == whole.lookup
    assert cut.rows > whole.rows  # micro-batches ask for a key again
    for row in result.rows:
        assert report.payload(row, result.rows[0]) == row.figures.rows / whole.rows
    assert cut.exposed_lookup < cut.lookup
    # A row is twelve float32 there; back, twelve float32, or on one machine twelve int64 sums.
    assert cut.row_bytes / cut.rows == pytest.approx(12 * (4 + 8), rel=1e-12)
    assert result.rows[2].figures.rows == pytest.approx(
        result.rows[2].figures.row_bytes / (12 * (4 + 4)), rel=1e-12
    )


@pytest.mark.multi_rank
def test_shares_of_lanes_are_those_of_the_trace_and_are_printed(runs, result):
    for run in runs[0]:
        seen, spans = lab_figures.figures(run), read(run.trace).spans
        stretch = {
            each.rank: (each.start_ns, each.start_ns + each.elapsed_ns) for each in summarise(spans, 2)
        }
        at_work = {
            span.lane
            for span in spans
            if span.start_ns < stretch[span.rank][1] and stretch[span.rank][0] < span.end_ns
        }  # others were ahead of it
        assert seen.busy.keys() == at_work & set(LANES)
        assert seen.busy["compute"] == pytest.approx(seen.compute / seen.mean_step)
        assert seen.busy.get("copy", 0) == pytest.approx(seen.row_copy / seen.mean_step)
        assert all(0 < share <= 1 for share in seen.busy.values())
    said = Console(file=io.StringIO(), width=300)
    report.print_report(result, said)
    lines = said.file.getvalue().partition("Share of a step in which each lane is at work")[2].splitlines()
    lanes = next(line for line in lines if "compute" in line).replace("┃", " ").split()
    shares = [line.replace("│", " ").split() for line in lines if line.startswith("│")]
    for row, cells in zip(result.rows, shares, strict=False):  # other tables follow
        assert cells[lanes.index("compute") - len(lanes)] == f"{row.figures.busy['compute']:.0%}"


@pytest.mark.multi_rank
def test_the_document_and_the_picture(result, tmp_path):
    save_json(report.as_json(result), tmp_path / "new" / "lab.json")
    document = json.loads((tmp_path / "new" / "lab.json").read_text())
    assert (
        document["environment"]["link_mbit_per_second"] == 100 and document["environment"]["world_size"] == 2
    )
    assert document["emulated"]["seconds_per_step"] == {"compute": 0.03}
    assert [row["mode"] for row in document["rows"]] == ["sequential", "nestpipe", "nestpipe"]
    assert document["rows"][2]["switches"] == {"consistency": "window", "clustering": True}
    assert [row["taper"] for row in document["rows"]] == [1.0, 0.9, 1.0]
    for row in document["rows"]:
        assert len(row["speedups"]) == 2 and row["stages"]["exchange"]["bytes"] > 0
        seconds = report.parts(result.rows[document["rows"].index(row)])
        assert sum(seconds[name] for name in report.PARTS) >= row["step"] - 1e-9
    report.draw_report(result, tmp_path / "new" / "lab.png")
    assert (tmp_path / "new" / "lab.png").stat().st_size > 10_000


# Copies of the tables: one part on two ranks, so that only the replica reduction leaves a rank.


@pytest.fixture(scope="module")
def copies(job, pool, tmp_path_factory):
    plan = LabConfig(job, 2, 100.0, ["nestpipe"], [2], {"replicas": 2, "average_every": 2}, steps=6, rounds=1)
    runs = all_runs(pool, plan, tmp_path_factory.mktemp("copies"))
    return runs[0], Result(plan, rows(plan, [[measure(run, plan, runs[0][0]) for run in runs[0]]]), {})


@pytest.mark.multi_rank
@pytest.mark.if_changed
def test_the_replica_reduction_is_counted(copies):
    for run, row in zip(copies[0], copies[1].rows, strict=True):
        spans, seen = read(run.trace).spans, row.figures
        met = [span for span in spans if span.lane == "replica"]
        assert seen.replica_bytes == sum(span.args["bytes"] for span in met) / 2 / 6
        assert bool(seen.replica_bytes) == bool(met) == (row.setting.replicas == 2)
        if met:
            assert seen.row_bytes == seen.replica_bytes and seen.rows == 0  # lookups stay at home
            assert 0 < seen.replica <= seen.communication and seen.exposed_replica <= seen.exposed
    exact, averaged = copies[1].rows[2:]
    assert 0 < report.replica_share(exact) < 1  # copies tell each other keys, too
    met = [span for span in read(copies[0][2].trace).spans if span.name == "replica_reduce"]
    assert len(met) == 2 * 6 * 2  # ranks, steps, micro-batches
    batches = [s.batch for s in read(copies[0][3].trace).spans if s.name == "average" and s.rank == 1]
    assert batches == [1, 3, 5]
    assert exact.figures.step != exact.figures.mean_step
    assert averaged.figures.step == averaged.figures.mean_step
    ratio = copies[1].rows[0].figures.mean_step / averaged.figures.mean_step
    assert averaged.ratios == [ratio]


@pytest.mark.parametrize(
    ("violations", "never", "message"),
    [
        (["exchange waits for compute"], [], "exchange waits for compute"),
        ([], [("compute", "exchange", 0, "same")], "edges never exercised: .*compute.*; run more steps"),
    ],
)
def test_a_trace_whose_edges_are_not_honoured_gives_no_figures(monkeypatch, violations, never, message):
    found = SimpleNamespace(honoured=False, violations=violations, never_exercised=never)
    trace = SimpleNamespace(metadata={"edges": [1]}, spans=[])
    monkeypatch.setattr(lab_figures, "read", lambda path: trace)
    monkeypatch.setattr(lab_figures, "check_trace", lambda _: found)
    with pytest.raises(LabError, match=message):
        lab_figures.figures(SimpleNamespace(trace="", setting="dbp"))


def test_ratios_are_of_runs_of_one_round(plan):
    """The machine may be slower in another round, and the baseline is then, too."""
    plain = Measurement(
        Figures(*([1.0] * (len(fields(Figures)) - 1)), busy={"compute": 0.5}), {}, "identical", 5, 2
    )

    def run(step):
        figures = replace(plain.figures, step=step, mean_step=step, busy={"compute": step / 20})
        return replace(plain, figures=figures)

    baselines, others = (6.0, 12.0, 9.0), (3.0, 4.0, 1.0)
    rounds = [[run(a), *(run(b) for _ in plan.settings[1:])] for a, b in zip(baselines, others, strict=True)]
    found = rows(plan, rounds)
    assert found[0].ratios == [1.0, 1.0, 1.0] and found[1].ratios == [2.0, 3.0, 9.0]
    assert found[1].figures.step == 3.0 and found[0].figures.busy == {"compute": 9 / 20}
    assert (found[1].tasks, found[1].overruns) == (15, 6)
