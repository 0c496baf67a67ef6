"""Promise: an option with an absurd value is one sentence with its name and status 2, before any work."""

from typing import Literal

import commands
import pytest

from tritonrec import distributed
from tritonrec.harness import bench

HUGE = "9" * 30
LISTS = {
    ("verify", "--world-size"), ("verify", "--micro-batches"), ("lab", "--micro-batches"),
    ("serve-bench", "--bounds"), ("train", "--bottom"), ("train", "--top"),
}  # fmt: skip
WORDS = {
    ("serve", "--approximate"), ("export", "--weights"),
    ("verify", "--modes"), ("lab", "--modes"), ("serve-bench", "--scenarios"), ("train", "--recompute"),
    ("train", "--evict"), ("train", "--precision-tiers"), ("lab", "--switch"), ("lab", "--emulate"),
    ("lab", "--proportions"), ("train", "--early-stopping"), ("train", "--split"),
    ("train", "--changed"), ("train", "--memory-limit"), ("train", "--disk-memory"),
    ("train", "--disk-index-memory"), ("plan", "--memory"),
    ("warmup", "--models"), ("warmup", "--optimizers"), ("warmup", "--target"),
    ("fuzz", "--configuration"), ("fuzz", "--inject"),
}  # fmt: skip
FREE = {  # tested below, in test_cli, test_spill and in test_urls
    ("bench", "--only"), ("simulate", "--table"), ("train", "--drop"), ("train", "--resume"),
    ("train", "--warm-start"), ("train", "--disk-path"), ("train", "--publish"), ("train", "--spill"),
}  # fmt: skip
FREE |= {  # tested in test_score_file, test_score_ranking and test_server_process
    ("score", "--history"), ("score", "--timestamps"), ("score", "--candidates"), ("score", "--dense"),
    ("serve", "--host"), ("serve", "--follow"), ("serve", "--memory"), ("serve", "--device"),
    ("serve", "--host-memory"),
}  # fmt: skip
FREE |= {  # tested in test_log_formats
    ("train", f"--{name}")
    for name in ("user-column", "item-column", "time-column", "time-format", "rating-column", "label-columns",
                 "columns", "delimiter")
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    class Worked(Exception):
        pass

    def work(*args, **options):
        raise Worked

    monkeypatch.setattr(distributed, "RankPool", work)
    for name in (
        "train.loop.train", "lab.rounds.run_lab", "serve.rounds.run_bench", "bench.bench",
        "verify.contract.Verifier", "profile.run.profile", "simulator.run.simulate", "simulator.run.plan",
        "fuzz.run.search",
    ):  # fmt: skip
        monkeypatch.setattr(f"tritonrec.harness.{name}", work)
    monkeypatch.setattr("tritonrec.harness.network.require_tools", lambda: None)


def refused(command, option, value, *more):
    code, output, error = commands.invoke(command, option, value, *more)
    name = option.removeprefix("--")
    assert code == 2 and isinstance(error, SystemExit), f"{error!r}: {output}"
    assert option in output or name.replace("-", "_") in output or name in output, output
    assert "Traceback" not in output


@pytest.mark.parametrize(("command", "option"), commands.options(int))
@pytest.mark.parametrize("value", [HUGE, f"-{HUGE}"])
def test_no_number_in_range(command, option, value):
    refused(command, option, value)


@pytest.mark.parametrize(("command", "option"), commands.options(float))
@pytest.mark.parametrize("value", ["nan", "-1"])
def test_no_share_or_size(command, option, value):
    refused(command, option, value)


@pytest.mark.parametrize(("command", "option"), sorted(LISTS))
@pytest.mark.parametrize("value", ["", "1,,2", "-1", "1.5", HUGE])
def test_no_list_of_numbers(command, option, value):
    refused(command, option, value)


@pytest.mark.parametrize(("command", "option"), sorted(WORDS))
@pytest.mark.parametrize("value", ["nonsense", ",,x", "=1", " , "])
def test_no_known_words(command, option, value):
    refused(command, option, value)


@pytest.mark.parametrize(
    "value", ["", "0", "nan", "movies", "zipf:users=0", "zipf:users=nan", "csv:", "zipf:x"]
)
@pytest.mark.parametrize("command", ["train", "verify", "lab", "profile"])
def test_no_data(command, value):
    code, output, error = commands.invoke(command, "--data", value)
    assert code == 2 and isinstance(error, SystemExit) and "error: " in output, output


def test_every_option_is_tested():
    of_text = {*commands.options(str)} | {*commands.options(Literal)}
    repeated = {("lab", "--switch")}
    assert of_text - {(name, "--data") for name in commands.COMMANDS} == (LISTS | WORDS | FREE) - repeated


@pytest.mark.parametrize("value", ["", "x", "nan", "-1", "1.5", "0.5,", "inf"])
def test_no_shares_to_drop(value):
    refused("train", "--drop", value, "--slipstream", "--model", "dlrm", "--data", "criteo:samples=100")


@pytest.mark.parametrize("command", ["train", "lab"])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (2, 7), (8, 4)])
def test_heads_that_do_not_divide_the_dimension(command, heads, dim):
    code, output, _ = commands.invoke(command, "--heads", heads, "--dim", dim)
    assert code == 2 and f"--heads {heads} does not divide --dim {dim}" in output


@pytest.mark.parametrize("rule", ["HR@10", "HR@10:0", "HR@10:x", "HR@10:3:most", ":3", "HR@10:3:max:1"])
def test_no_rule_to_stop_by(rule):
    refused("train", "--early-stopping", rule, "--evaluate-every", 2)


def test_early_stopping_without_evaluations():
    code, output, _ = commands.invoke("train", "--early-stopping", "HR@10:3")
    assert code == 2 and "--early-stopping goes with --evaluate-every" in output


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--lr-warmup", "5"], "--lr-warmup goes with --lr-schedule linear or cosine"),
        (["--lr-warmup", "5", "--lr-schedule", "step"], "--lr-warmup goes with --lr-schedule"),
        (["--optimizer", "ftrl", "--lr-schedule", "linear", "--lr-steps", "9"], "ftrl divides by lr"),
        (["--drop", "0.1"], "options of Slipstream go with --slipstream"),
        (["--control", "--seed", "3"], "options of Slipstream go with --slipstream"),
    ],
)
def test_options_that_would_be_ignored_or_fail_late(option, message):
    code, output, _ = commands.invoke("train", *option)
    assert code == 2 and message in output


def test_both_ways_of_a_switch():
    code, output, _ = commands.invoke("train", "--merge", "--no-merge")
    assert code == 2 and "--merge and --no-merge exclude each other" in output


@pytest.mark.parametrize("option", [["--save-every", "5"], ["--full-every", "2"]])
def test_saves_without_a_place(option):
    code, output, _ = commands.invoke("train", *option)
    assert code == 2 and "go with --checkpoint" in output


@pytest.fixture
def suites(tmp_path):
    """A source tree with one suite of one benchmark."""
    folder = tmp_path / "ci" / "benchmarks"
    folder.mkdir(parents=True)
    (folder / "bench_moves.py").write_text("def test_gather(benchmark): benchmark(int)\n")
    return tmp_path


RUN_SUITES = bench.run_suites


@pytest.mark.slow
@pytest.mark.parametrize("only", ["nomatch", "a b(", "not"])
def test_a_benchmark_that_is_not_there(suites, only):
    with pytest.raises(
        ValueError, match="no suite and no benchmark has a name with it; the suites are moves"
    ) as said:
        RUN_SUITES(suites, only)
    assert str(said.value).startswith(f"--only {only}: ")


def test_more_memory_than_there_is_is_said(monkeypatch):
    def load(job):
        raise MemoryError("Unable to allocate 1 PiB")

    monkeypatch.setattr("tritonrec.harness.cli.job.load_job", load)
    code, output, _ = commands.invoke("train")
    assert code == 2 and "out of memory: Unable to allocate 1 PiB" in output


def test_the_version():
    code, output, _ = commands.invoke("--version")
    assert code == 0 and output == "tritonrec 0.1.0"
