"""Promise: a plan counts the rows that a run will have, adds up what each rank needs, and says what lacks."""

import json
from dataclasses import replace

import commands
import pytest

from tritonrec.capacity import Room, Sizes
from tritonrec.distributed import Communicators
from tritonrec.embedding import Eviction, TablePolicy
from tritonrec.harness.job import Job
from tritonrec.harness.plan.forecast import Counted, count_rows, forecast
from tritonrec.harness.plan.trial import Rank, trial
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import WindowConfig

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


def test_a_capacity_bounds_the_rows():
    (free,) = count_rows(RUN).rows
    policy = TablePolicy(Eviction("lru", capacity=20))
    (rows,) = count_rows(replace(RUN, job=replace(JOB, policy=policy))).rows
    assert 20 < rows < free


def tried(**changes):
    """A rank of 10 rows of 100 bytes, with other values."""
    found = Rank(
        began=1000 * MIB, trained=1200 * MIB, evaluated=1100 * MIB, tables=[Sizes(10, 100, 12 * 16, 0, 0)],
        dims=[5], dense_bytes=7, step_seconds=0.5, evaluation_seconds=10.0, save_seconds=100.0,
        link_bytes=3.0,
    )  # fmt: skip
    return replace(found, **changes)


def of(*ranks, rows=1_000_000, left=1 << 40, replicas=1, **run):
    room = Room(left, left, "it")
    return forecast(replace(RUN, steps=90, **run), list(ranks), Counted([rows], 90), room, replicas)


def test_the_parts_of_a_rank():
    (need,) = of(tried()).ranks
    slots = 1 << 21  # a million keys, at most three quarters full
    assert need.process == 1000 * MIB
    assert need.values == 100 * 1_000_000
    assert need.keys == 12 * slots and need.doubling == 12 * 16
    assert need.work == 200 * MIB - 10 * 100 - 12 * 16
    training = need.process + need.work + need.values + need.keys + need.doubling
    assert need.peak == training + need.evaluation + need.saving
    assert need.evaluation == need.saving == 0
    (need,) = of(tried(evaluated=1300 * MIB)).ranks
    weights_of_all = 4 * 5 * 999_990 + 12 * slots
    assert need.peak == 1300 * MIB + 100 * 999_990 + 12 * (slots - 16) + weights_of_all
    assert need.peak == training + need.evaluation


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_share_the_rows(world_size):
    found = of(*[tried() for _ in range(world_size)], rows=1_000_003)
    assert [rank.values for rank in found.ranks] == [-(-1_000_003 // world_size) * 100] * world_size
    assert found.rows == 1_000_003
    assert found.checkpoint == 7 + 1_000_003 * 108


def test_bytes_sent_are_those_of_one_rank():
    run = replace(RUN, steps=6, mode="sequential")
    found = run_ranks(2, lambda communicators: trial(communicators, run, 6))
    whole = run_ranks(2, lambda communicators: train(communicators, run, quiet=True))
    sent = whole[0]["lookups"]["key_bytes"] + whole[0]["lookups"]["row_bytes"]
    assert sum(each["link_bytes"] for each in found) * 6 == pytest.approx(sent)
    assert sent > 0


def test_what_lacks_and_what_would_fit():
    ranks = [tried(), tried()]
    fits = of(*ranks, rows=10_000_000)
    assert fits.lacking < 0 and not fits.advice()
    needed = sum(rank.peak for rank in fits.ranks)
    short = of(*ranks, rows=10_000_000, left=needed - 300 * MIB)
    assert short.lacking == 300 * MIB
    machines, evicting, disk, tiers = short.advice()
    assert machines == "tables on 2 machines of 2 ranks each" and tiers.endswith("less")
    assert disk.startswith("--storage disk")
    size = int(evicting.partition("lru:")[2].partition("MiB")[0]) * MIB
    rows = Eviction("lru", capacity=f"{size}").rows_of(25)
    assert of(*ranks, rows=rows, left=needed - 300 * MIB).lacking <= 0
    (only,) = of(*ranks, left=2000 * MIB).advice()
    assert "are no tables" in only


def test_a_trial_measures_every_part():
    run = replace(RUN, checkpoint="somewhere")
    found = Rank(**{name: value for name, value in trial(Communicators.local(), run, 8).items()})
    assert 0 < found.began <= found.trained and found.evaluated > 0 and found.saved > 0
    assert found.step_seconds > 0 and found.evaluation_seconds > 0 and found.save_seconds > 0
    (table,) = found.tables
    assert table["rows"] > 100 and table["row_bytes"] == 4 * 3 * 8 and found.dims == [8]
    assert found.dense_bytes > 0


def test_the_command(tmp_path):
    config, report = tmp_path / "run.toml", tmp_path / "plan.json"
    config.write_text('steps = 9\n[job]\ndata = "zipf:users=90,items=700,seed=1"\n[job.sizes]\ndim = 8\n')
    words = ["plan", config, "--trial-steps", 5, "--json", report]
    code, output, error = commands.invoke(*words)
    assert code == 0, (output, error)
    assert "fits: all ranks need" in output and "rows and optimizer states" in output
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
