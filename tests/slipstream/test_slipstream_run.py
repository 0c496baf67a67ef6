"""`tritonrec train --slipstream`: the same at every world size and in every mode, exact at threshold 0."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from slip_kit import CONFIG, DATA, job
from typer.testing import CliRunner

from tritonrec.distributed import Communicators
from tritonrec.embedding import Eviction, TablePolicy
from tritonrec.harness.cli import app
from tritonrec.harness.devices import Target
from tritonrec.harness.slipstream.report import net_speedup, speedup, whole_speedup
from tritonrec.harness.slipstream.run import SlipstreamRun, _validate, train_slipstream
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.harness.verify.cases import Case
from tritonrec.harness.verify.run_case import record_reference, run_case
from tritonrec.harness.verify.tools.slipstream import classified
from tritonrec.harness.verify.variants import VARIANTS, Variant
from tritonrec.pipeline import ExchangeConfig, WindowConfig
from tritonrec.slipstream import SlipstreamConfig

STEPS = 40  # of 19 an epoch


def compare(run, slipstream, communicators=None):
    return train_slipstream(communicators or Communicators.local(), run, slipstream, quiet=True)


def a_run(mode="sequential", window=None, **changes):
    return Run(job(**changes), mode, window or WindowConfig(1), "rowwise_adagrad", steps=STEPS)


PLAN = SlipstreamRun(CONFIG, (0.3, 0.7))


@pytest.fixture(scope="module")
def alone():
    return compare(a_run(), PLAN)


def same(one, other):
    names = ("digest", "metrics", "classification", "inputs", "steps", "loss")
    return [[run[name] for name in names] for run in one["runs"]] == [
        [run[name] for name in names] for run in other["runs"]
    ] and one["snapshots"]["changes"] == other["snapshots"]["changes"]


def test_the_speed_up_of_the_whole_run_counts_the_steps_before_the_classification():
    exact = {"drop": None, "at_random": False, "cpu_seconds": 6.0, "steps": 60}
    chosen = {"drop": 0.6, "at_random": False, "cpu_seconds": 2.0, "steps": 20}
    summary = {"runs": [exact], "classify_at": 40, "overhead_cpu_seconds": 1.0}
    assert speedup(summary, chosen) == 3 and net_speedup(summary, chosen) == 2
    assert whole_speedup(summary, chosen) == pytest.approx((4 + 6) / (4 + 2 + 1))
    assert whole_speedup(summary, {**chosen, "at_random": True}) == pytest.approx((4 + 6) / (4 + 2))


@pytest.mark.slow
def test_all_inputs_end_where_plain_training_ends(alone):
    plain = train(Communicators.local(), a_run("nestpipe", WindowConfig(3)), quiet=True)
    exact = alone["runs"][0]
    assert exact["digest"] == plain["digest"] and exact["metrics"] == plain["metrics"]
    assert exact["steps"] == STEPS - CONFIG.classify_at and exact["drop"] is None
    few, many = alone["runs"][1:]
    assert exact["inputs"] > few["inputs"] > many["inputs"] and few["digest"] != exact["digest"]
    assert many["counts"]["read"] < few["counts"]["read"] < exact["counts"]["read"]
    for run in (few, many):
        found = run["classification"]
        assert 0 < found["dropped"] <= run["drop"] * found["hot_inputs"]
        assert found["inputs"] == 450 and found["stale_rows"] > 0


@pytest.mark.slow
@pytest.mark.multi_rank
def test_what_is_dropped_depends_neither_on_mode_nor_on_world_size(pool, alone):
    two = pool.run(train_slipstream, 2, a_run("nestpipe", WindowConfig(2, clustering=True)), PLAN, True)
    window = WindowConfig(2, exchange=ExchangeConfig(skip_fetch=True))
    replicas = pool.run(train_slipstream, 2, a_run("nestpipe", window), PLAN, True, replicas=2)
    for summary in (*two, *replicas):
        assert same(summary, alone)
    assert two[0]["runs"][0]["counts"]["row_bytes"] > two[0]["runs"][2]["counts"]["row_bytes"] > 0
    assert 0 < two[0]["snapshots"]["bytes_of_largest_rank"] < alone["snapshots"]["bytes_of_largest_rank"]


@pytest.mark.if_changed
def test_threshold_0_is_exact_in_every_bit():
    plan = SlipstreamRun(replace(CONFIG, threshold=0.0), (0.5,))
    policy = TablePolicy(Eviction("lru", capacity=12), admission=2)
    exact, none = compare(a_run("nestpipe", WindowConfig(2), policy=policy), plan)["runs"]
    assert none["classification"]["dropped"] == 0 and none["classification"]["hot_inputs"] > 0
    assert none["digest"] == exact["digest"] and none["inputs"] == exact["inputs"]


def case_of(threshold, directory):
    """A case with the tool of `verify`'s variant, at any threshold."""
    slipstream = SlipstreamConfig(2, 2, 1, hot_share=0.0, threshold=threshold, alpha=10)
    case = Case("nestpipe", "batch", 1, 2, False, "adam", 8, variant="classified")
    record_reference(case.reference(job(batch_size=9)), 8, directory)
    return run_case(Communicators.local(), job(batch_size=9, slipstream=slipstream), case, directory)


def test_verify_sees_whether_inputs_were_dropped(tmp_path, monkeypatch):
    # The reference is recorded under the job's own name: without Slipstream, whatever the case has.
    monkeypatch.setattr(
        "tritonrec.harness.verify.cases.Reference.file_name", property(lambda self: "reference.safetensors")
    )
    monkeypatch.setitem(VARIANTS, "classified", Variant("", tool=classified))
    exact = case_of(0.0, str(tmp_path))
    assert exact.first_difference is None and exact.counts["judged"] > 0 and exact.counts["hot_inputs"] > 0
    approximate = case_of(1e9, str(tmp_path))
    assert approximate.counts["dropped"] > 0
    assert approximate.first_difference is not None and approximate.first_difference.step >= 4


def test_online_the_last_inputs_are_classified_by_what_the_first_have_shown():
    plan = SlipstreamRun(replace(CONFIG, drop=0.5), (0.0, 0.5), online=0.4)
    summary = compare(a_run(), plan)
    assert summary["classify_at"] == 12  # 270 of 450 inputs in batches of 24
    exact, none, half = summary["runs"]
    assert exact["inputs"] == 180 and exact["steps"] == 8 and half["classification"]["inputs"] == 180
    assert none["classification"]["dropped"] == 0 and none["digest"] == exact["digest"]
    assert half["inputs"] == 180 - half["classification"]["dropped"] < 180
    with pytest.raises(ValueError, match="take 37 steps, the first segment has 12: choose fewer"):
        compare(a_run(), SlipstreamRun(replace(CONFIG, warmup=31), online=0.4))


@pytest.mark.slow
def test_the_control_drops_as_many_inputs_at_random():
    exact, few, control = compare(a_run(), SlipstreamRun(CONFIG, (0.7,), control=True))["runs"]
    assert not few["at_random"] and control["at_random"]
    assert control["classification"] == few["classification"] and control["digest"] != few["digest"]
    # of 450 inputs, each in one or two of the epochs that are left
    share = few["classification"]["dropped"] / 450
    assert 0.8 * share < 1 - control["inputs"] / exact["inputs"] < 1.2 * share


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="use the model dlrm, not hstu"):
        compare(Run(replace(job(), model="hstu", data="ml-100k")), PLAN)
    with pytest.raises(ValueError, match="does not go with checkpoint"):
        compare(replace(a_run(), checkpoint="somewhere"), PLAN)
    with pytest.raises(ValueError, match="inputs are classified after 10 steps: ask for more"):
        compare(replace(a_run(), steps=10), PLAN)
    with pytest.raises(ValueError, match="online must be below 1"):
        SlipstreamRun(CONFIG, online=1.0)
    with pytest.raises(ValueError, match=r"drops must be in \[0, 1\]"):
        SlipstreamRun(CONFIG, (0.5, 2.0))


@pytest.mark.slow
def test_the_command_prints_what_was_dropped_saved_and_lost(tmp_path):
    arguments = [
        "train", "--model", "dlrm", "--data", DATA, "--batch-size", 24, "--dim", 6, "--steps", 40,
        "--slipstream", "--warmup", 3, "--snapshot-every", 2, "--hot-share", 0.01, "--drop", "0.2,0.6",
        "--control", "--json", tmp_path / "s.json",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [str(word) for word in arguments])
    assert result.exit_code == 0, result.output
    named = "APPROXIMATE|20% random|rows stale|speed-up|rows read|MB sent|accuracy|BCE|MB on the largest"
    for words in named.split("|"):
        assert words in result.stdout, words
    summary = json.loads((tmp_path / "s.json").read_text())
    assert [run["drop"] for run in summary["runs"]] == [None, 0.2, 0.2, 0.6, 0.6]
    bad = CliRunner().invoke(app, ["train", "--drop", "2", "--slipstream", "--model", "dlrm", "--data", DATA])
    assert bad.exit_code == 2 and "--drop takes shares from 0 to 1" in bad.output


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"checkpoint": Path("x")}, "checkpoint"), ({"evaluate_every": 2}, "evaluate_every"),
        ({"log_every": 1}, "log_every"), ({"trace": Path("x")}, "trace"),
        ({"job": replace(job(), balance=True)}, "balance"),
        ({"job": replace(job(), target=Target("reference"))}, "impl"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_comparison_is_refused(change, name):
    run = Run(job(), steps=STEPS)
    _validate(run)
    with pytest.raises(ValueError, match=f"does not go with {name}$"):
        _validate(replace(run, **change))
