"""Promise: a plan counts the rows that a run will have, adds up what each rank needs, and says what lacks."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from mmap import mmap

import commands
import pytest
import torch
from rich.console import Console

from tritonrec.capacity import Room, Sizes, resident_bytes
from tritonrec.distributed import Communicators
from tritonrec.embedding import Eviction, Placement, TablePolicy
from tritonrec.harness.job import Job
from tritonrec.harness.plan import report
from tritonrec.harness.plan.beside import BesidePlan, Planned, beside_plan_line
from tritonrec.harness.plan.forecast import Counted, count_rows, forecast
from tritonrec.harness.plan.report import plan_run
from tritonrec.harness.plan.trial import Rank, _highest, _more, _pace_of, trial, trials
from tritonrec.harness.progress import Pace
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.kernels.compilation import compiling, note_compilation
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig

SIZES = HSTUConfig(dim=8, heads=2, qk_dim=4, v_dim=4, max_seq_len=9)
JOB = Job("zipf:users=90,items=700,seed=1", batch_size=8, max_seq_len=9, num_negatives=3, sizes=SIZES)
RUN = Run(JOB, steps=24, window=WindowConfig(2))
MIB = 1 << 20


@pytest.mark.parametrize("model", ["hstu", "dlrm"])
def test_the_rows_counted_are_those_of_the_run(model):
    run = RUN if model == "hstu" else replace(RUN, job=replace(JOB, data="criteo:samples=600", model="dlrm"))
    counted = count_rows(run)
    summary = train(Communicators.local(), run, quiet=True)
    assert counted.steps == run.steps
    assert sum(counted.rows) == summary["tables"]["rows"]


def test_rows_beyond_those_that_were_counted_go_on_growing():
    """A log that never repeats an id grows by the same number in every step."""
    job = replace(JOB, data="zipf:users=400,items=2000000,exponent=0,seed=1")
    (whole,) = count_rows(replace(RUN, job=job, steps=40)).rows
    counted = count_rows(replace(RUN, job=job, steps=40), seconds=0.0)
    assert counted.steps < 40
    assert 0.5 < counted.rows[0] / whole < 2


@pytest.mark.parametrize(("model", "merge"), [("dlrm", True), ("dlrm", False), ("hstu", True)])
def test_a_capacity_bounds_the_rows_of_each_table_by_its_own_new_ones(model, merge):
    job = JOB if model == "hstu" else replace(JOB, data="criteo:samples=600", model="dlrm", merge=merge)
    tables = [len(group.layout.names) for group in job.tables(RUN.optimizer).groups]
    free, new = (count_rows(replace(RUN, job=job, steps=steps)).rows for steps in (24, 2))
    policy = TablePolicy(Eviction("lru", capacity=20))
    rows = count_rows(replace(RUN, job=replace(job, policy=policy))).rows
    assert rows == [min(a, 20 * count + b) for a, b, count in zip(free, new, tables, strict=True)]
    assert rows != free


@pytest.mark.parametrize("admission", [2, 4])
def test_rows_and_waiting_keys_of_a_run_that_admits_late(admission):
    run = replace(RUN, job=replace(JOB, policy=TablePolicy(admission=admission, admission_window=5)))
    counted = count_rows(run)
    model, tables, optimizer = run.job.build(run.optimizer)
    with Trainer(model, tables, optimizer, Communicators.local(), "sequential", RUN.window) as trainer:
        most = [
            len(tables.groups[0].table._candidates)
            for _ in trainer.run(map(run.job.loader().batch, range(24)))
        ]
    assert counted.rows == [len(tables.groups[0].table)] != count_rows(RUN).rows
    assert counted.waiting == [max(most)] and most[-1] > 0


def test_keys_that_wait_for_a_row_are_memory():
    waits = [replace(tried().tables[0], waiting=48_000)]
    found = forecast(RUN, [tried(tables=waits)] * 2, Counted([20], 24, [4001]), None)
    plain = forecast(RUN, [tried()] * 2, Counted([20], 24, [0]), None)
    assert found.ranks[0].peak - plain.ranks[0].peak == 48 * 2001 - 48_000
    assert plain.ranks[0].work - found.ranks[0].work == 48_000
    assert found.ranks[0].keys - plain.ranks[0].keys == 48 * 2001


def tried(**changes):
    """A rank of 10 rows of 100 bytes, with other values."""
    found = Rank(
        began=1000 * MIB, trained=1200 * MIB, evaluated=1100 * MIB,
        tables=[Sizes(10, 100, 12 * 16, 0, 0, weight_bytes=25)],
        dense_bytes=7, dense_began=3, step_seconds=0.5, evaluation_seconds=10.0, save_seconds=100.0,
        link_bytes=3.0,
    )  # fmt: skip
    return replace(found, **changes)


def of(*ranks, rows=1_000_000, left=1 << 40, replicas=1, **run):
    room = Room(left, left, "it")
    return forecast(replace(RUN, steps=90, **run), list(ranks), Counted([rows], 90), room, replicas)


def test_the_parts_of_a_rank():
    (need,) = of(tried()).ranks
    slots = 1 << 21  # a million keys, at most three quarters full
    assert (need.process, need.dense) == (1000 * MIB - 3, 7)
    assert (need.rows, need.states, need.values) == (25_000_000, 75_000_000, 100 * 1_000_000)
    # The last doubling begins at 786,432 rows, and both structures are there for 209,715 more at most.
    doubling = 12 * slots // 2 - 100 * (1_000_000 - 786_432 - 209_715)
    assert need.keys == 12 * slots and need.doubling == doubling > 0
    assert need.work == 200 * MIB - 10 * 100 - 12 * 16 - 4
    training = need.process + need.dense + need.work + need.values + need.keys + need.doubling
    assert need.peak == training + need.evaluation + need.saving
    assert need.evaluation == need.saving == 0
    (need,) = of(tried(evaluated=1300 * MIB)).ranks  # an evaluation copies no table
    assert need.peak == 1300 * MIB + 100 * 999_990 + 12 * (slots - 16)
    assert need.peak == training + need.evaluation


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_share_the_rows(world_size):
    found = of(*[tried() for _ in range(world_size)], rows=1_000_003)
    assert [rank.values for rank in found.ranks] == [-(-1_000_003 // world_size) * 100] * world_size
    assert found.rows == 1_000_003
    assert found.checkpoint == 7 + 1_000_003 * 108


def test_copies_of_the_tables_are_shared_by_fewer_ranks():
    found = of(*[tried() for _ in range(4)], replicas=2)
    assert [rank.values for rank in found.ranks] == [500_000 * 100] * 4
    assert found.checkpoint == 7 + 1_000_000 * 108


@pytest.mark.parametrize(("lack", "copies"), [(1, "2"), (60, "1"), (80, None)])
def test_fewer_copies_of_the_tables_are_advised_where_they_fit(lack, copies):
    """Four copies of 100 MB of rows and their keys, on eight ranks."""
    ranks = [tried() for _ in range(8)]
    needs = of(*ranks, replicas=4).ranks
    needed, tables = sum(rank.peak for rank in needs), sum(rank.tables for rank in needs)
    found = of(*ranks, replicas=4, left=needed - tables * lack // 100)
    first = found.advice()[0]
    assert first.startswith("tables on" if copies is None else f"--replicas {copies}: one takes")
    if copies:
        assert of(*ranks, replicas=int(copies), left=found.room.left).lacking <= 0 < found.lacking


def test_bytes_sent_are_those_of_one_rank():
    run = replace(RUN, steps=6, mode="sequential")
    found = run_ranks(2, lambda communicators: trial(communicators, run, 6))
    whole = run_ranks(2, lambda communicators: train(communicators, run, quiet=True))
    sent = whole[0]["lookups"]["key_bytes"] + whole[0]["lookups"]["row_bytes"]
    assert sum(each["link_bytes"] for each in found) * 6 == pytest.approx(sent)
    assert sent > 0


def test_a_run_that_has_fewer_rows_than_its_trial():
    (need,) = of(tried(), rows=3).ranks
    assert (need.values, need.doubling, need.peak) == (1000, 0, 1200 * MIB)


def test_times_of_evaluations_and_saves():
    assert of(tried()).seconds == 45 + 10
    assert of(tried(), evaluate_every=40).seconds == 45 + 3 * 10
    assert of(tried(), save_every=45).seconds == 45 + 10
    assert of(tried(saved=1), checkpoint="a", save_every=45).seconds == 45 + 10 + 2 * 100
    assert of(tried(), tried(step_seconds=0.7)).step_seconds == 0.7


def test_the_highest_phase_is_the_peak():
    saving = of(tried(saved=3000 * MIB), checkpoint="a").ranks[0]
    assert saving.saving > 0 and saving.peak > 3000 * MIB
    assert of(tried(saved=3000 * MIB)).ranks[0].saving == 0
    training = of(tried(trained=4000 * MIB)).ranks[0]
    assert training.evaluation == 0 and training.peak > 4000 * MIB


def test_what_lacks_and_what_would_fit():
    """With what policies and a disk take of a row beside its values: here of 1,000 bytes."""
    sizes = Sizes(10, 1000, 12 * 16, 0, 0, weight_bytes=250)
    ranks, count = [tried(tables=[sizes]) for _ in range(2)], 10_000_000
    fits = of(*ranks, rows=count)
    assert fits.lacking < 0 and not fits.advice()
    needed = sum(rank.peak for rank in fits.ranks)
    left = needed - 3000 * MIB
    short = of(*ranks, rows=count, left=left)
    assert short.lacking == 3000 * MIB
    machines, evicting, disk, tiers = short.advice()

    def with_tables(rows=count, **changes):
        other = replace(sizes, **changes)
        return of(*[tried(tables=[other]) for _ in ranks], rows=rows, left=left).lacking

    # Metadata of one policy, and of a pass, are those of the trial's rows more: ten have none yet.
    chooses = {"passing": 60, "policies": 1}
    size = int(tiers.partition("tiers ")[2].partition("MiB:100")[0]) * MIB
    assert -60 * MIB <= with_tables(size=size, **chooses) <= 0
    assert machines == "tables on 2 machines of 2 ranks each"
    assert tiers.endswith("4.7 GiB less, and 821 MiB more while it chooses"), tiers
    memory = int(disk.removeprefix("--storage disk: --disk-memory ").partition("MiB")[0]) * MIB
    assert "% of the rows in memory" in disk and memory > 100 * MIB
    places = 8 * count + 11 * 2 * memory // 1000
    assert -60 * MIB <= with_tables(most=memory) + places <= 0
    size = int(evicting.partition("lru:")[2].partition("MiB")[0]) * MIB
    kept = Eviction("lru", capacity=f"{size}").rows_of(250)
    assert -100 * MIB <= with_tables(rows=kept, kept=16, **chooses) <= 0
    ranks = [tried(), tried()]
    fits = of(*ranks, rows=count)
    needed = sum(rank.peak for rank in fits.ranks)
    tiers = of(*ranks, rows=count, left=needed - 100 * MIB).advice()[-1]
    assert tiers.endswith("more while it chooses, not enough alone"), tiers
    rest = needed - sum(rank.tables for rank in fits.ranks)
    work = sum(rank.work for rank in fits.ranks)
    (only,) = of(*ranks, left=rest - work // 4).advice()
    assert "are no tables" in only and "at most 75% of this batch" in only and "at most 1 ranks here" in only
    (only,) = of(*ranks, left=rest // 2 - 1).advice()
    assert "no batch is small enough" in only and "one rank does not fit" in only


def test_what_would_fit_where_keys_alone_do_not():
    """With places of rows that have just doubled, 7.6 bytes a row."""
    ranks = [tried(tables=[Sizes(10, 100, 12 * 16, 61, 0, weight_bytes=25)]) for _ in range(2)]
    rows = 2 * (1 << 22) + 2000
    needs = of(tried(), tried(), rows=rows).ranks
    rest = sum(rank.peak - rank.tables for rank in needs)
    keys = sum(rank.keys + rank.doubling for rank in needs)
    assert keys > 150 * MIB
    left = rest + 150 * MIB
    (disk,) = (each for each in of(*ranks, rows=rows, left=left).advice() if "--storage disk" in each)
    options, _, why = disk.partition(", for ")
    assert "of keys alone do not fit" in why and options.endswith(" --disk-index-memory 1MiB")
    memory = int(options.removeprefix("--storage disk: --disk-memory ").partition("MiB")[0]) * MIB
    bounded = [
        replace(each, tables=[replace(table, most=memory, most_keys=MIB) for table in each.tables])
        for each in ranks
    ]
    places = 11 * 2 * memory // 100
    assert -6 * MIB <= of(*bounded, rows=rows, left=left).lacking + places <= 0
    (disk,) = (each for each in of(*ranks, rows=rows, left=rest + 60 * MIB).advice() if "disk" in each)
    assert "of keys alone do not fit, nor do 64 MiB of places of rows" in disk, disk


def test_a_run_of_several_machines_is_not_tried(monkeypatch):
    def refused(communicators):
        with pytest.raises(ValueError, match="plan tries a run on one machine: start all ranks on it"):
            trials(replace(communicators, machines=2), RUN, 4)
        return True

    assert run_ranks(2, refused) == [True] * 2


@pytest.mark.if_changed
def test_the_most_of_a_phase_is_seen_however_short_and_that_before_is_forgotten():
    for size in (300, 60):
        before = resident_bytes()
        with _highest() as most, mmap(-1, size * MIB) as pages:  # which malloc has not had before
            torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
        assert abs(most[0] - before - size * MIB) < 20 * MIB


def test_a_trial_measures_every_part():
    run = replace(RUN, checkpoint="somewhere")
    found = Rank(**{name: value for name, value in trial(Communicators.local(), run, 8).items()})
    assert 0 < found.began <= found.trained and found.evaluated > 0 and found.saved > 0
    assert found.step_seconds > 0 and found.evaluation_seconds > 0 and found.save_seconds > 0
    (table,) = found.tables
    assert table["rows"] > 100 and table["row_bytes"] == 4 * 3 * 8 and table["weight_bytes"] == 4 * 8
    assert 0 < 2 * found.dense_began < found.dense_bytes  # the states of Adam come with the first step
    assert found.disk_read == found.disk_written == 0


def test_rows_read_and_written_on_a_disk_are_those_of_a_step(tmp_path):
    place = Placement("disk", path=str(tmp_path), memory="8KiB")
    on_disk = replace(RUN, mode="sequential", job=replace(JOB, placement=place))
    found = trial(Communicators.local(), on_disk, 8)
    model, tables, optimizer = on_disk.job.build(on_disk.optimizer)
    with Trainer(model, tables, optimizer, Communicators.local(), "sequential", RUN.window) as trainer:
        list(trainer.run(map(on_disk.job.loader().batch, range(8))))
    moved = tables.groups[0].table.counters
    assert found["disk_read"] == moved.disk_read * 96 / 8 > 0
    assert found["disk_written"] == moved.disk_written * 96 / 8 > 0
    rank = tried(disk_read=3e6, disk_written=1.5e6)
    said = Console(file=io.StringIO())
    report.print_forecast(of(rank, tried()), said)
    assert "disk: 3.00 MB of rows read and 1.50 MB written a step and rank, 9.0 MB/s" in said.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "steps", "last"),
    [(1.0, 500, 32), (30.0, 500, 12), (0.01, 500, 100), (0.01, 40, 40), (2.0, 9, 9), (0.0, 500, 100)],
)
def test_a_trial_has_as_many_steps_as_its_seconds_hold(seconds, steps, last):
    """From the pace of the slowest rank, after the steps that compile."""
    first = min(12, steps)

    def more(communicators):
        pace = seconds / (2 - communicators.rank)
        ends = [99.0 * min(step, 3) + pace * max(step - 3, 0) for step in range(first)]
        return _more(communicators, replace(RUN, steps=steps), ends)

    assert run_ranks(2, more) == [range(first, last)] * 2


@pytest.mark.if_changed
def test_the_command(tmp_path):
    config, report = tmp_path / "run.toml", tmp_path / "plan.json"
    config.write_text('steps = 9\n[job]\ndata = "zipf:users=90,items=700,seed=1"\n[job.sizes]\ndim = 8\n')
    words = ["plan", config, "--trial-steps", 5, "--json", report]
    code, output, error = commands.invoke(*words)
    assert code == 0, (output, error)
    assert "fits: all ranks need" in output and "optimizer states of rows" in output and "disk:" not in output
    found = json.loads(report.read_text())
    assert found["steps"] == 9 and found["lacking"] < 0 and len(found["ranks"]) == 1
    code, output, _ = commands.invoke(*words, "--memory", "64MiB")
    assert code == 0 and "DOES NOT FIT" in output and "are no tables" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "much"], "--memory must be bytes, or such as"),
        (["--costs", "costs.json"], "--costs does not go with the settings of a run"),
        (["--world-size", "3", "--replicas", "2"], "replicas"),
    ],
)
def test_what_the_command_refuses(tmp_path, words, message):
    config = tmp_path / "run.toml"
    config.write_text('steps = 9\n[job]\ndata = "zipf:users=90,items=700,seed=1"\n')
    code, output, _ = commands.invoke("plan", config, *words)
    assert code == 2 and message in output, output


PLANNED_RUN = ("--data", "zipf:users=90,items=700,seed=1", "--dim", 8, "--steps", 20, "--batch-size", 8)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "run.toml").write_text(
        'steps = 20\n[job]\ndata = "zipf:users=90,items=700,seed=1"\nbatch_size = 8\n[job.sizes]\ndim = 8\n'
    )
    code, _, _ = commands.invoke("plan", folder / "run.toml", "--json", folder / "plan.json")
    assert code == 0
    return folder / "plan.json"


@pytest.mark.if_changed
def test_a_run_is_set_beside_its_plan(plan_file, tmp_path):
    """What rows a run has a plan knows to the row; other outputs are the same run."""
    code, output, _ = commands.invoke(
        "train", *PLANNED_RUN, "--plan", plan_file, "--json", tmp_path / "a.json", "--log-dir", tmp_path / "b"
    )
    found = json.loads((tmp_path / "a.json").read_text())["beside_plan"]
    planned = json.loads(plan_file.read_text())
    assert code == 0 and "beside its plan: " in output
    assert found["rows"] == found["rows_planned"] == planned["rows"]
    assert found["peak_planned"] == planned["ranks"][0]["peak"] and found["peak"] > 1 << 26
    assert found["seconds_per_step_planned"] == planned["step_seconds"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--lr", 0.5), "plan of another run: job.lr is 0.003 there, and 0.5 here"),
        (("--checkpoint", "somewhere"), "plan of another run: checkpoint is None there, and True here"),
        (("--world-size", 2), "is a plan for 1 ranks, and here are 2"),
        (("--elastic", "--peer-copies", 2), "--plan does not go with --slipstream, nor with --elastic"),
    ],
)
def test_a_plan_of_another_run_is_refused(plan_file, options, says):
    code, output, _ = commands.invoke("train", *PLANNED_RUN, "--plan", plan_file, *options)
    assert code and says in output


@pytest.mark.parametrize(
    "change",
    [
        ("ranks", None), ("settings", "a = "), ("rows", "many"), ("rows", -1), ("step_seconds", float("nan")),
        ("step_seconds", 0), ("ranks", [{"peak": -5}]), (None, None),
    ],
)  # fmt: skip
def test_a_file_that_is_no_plan_is_named(plan_file, tmp_path, change):
    name, value = change
    other = tmp_path / "other.json"
    document = {**json.loads(plan_file.read_text()), name: value} if name else [1]
    other.write_text(json.dumps(document))
    code, output, _ = commands.invoke("train", *PLANNED_RUN, "--plan", other)
    assert code and f"{other.name} is no plan of a run" in output


def test_more_memory_or_time_than_planned_is_said_once_and_the_pace_ever_more_seldom(monkeypatch):
    peaks, lines, pace = [100, 209, 211, 400, 400], [], Pace()
    monkeypatch.setattr("tritonrec.harness.plan.beside.peak_bytes", lambda: peaks.pop(0) * MIB)
    monkeypatch.setattr("tritonrec.harness.plan.beside.LOOK_SECONDS", 0)
    beside = BesidePlan(Planned([7, 200 * MIB], 5, 0.1), 1, pace, lines.append)
    for step in range(300):
        pace.on_step_end(step, 0.112 if step < 200 else 1.0, last=False)
        beside.on_step_end(step + 1)
        if step == 3:
            assert lines == ["memory: 211 MiB are taken, and 200 MiB were planned"]
    assert len(lines) == 1 and len(peaks) == 2  # at 64, 128 and 256 steps the median was within 1.15
    for step in range(300, 512):
        pace.on_step_end(step, 1.0, last=False)
        beside.on_step_end(step + 1)
    assert lines[1:] == ["time: a step takes 1000.0 ms, and 100.0 were planned"]


def test_the_rank_that_exceeds_its_plan_most_is_shown(monkeypatch):
    monkeypatch.setattr("tritonrec.harness.plan.beside.peak_bytes", lambda: 300 * MIB)

    def rank(communicators):
        planned = Planned([600 * MIB, 200 * MIB], 5, 0.1)
        return BesidePlan(planned, communicators.rank, Pace(), print).outcome(communicators, 7)

    first, second = run_ranks(2, rank)
    assert first == second
    assert beside_plan_line(first) == (
        "beside its plan: 300 MiB of 200 MiB (1.50) at most on a rank, 7 rows of 5, too few steps to time"
    )


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


@pytest.mark.parametrize("compiles", [False, True])
def test_a_trial_says_whether_it_compiled(compiles, monkeypatch):
    run, trials = replace(RUN, steps=4), sys.modules[trial.__module__]
    evaluate = trials.evaluate_model
    monkeypatch.setattr(
        trials, "evaluate_model", lambda *given: (note_compilation() if compiles else None, evaluate(*given))
    )
    trial(Communicators.local(), run, 2)  # compiles what it needs
    before = list(compiling)
    assert trial(Communicators.local(), run, 2)["compiled"] == compiles and compiling == before


def test_a_trial_that_compiled_is_made_again(monkeypatch):
    """The memory of its compiler would be foretold; the run finds its kernels compiled."""
    run, found = replace(RUN, steps=4), []

    def alone(function, *given):
        found.append({**function(Communicators.local(), *given), "compiled": not found})
        return found[-1]

    monkeypatch.setattr(report, "alone", alone)
    plan_run(run, 1, trial_steps=2, console=Console(file=io.StringIO()))
    assert [each["compiled"] for each in found] == [True, False]


@pytest.mark.if_changed
def test_a_plan_under_a_launcher_tries_its_ranks(tmp_path):
    """Each of them had planned a run of one rank."""
    config, found = tmp_path / "run.toml", tmp_path / "plan.json"
    config.write_text('steps = 6\n[job]\ndata = "zipf:users=60,items=80,seed=3"\n[job.sizes]\ndim = 8\n')
    launched = [*TORCHRUN, "tritonrec", "plan", config, "--trial-steps", "4", "--json", found]
    said = subprocess.run(launched, capture_output=True, text=True, timeout=240)
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("all ranks need") == 1 and len(json.loads(found.read_text())["ranks"]) == 2
    said = subprocess.run([*launched, "--world-size", "3"], capture_output=True, text=True, timeout=240)
    assert said.returncode and "--world-size 3 is not that of the launcher's 2 ranks" in said.stderr


def parent(communicators, number):
    return {"parent": os.getppid(), "rank": communicators.rank, "number": number}


@pytest.mark.if_changed
def test_one_rank_is_tried_in_a_process_like_the_commands_own():
    """A fork of the ranks' server has 150 MB less of libraries: a plan of one rank was 0.75 of its run."""
    assert report.alone(parent, 5) == {"parent": os.getpid(), "rank": 0, "number": 5}


def test_a_trial_times_steps_as_a_run_does():
    """By the median of updates: a run that ends and another that begins are no step of theirs."""
    ends = list(accumulate([9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0]))
    assert _pace_of(ends, 1) == 1.0
    assert _pace_of(list(accumulate([9.0, 9.0, 9.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0])), 2) == 2.0
    assert _pace_of([4.0, 6.0], 1) == 2.0 and _pace_of([4.0], 1) == 0.0
