"""Promise: the lab compares losses before it measures, and its figures are those of the traces."""

import io
import json
import re
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tritonrec.distributed import RankPool
from tritonrec.harness.cli import app
from tritonrec.harness.lab import report, rounds
from tritonrec.harness.lab import settings as lab_settings
from tritonrec.harness.lab.figures import WARMUP, Figures, medians, stage_costs
from tritonrec.harness.lab.network import LabError
from tritonrec.harness.lab.rounds import Plan, Result, measure, rows
from tritonrec.harness.lab.run import TOLERANCE, Run, compare_losses, run_once
from tritonrec.harness.lab.settings import (
    BASELINE,
    PAPER,
    Emulation,
    Setting,
    parse_emulation,
    parse_proportions,
    parse_switches,
    settings,
    share,
)
from tritonrec.pipeline import Window, WindowConfig
from tritonrec.trace import read

# What is asked for.


def test_the_baseline_comes_first_and_nothing_twice():
    chosen = settings(["sequential", "dbp", "nestpipe"], [1, 4], {"clustering": True})
    assert [str(setting) for setting in chosen] == [
        "sequential N=1", "sequential N=4", "dbp N=1", "nestpipe N=1", "nestpipe N=4",
        "nestpipe N=1 clustering", "nestpipe N=4 clustering",
    ]  # fmt: skip


def test_copies_that_are_averaged_have_the_exact_ones_beside_them():
    chosen = settings(["nestpipe"], [4], {"replicas": 2, "average_every": 3, "first_use": True})
    assert [setting.label for setting in chosen] == [
        "sequential", "nestpipe", "nestpipe replicas=2 first_use",
        "nestpipe replicas=2 average_every=3 first_use APPROXIMATE",
    ]  # fmt: skip
    assert [setting.approximate for setting in chosen] == [False, False, False, True]


def test_switches_are_the_fields_of_the_window():
    assert parse_switches(["clustering", "dedup=none", "grid-bits=30", "replicas=2"]) == {
        "clustering": True, "dedup": "none", "grid_bits": 30, "replicas": 2
    }  # fmt: skip
    for field in fields(WindowConfig):
        if field.name not in ("micro_batches", "seed"):
            text = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
            assert parse_switches([f"{field.name}={text}"]) == {field.name: field.default}


def test_an_unknown_switch_lists_those_there_are():
    names = {each.name for each in fields(WindowConfig)} - {"micro_batches", "seed"} | {"replicas"}
    known = re.escape(", ".join(sorted(names)))
    with pytest.raises(LabError, match=f"--switch 'clusterin': unknown; the switches are {known}$"):
        parse_switches(["clusterin"])
    with pytest.raises(LabError, match="unknown"):
        parse_switches(["micro_batches=3"])
    with pytest.raises(LabError, match="takes true or false"):
        parse_switches(["clustering=often"])
    with pytest.raises(LabError, match="takes a whole number"):
        parse_switches(["accumulate=1.5"])


def test_emulated_stages():
    assert parse_emulation("") == {}
    seconds = parse_emulation("lookup=60ms, compute=25")
    assert seconds.pop("compute") == 0.025
    assert seconds.keys() == {"prefetch", "h2d", "route", "retrieve"}
    assert sum(seconds.values()) == pytest.approx(0.06)
    for text in ("sleep=3", "compute", "compute=fast", "compute=-1", "compute=0", "compute=nan"):
        with pytest.raises(LabError, match="--emulate"):
            parse_emulation(text)


def test_proportions():
    assert parse_proportions("paper") == PAPER
    assert parse_proportions("40, 25.5") == {"lookup": 0.4, "communication": 0.255}
    for text in ("", "40", "60,40", "0,20", "-3,20", "a,b", "1,2,3"):
        with pytest.raises(LabError, match="--proportions takes"):
            parse_proportions(text)


def test_a_wrong_window_is_an_error_before_anything_is_made(job):
    with pytest.raises(LabError, match="nestpipe N=2 dedup=twice: dedup must be"):
        Plan(job, micro_batches=[2], switches={"dedup": "twice"})
    with pytest.raises(LabError, match="nestpipe N=2 replicas=3: 3 replicas do not divide 4 ranks"):
        Plan(job, 4, micro_batches=[2], switches={"replicas": 3})
    assert Plan(job, 4, micro_batches=[2], switches={"replicas": 2}).settings[-1].replicas == 2
    with pytest.raises(LabError, match="average_every=2: there is one copy of the tables"):
        Plan(job, 4, switches={"average_every": 2})
    with pytest.raises(LabError, match="replicas=2: replicas need dedup before the lookup"):
        Plan(job, 4, switches={"dedup": "exchange", "replicas": 2})
    # Measured are all steps but two: seven, which hold no whole number of threes.
    with pytest.raises(LabError, match=r"hold no whole number of averages: --steps 11$"):
        Plan(job, 4, switches={"replicas": 2, "average_every": 3}, steps=9)
    assert Plan(job, 4, switches={"replicas": 2, "average_every": 3}, steps=11).settings[-1].approximate
    with pytest.raises(LabError, match="give one of them"):
        Plan(job, seconds={"compute": 1.0}, proportions=PAPER)
    with pytest.raises(LabError, match="at least 4 steps"):
        Plan(job, steps=3)


# Emulated stages do their work.


class _Program:
    def __init__(self):
        self.done = []
        self.actions = {"compute": self._act, "retrieve": self._act, "exchange": self._act}

    def _act(self, window, micro_batch=None):
        self.done.append((window, micro_batch))


def window_of(job, micro_batches):
    batch = job.loader().batch(0)
    window = Window(0, [batch], 0)
    places = torch.arange(batch.num_samples).split(-(-batch.num_samples // micro_batches))
    window.micro_batches = [batch.select(each) for each in places]
    return window


def test_an_emulated_stage_works_then_waits_for_the_rest(job, monkeypatch):
    slept = []
    clock = SimpleNamespace(perf_counter=lambda: 5.0 + len(program.done) * 0.01, sleep=slept.append)
    monkeypatch.setattr(lab_settings, "time", clock)  # every action takes 10 ms
    program, emulation = _Program(), Emulation({"compute": 0.13, "retrieve": 0.05})
    untouched = program.actions["exchange"]
    emulation.install(program)
    assert program.actions["exchange"] is untouched
    window = window_of(job, 3)  # 13 samples: 5, 5, 3
    for i in range(3):
        program.actions["compute"](window, i)
    program.actions["retrieve"](window)
    assert program.done == [(window, 0), (window, 1), (window, 2), (window, None)]
    assert slept == pytest.approx([0.04, 0.04, 0.02, 0.04])
    assert (emulation.tasks, emulation.overruns) == (4, 0)


def test_work_longer_than_its_time_is_counted(job):
    program, emulation = _Program(), Emulation({"compute": 1e-9})
    emulation.install(program)
    program.actions["compute"](window_of(job, 1), 0)
    assert (emulation.tasks, emulation.overruns) == (1, 1)


def test_micro_batches_share_by_samples(job):
    window = window_of(job, 3)  # 13 samples: 5, 5, 3
    assert [share(window, i) for i in range(3)] == [5 / 13, 5 / 13, 3 / 13]
    assert share(window, None) == 1
    window.micro_batches = [window.micro_batches[0].select(torch.arange(0))] * 4
    assert share(window, 2) == 0.25


# Losses first.


def run_with(losses, setting=BASELINE):
    return Run(setting, len(losses), None, losses, {}, 0, 0)


def test_a_loss_that_differs_in_one_bit_is_found():
    ids = np.array([3, 7, 9])
    wanted = {0: (ids, np.float32([0.5, 1.5, 2.5])), 1: (ids, np.float32([0.25, -0.0, 4.0]))}
    reference, nest = run_with(wanted), Setting("nestpipe", 4)
    assert compare_losses(run_with(wanted, nest), reference, tolerance=0) == "identical"
    one_bit = np.nextafter(np.float32(1.5), np.float32(2))
    off = {**wanted, 0: (ids, np.float32([0.5, one_bit, 2.5]))}
    with pytest.raises(LabError, match=r"nestpipe N=4, step 0, sample 7: .*sequential N=1; no figure"):
        compare_losses(run_with(off, nest), reference, tolerance=0)
    assert compare_losses(run_with(off, nest), reference, tolerance=TOLERANCE).startswith("within")
    zero = {**wanted, 1: (ids, np.float32([0.25, 0.0, 4.0]))}
    with pytest.raises(LabError, match="sample 7"):
        compare_losses(run_with(zero, nest), reference, tolerance=0)
    for far in (1.51, np.nan, np.inf):
        other = {**wanted, 0: (ids, np.float32([0.5, far, 2.5]))}
        with pytest.raises(LabError, match="sample 7"):
            compare_losses(run_with(other, nest), reference, tolerance=TOLERANCE)


def test_losses_of_approximate_copies_are_told_and_must_be_finite():
    ids, wanted = np.array([3, 7]), np.float32([0.5, 1.5])
    reference, away = run_with({0: (ids, wanted), 1: (ids, wanted)}), np.float32([0.55, 1.5])
    text = compare_losses(run_with({0: (ids, wanted), 1: (ids, away)}), reference, tolerance=np.inf)
    assert text == "APPROXIMATE, within 10.0% a sample and +2.50% in the last mean"
    for broken in (np.nan, np.inf):
        lost = run_with({0: (ids, wanted), 1: (ids, np.float32([0.5, broken]))})
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
    return Plan(job, 2, 100.0, ["nestpipe"], [3], switches, seconds, steps=5, rounds=2)


@pytest.fixture(scope="module")
def pool():
    with RankPool([(2, 1), (2, 2)]) as started:
        yield started


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
        assert seen.row_bytes == sent > 0
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
    # A row is twelve float32 there; back, twelve float32 or as many bytes as its sums need.
    assert 12 * 4 < cut.row_bytes / cut.rows < 12 * (4 + 8)
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
    assert "nestpipe" in text and "identical of synchronous: nestpipe N=3" in text
    assert "…" not in text  # nothing is cut at eighty columns
    plain = replace(result, seconds={})
    assert "EMULATED" not in " ".join(report.notes(plain)) and "nothing emulated" in " ".join(
        report.notes(plain)
    )


@pytest.mark.multi_rank
def test_the_document_and_the_picture(result, tmp_path):
    report.save_json(report.as_json(result), tmp_path / "new" / "lab.json")
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


# Copies of the tables: one part on two ranks, so that everything but the copies' meeting stays at home.


@pytest.fixture(scope="module")
def copies(job, pool, tmp_path_factory):
    plan = Plan(job, 2, 100.0, ["nestpipe"], [2], {"replicas": 2, "average_every": 2}, steps=6, rounds=1)
    runs = all_runs(pool, plan, tmp_path_factory.mktemp("copies"))
    return runs[0], Result(plan, rows(plan, [[measure(run, plan, runs[0][0]) for run in runs[0]]]), {})


@pytest.mark.multi_rank
def test_exact_copies_are_exact_and_averaged_ones_are_called_approximate(copies):
    assert [row.setting.replicas for row in copies[1].rows] == [1, 1, 2, 2]
    assert [row.losses for row in copies[1].rows[:3]] == ["identical"] * 3
    assert copies[1].rows[3].losses.startswith("APPROXIMATE, within ")
    assert float(copies[1].rows[3].losses.split()[2].rstrip("%")) > 0  # or nothing was averaged


@pytest.mark.multi_rank
def test_the_copies_meeting_is_counted(copies):
    for run, row in zip(copies[0], copies[1].rows, strict=True):
        spans, seen = read(run.trace).spans, row.figures
        met = [span for span in spans if span.lane == "replica"]
        assert seen.meeting_bytes == sum(span.args["bytes"] for span in met) / 2 / 6
        assert bool(seen.meeting_bytes) == bool(met) == (row.setting.replicas == 2)
        if met:
            assert seen.row_bytes == seen.meeting_bytes and seen.rows == 0  # lookups stay at home
            assert 0 < seen.meeting <= seen.communication and seen.exposed_meeting <= seen.exposed
    exact, averaged = copies[1].rows[2:]
    assert 0 < report.meeting_share(exact) < 1  # copies tell each other keys, too
    assert len([span for span in read(copies[0][2].trace).spans if span.name == "replica_reduce"]) == 12
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
    assert "Copies of the tables meet" in text and "APPROXIMATE: nestpipe N=2 replicas=2" in text
    assert "…" not in text
    document = report.as_json(copies[1])["rows"]
    assert [row["approximate"] for row in document] == [False, False, False, True]
    assert [row["replicas"] for row in document] == [1, 1, 2, 2] and document[3]["meeting_bytes"] > 0
    report.draw_report(copies[1], tmp_path / "copies.png")
    assert (tmp_path / "copies.png").stat().st_size > 10_000


def test_ratios_are_of_one_round_and_figures_medians():
    plain = Figures(*([1.0] * len(fields(Figures))))
    assert medians([replace(plain, step=step) for step in (3.0, 1.0, 2.0)]).step == 2.0


def test_proportions_follow_from_the_probe(job):
    seen = Figures(1.0, 0.1, 0.1, 0.2, 0.2, 0.65, 0.0, 1, 0, 1, 1, 1, 1.0, 0, 0, 0, 0)
    costs = {"compute": rounds.StageCost("compute", 1.0, 0.6, None)}
    probe = rounds.Measured(seen, costs, "identical", 0, 0)
    plan = Plan(job, proportions={"lookup": 0.5, "communication": 0.2})
    seconds = rounds._proportional(probe, plan)
    compute = seconds.pop("compute")
    assert sum(seconds.values()) == pytest.approx(0.5)  # of a step of 0.2 / 0.2
    assert compute == pytest.approx(0.3 - (1.0 - 0.1 - 0.2 - 0.6))  # updates and write-back have their part
    fast = replace(probe, figures=replace(seen, communication=0.01, exposed=0.01, step=0.9))
    with pytest.raises(LabError, match="Lower --rate"):
        rounds._proportional(fast, plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--switch", "magic"], "unknown; the switches are"),
        (["--emulate", "sleep=3"], "no such stage"),
        (["--emulate", "compute=3", "--proportions", "paper"], "give one of them"),
        (["--proportions", "90,20"], "takes paper"),
        (["--rate", "0"], "rate of a link"),
        (["--modes", "sync"], "takes some of"),
        (["--steps", "2"], "at least 4 steps"),
        (["--data", "movies"], "unknown data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_error(monkeypatch, arguments, message):
    from tritonrec.harness.lab import network

    monkeypatch.setattr(network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda name: name)
    monkeypatch.setattr(rounds, "built", lambda *_: pytest.fail("a network was built"))
    result = CliRunner().invoke(app, ["lab", *arguments])
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert message in text and "Traceback" not in text
