"""Promise: the lab compares losses before it measures, and its figures are those of the traces."""

import io
import json
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from tritonrec.files import save_json
from tritonrec.harness.lab import figures as lab_figures
from tritonrec.harness.lab import report
from tritonrec.harness.lab.figures import WARMUP, Figures, StageCost, medians, stage_costs
from tritonrec.harness.lab.network import LabError
from tritonrec.harness.lab.rounds import LabConfig, Measurement, Result, measure, rows
from tritonrec.harness.lab.run import TOLERANCE, LabRun, compare_losses, run_once
from tritonrec.harness.lab.settings import (
    BASELINE,
    Setting,
)
from tritonrec.trace import Span, read

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
        with pytest.raises(LabError, match="sample 7"):
            compare_losses(run_with(other, nest), reference, tolerance=TOLERANCE)


def test_losses_of_approximate_copies_are_told_and_must_be_finite():
    ids, expected = np.array([3, 7]), np.float32([0.5, 1.5])
    reference, away = run_with({0: (ids, expected), 1: (ids, expected)}), np.float32([0.55, 1.5])
    text = compare_losses(run_with({0: (ids, expected), 1: (ids, away)}), reference, tolerance=np.inf)
    assert text == "APPROXIMATE, within 10.0% a sample and +2.50% in the last mean"
    for broken in (np.nan, np.inf):
        lost = run_with({0: (ids, expected), 1: (ids, np.float32([0.5, broken]))})
        with pytest.raises(LabError, match="step 1, sample 7"):
            compare_losses(lost, reference, tolerance=np.inf)


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


@pytest.mark.multi_rank
def test_losses_are_equal_across_modes_and_rounds(result):
    assert [row.losses for row in result.rows[:2]] == ["identical", "identical"]
    assert result.rows[2].losses.startswith("within")


@pytest.mark.multi_rank
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
def test_stage_costs_leave_out_the_warm_up(runs):
    spans = read(runs[0][0].trace).spans
    slow = [replace(span, end_ns=span.end_ns + 10**12) if span.batch < WARMUP else span for span in spans]
    assert stage_costs(slow) == stage_costs(spans)


@pytest.mark.multi_rank
def test_the_report_says_what_is_emulated(result):
    console = Console(record=True, width=80, file=io.StringIO())
    report.print_report(result, console)
    text = console.export_text()
    assert "EMULATED: compute 30.0 ms per step" in text and "emulated tasks took longer" in text
    assert "nestpipe" in text and "identical of sequential: nestpipe N=3" in text
    assert "…" not in text  # nothing is cut at eighty columns
    plain = replace(result, seconds={})
    assert "EMULATED" not in " ".join(report.notes(plain)) and "nothing emulated" in " ".join(
        report.notes(plain)
    )


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
def test_exact_copies_are_exact_and_averaged_ones_are_called_approximate(copies):
    assert [row.setting.replicas for row in copies[1].rows] == [1, 1, 2, 2]
    assert [row.losses for row in copies[1].rows[:3]] == ["identical"] * 3
    assert copies[1].rows[3].losses.startswith("APPROXIMATE, within ")
    assert float(copies[1].rows[3].losses.split()[2].rstrip("%")) > 0  # or nothing was averaged


@pytest.mark.multi_rank
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


@pytest.mark.multi_rank
def test_kept_rows_are_a_share_of_the_batchs(job, copies):
    found = [row.figures.kept for row in copies[1].rows]
    assert found[0] == 0  # one buffer
    assert found[2] == pytest.approx(found[1], rel=1e-12)  # copies hold the keys of them all
    assert 0 < found[3] < found[2]  # the pipeline runs empty before every average
    kept = total = 0
    before = None
    for step in range(6):
        batch = job.loader().batch(step)
        keys = set(torch.cat([batch.ids, batch.labels, batch.negatives.flatten()]).tolist())
        if before is not None:
            kept, total = kept + len(keys & before), total + len(keys)
        before = keys
    assert found[1] == pytest.approx(kept / total, rel=1e-12) and 0 < found[1] < 1


@pytest.mark.multi_rank
def test_the_report_has_lines_of_the_copies(copies, tmp_path):
    console = Console(record=True, width=80, file=io.StringIO())
    report.print_report(copies[1], console)
    text = console.export_text()
    assert "Replica reduction" in text and "APPROXIMATE: nestpipe N=2 replicas=2" in text
    assert "…" not in text
    document = report.as_json(copies[1])["rows"]
    assert [row["approximate"] for row in document] == [False, False, False, True]
    assert [row["replicas"] for row in document] == [1, 1, 2, 2] and document[3]["replica_bytes"] > 0
    report.draw_report(copies[1], tmp_path / "copies.png")
    assert (tmp_path / "copies.png").stat().st_size > 10_000


def test_ratios_are_of_one_round_and_figures_medians():
    plain = Figures(*([1.0] * len(fields(Figures))))
    assert medians([replace(plain, step=step) for step in (3.0, 1.0, 2.0)]).step == 2.0


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
    plain = Measurement(Figures(*([1.0] * len(fields(Figures)))), {}, "identical", 5, 2)

    def run(step):
        return replace(plain, figures=replace(plain.figures, step=step, mean_step=step))

    baselines, others = (6.0, 12.0, 9.0), (3.0, 4.0, 1.0)
    rounds = [[run(a), *(run(b) for _ in plan.settings[1:])] for a, b in zip(baselines, others, strict=True)]
    found = rows(plan, rounds)
    assert found[0].ratios == [1.0, 1.0, 1.0] and found[1].ratios == [2.0, 3.0, 9.0]
    assert found[1].figures.step == 3.0 and (found[1].tasks, found[1].overruns) == (15, 6)


def test_bytes_of_shared_links_have_a_table_beside_those_of_sequential_training(job):
    plan = LabConfig(job, 4, 100.0, ["nestpipe"], [4], {"nodes": 2}, nodes=2)
    plain = Measurement(Figures(*([1.0] * len(fields(Figures)))), {}, "identical", 0, 0)
    sent = [replace(plain, figures=replace(plain.figures, link_bytes=each)) for each in (4e6, 6e6, 3e6)]
    console = Console(record=True, width=80, file=io.StringIO())
    report.print_report(Result(plan, rows(plan, [sent]), {}), console)
    text = console.export_text()
    assert "4 ranks on 2 machines" in text
    lines = [
        line.split("│")[1:-1] for line in text.partition("left a machine")[2].splitlines() if "│" in line
    ]
    assert [[cell.strip() for cell in line[-3:]] for line in lines if line[-1].strip()] == [
        ["1", "4.00", "1.00"], ["1", "6.00", "1.50"], ["2", "3.00", "0.75"],
    ]  # fmt: skip
    assert report.as_json(Result(plan, rows(plan, [sent]), {}))["rows"][2]["nodes"] == 2


def test_costs_are_of_the_steps_behind_the_warm_up():
    """Two batches of 100 ns warm up, two of 10 and 30 ns follow, on two ranks; one stage sends."""
    spans = [
        Span(rank, lane, name, 0, length, batch, None, {"bytes": length} if name == "exchange" else {})
        for rank in (0, 1)
        for batch, length in enumerate((100, 100, 10, 30))
        for lane, name in (("compute", "compute"), ("communication", "exchange"))
    ]
    costs = stage_costs(spans)
    assert costs["compute"] == StageCost("compute", 1.0, 20e-9, None)
    assert costs["exchange"] == StageCost("communication", 1.0, 20e-9, 20)


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (["identical", "identical"], ["identical in every bit in all modes"]),
        (["identical", "within 1e-06"], ["identical of sequential: a", "within 1e-06 of sequential: b"]),
        (["within 1e-06", "within 1e-06"], ["within 1e-06 of sequential: a, b"]),
    ],
)
def test_losses_are_called_identical_only_if_all_are(outcomes, said):
    rows = [SimpleNamespace(losses=losses, setting=name) for losses, name in zip(outcomes, "ab", strict=True)]
    assert report.losses(SimpleNamespace(rows=[SimpleNamespace(losses="identical"), *rows])) == said
