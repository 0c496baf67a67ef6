"""Promise: a search tries what it says, counts what is refused, and finds a fault that is injected."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import commands
import pytest
import torch
from hypothesis import given, settings
from rich.console import Console

from tritonrec.distributed import RanksDisagreeError
from tritonrec.harness import streams
from tritonrec.harness.fuzz.configuration import Configuration
from tritonrec.harness.fuzz.fuzzer import Fuzzer
from tritonrec.harness.fuzz.report import Failure, FuzzReport, Try
from tritonrec.harness.fuzz.run import search
from tritonrec.harness.fuzz.strategies import configurations
from tritonrec.harness.job import Job
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.nn import HSTUConfig

SMALL = Configuration(
    mode="fwp", world_size=2, micro_batches=2, steps=2, batch_size=4, items=9, median_length=4, max_seq_len=3
)
FAULT = "lost-micro-batch-gradient"


@pytest.fixture
def report():
    return FuzzReport(0)


@pytest.fixture
def fuzzer(report):
    with Fuzzer(report.count) as made:
        yield made


@pytest.mark.if_changed
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mode": "nestpipe", "replicas": 2, "skip_fetch": True, "storage": "cached", "delay_seed": 3},
        {"consistency": "window", "mode": "dbp", "depth": 3, "optimizer": "adam"},
        {"streamed": True, "dynamic": True, "world_size": 1, "users": 30, "admission": 2},
        {"replay": 1.0, "mode": "nestpipe", "replicas": 2, "storage": "device", "evict": "lru:2:1"},
        {"replay": 0.5, "micro_batches": 1, "batch_size": 1},  # slices of one element
        {"restart": 3, "evict": "lru:2:1", "tiers": "2:2", "model": "grm", "accumulate": 2},
    ],
    ids=["fwp", "nestpipe", "window", "stream", "replay", "replay of a sample", "restart"],
)
def test_a_configuration_is_equal_to_its_reference(fuzzer, report, changes):
    assert fuzzer.evidence(replace(SMALL, **changes)) == ""
    assert report.identical == 1 and report.tensors > 0 and not report.refused


@pytest.mark.if_changed
def test_refused_configurations_are_counted_by_message_and_once(fuzzer, report):
    for depth in (2, 2, 5):
        assert fuzzer.evidence(replace(SMALL, depth=depth)) == ""
    assert fuzzer.evidence(replace(SMALL, model="grm", lazy_weight_decay=True, tiers="1:1")) == ""
    assert report.refused["mode 'fwp' has one batch in flight, not N: depth is for dbp and nestpipe"] == 2
    short = replace(Configuration(world_size=2, streamed=True, dynamic=True), consistency="window")
    assert fuzzer.evidence(short) == "" and report.identical == 0
    assert report.refused["rank N has an epoch without tokens: use fewer ranks, or longer rows"] == 1
    assert len(report.refused) == 3 and report.tried == 4


def test_an_error_is_no_refusal(fuzzer, report, monkeypatch):
    def broken(*args):
        raise ValueError("in the middle of training")

    monkeypatch.setattr("tritonrec.harness.verify.run_case.compare_run", broken)
    assert "in the middle of training" in fuzzer.evidence(SMALL)
    assert not report.refused


def test_ranks_that_disagree_are_no_refusal(fuzzer, report, monkeypatch):
    def disagree(*args, **more):
        raise RanksDisagreeError("rank 1 has other parameters than rank 0")

    monkeypatch.setattr("tritonrec.harness.fuzz.fuzzer.prepared", disagree)
    monkeypatch.setattr("tritonrec.harness.verify.run_case.prepared", disagree)
    assert "rank 1 has other parameters" in fuzzer.evidence(SMALL)
    assert not report.refused and not report.tried


@pytest.mark.parametrize("kind", [RanksDisagreeError, RuntimeError, KeyError, AssertionError])
def test_an_error_before_the_first_step_is_no_refusal(fuzzer, monkeypatch, kind):
    def broken(*args):
        raise kind("x")

    monkeypatch.setattr("tritonrec.harness.fuzz.fuzzer.prepared", broken)
    assert fuzzer.refusal(SMALL) == ""


def test_repeats_are_counted_as_they_end(fuzzer, monkeypatch):
    ends = iter(["differs", "", "differs"])
    monkeypatch.setattr(fuzzer, "evidence", lambda configuration: next(ends))
    assert fuzzer.failure(SMALL, "differs").repeated == 2


def test_a_failure_counts_once(report):
    one, other = (Failure({"mode": mode}, "differs", "fuzz", 3) for mode in ("dbp", "fwp"))
    assert report.add_failure(one) and not report.add_failure(replace(one, repeated=1))
    assert report.add_failure(other) and report.failures == [one, other] and report.tried == 2


def test_a_reference_that_fails_is_evidence(fuzzer, report, monkeypatch):
    def broken(*args):
        raise RuntimeError("the reference is broken")

    monkeypatch.setattr("tritonrec.harness.verify.references.record_reference", broken)
    assert fuzzer.evidence(SMALL) == "RuntimeError: the reference is broken" and not report.tried


def test_a_difference_is_evidence_though_a_check_refuses(fuzzer, monkeypatch):
    monkeypatch.setattr(fuzzer, "refusal", lambda configuration: "refused")
    with Fuzzer(fuzzer.count, FAULT) as faulty:
        monkeypatch.setattr(faulty, "refusal", fuzzer.refusal)
        assert "expected" in faulty.evidence(SMALL)


def test_the_reference_has_plain_tables_that_never_grow():
    """Of the same model on the same batches; else both could lose the same rows."""
    drawn = replace(SMALL, slots=8, chunk_rows=8, merge=True, balance=True, wrapping="checkpoint")
    drawn = replace(drawn, recompute=("norm",), storage="cached")
    found = drawn.case.reference(Job()).job
    assert (found.slots, found.chunk_rows, found.merge, found.balance, found.wrapping) == (
        1024, 1024, False, False, "",
    )  # fmt: skip
    assert found.placement == Job().placement and found.sizes == SMALL.sizes and found.data == SMALL.data
    assert drawn.case.job(Job()).slots == 8 and drawn.case.job(Job()).merge


def test_every_setting_reaches_the_run():
    plain = Configuration(mode="nestpipe", evict="lru:9:1")
    others = {"delay_seed": 1, "restart": 2, "evict": "lfu:9:1", "tiers": "1:1", "recompute": ("norm",)}
    others |= {"mode": "dbp", "consistency": "window", "storage": "device", "wrapping": "checkpoint"}
    others |= {"optimizer": "adam", "model": "fuxi", "lr_schedule": "cosine", "dedup": "none"}
    others |= {"precision": "bf16", "exchange_precision": "bf16", "loss_scale": 2.0, "taper": 0.5}
    others |= {"exchange_sums": "whole", "exchanges": "each", "dropout": 0.5}

    def run(one):
        case = one.case
        plain = replace(case, configuration=Configuration())
        return plain, case.job(Job()), case.window(0), repr(case.changes.tool)

    for each in fields(Configuration):
        value = getattr(plain, each.name)
        other = (
            others[each.name]
            if each.name in others
            else (not value if isinstance(value, bool) else value + 1)
        )
        assert run(replace(plain, **{each.name: other})) != run(plain), each.name


@settings(max_examples=20)
@given(configurations())
def test_its_words_make_it_again(configuration):
    text = json.dumps(configuration.as_json())
    assert Configuration.from_json(text) == configuration
    assert "fuzz --configuration '{" in configuration.command


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "a JSON object"), ("{", "a JSON object"), ('{"x": 1}', "no setting named x"),
        ('{"steps": "1"}', "steps of a configuration is of type int"),
        ('{"steps": true}', "steps of a configuration is of type int"),
        ('{"steps": 1e99}', "of type int"), ('{"steps": 99999999999}', "at most"),
        ('{"recompute": [1]}', "of type tuple"),
    ],
)  # fmt: skip
def test_other_words_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Configuration.from_json(text)


@pytest.mark.slow
def test_a_failure_is_made_small_and_tried_first_the_next_time(tmp_path, monkeypatch):
    def evidence(self, configuration):
        if configuration.micro_batches > 2 and configuration.model == "grm":
            return "wrong"
        self.count(Try(configuration))
        return ""

    monkeypatch.setattr(Fuzzer, "evidence", evidence)
    monkeypatch.setattr("tritonrec.harness.fuzz.run.MOST_FAILURES", 1)
    first, again = (search(60, seed, 500, tmp_path / "found", console=Console(quiet=True)) for seed in (0, 1))
    for report in (first, again):
        assert [each.configuration for each in report.failures] == [{"micro_batches": 3, "model": "grm"}]
    assert first.shrinking and again.identical == 0
    assert search(60, 1, 5, tmp_path / "other", console=Console(quiet=True)).identical


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "mode"), [("gradient-added-twice", "dbp"), ("no-copy-of-kept-rows", "nestpipe")]
)
def test_a_search_finds_a_fault(fault, mode, monkeypatch):
    monkeypatch.setattr("tritonrec.harness.fuzz.run.MOST_FAILURES", 1)
    report = search(200, most=100, fault=fault, mode=mode)
    (failure,) = report.failures
    small = Configuration.from_json(json.dumps(failure.configuration))
    assert small.world_size == small.layers == 1 and small.restart == 0 and small.model == "hstu"
    assert len(failure.configuration) <= 8 and failure.repeated == 3 and report.shrinking


@pytest.mark.if_changed
def test_the_command_repeats_a_failure(tmp_path):
    text, file = json.dumps(SMALL.as_json()), tmp_path / "report.json"
    code, output, _ = commands.invoke("fuzz", "--configuration", text, "--inject", FAULT, "--json", file)
    assert code == 1 and "3 of 3 repeats" in output and "expected" in output
    assert json.loads(file.read_text())["failures"][0]["configuration"] == SMALL.as_json()
    code, output, _ = commands.invoke("fuzz", "--configuration", text)
    assert code == 0 and "1 identical, 0 refused, 0 failed" in output


@pytest.mark.if_changed
def test_the_command_searches(tmp_path):
    """The first configuration that Hypothesis draws is the simplest."""
    code, output, _ = commands.invoke("fuzz", "--configurations", 1, "--database", tmp_path / "found")
    assert code == 0 and "1 configurations in" in output and "1 identical" in output


@pytest.mark.if_changed
def test_shrinking_goes_on_though_there_are_enough(monkeypatch):
    def evidence(self, configuration):
        if configuration.micro_batches > 2:
            return "wrong"
        self.count(Try(configuration))
        return ""

    monkeypatch.setattr(Fuzzer, "evidence", evidence)
    monkeypatch.setattr("tritonrec.harness.fuzz.run.MOST_FAILURES", 1)
    report = search(600, most=4, console=Console(quiet=True))
    assert [each.configuration for each in report.failures] == [{"micro_batches": 3}] and report.shrinking


def test_a_search_tries_as_many_as_it_is_told(monkeypatch):
    """Though each round begins with the simplest configuration, which counts once."""
    tried = []

    def evidence(self, configuration):
        tried.append(configuration)
        self.count(Try(configuration))
        return ""

    monkeypatch.setattr(Fuzzer, "evidence", evidence)
    report = search(600, most=60, console=Console(quiet=True))
    assert report.tried == len(set(tried)) == 60 and tried.count(tried[0]) > 1


@pytest.mark.if_changed
def test_a_signal_ends_a_search_with_what_was_tried(monkeypatch, capfd):
    tried, evidence = [], Fuzzer.evidence

    def signalled(self, configuration):
        tried.append(evidence(self, configuration))
        if len(tried) == 3:
            signal.raise_signal(signal.SIGTERM)
        return tried[-1]

    monkeypatch.setattr(Fuzzer, "evidence", signalled)
    report = search(600, most=1000)
    assert 3 <= report.tried <= len(tried) < 10 and not report.failures
    assert "stopping after this configuration" in capfd.readouterr().err


def test_refused_settings_are_one_sentence():
    code, output, _ = commands.invoke("fuzz", "--configuration", '{"skip_fetch": true}')
    assert code == 2 and "keeps no rows between batches" in output
    code, output, _ = commands.invoke("fuzz", "--inject", "nonsense")
    assert code == 2 and "--inject takes the name of a fault" in output


def test_the_report_says_what_was_covered(fuzzer, report):
    assert fuzzer.evidence(SMALL) == ""
    written = report.as_json()
    assert written["covered"]["mode"] == {"fwp": 1} and written["shown"]["inserted"] == 1
    assert json.loads(json.dumps(written)) == written
    assert FuzzReport(0).tried == 0


def test_threads_have_the_groups_of_a_mesh():
    """Communicators of 4 ranks with 2 replicas: shards 0 0 1 1, and sums over shard groups {0, 2}, {1, 3}."""

    def rank(ranks):
        one = torch.tensor([10.0**ranks.rank])
        sums = [
            getattr(ranks, name).all_reduce(one.clone(), "x").item()
            for name in ("routing", "replica", "reduce")
        ]
        return ranks.shard, ranks.shards, ranks.replicas, ranks.saves, sums

    found = run_ranks(4, rank, replicas=2)
    assert [each[:4] for each in found] == [
        (0, 2, 2, True),
        (0, 2, 2, False),
        (1, 2, 2, True),
        (1, 2, 2, False),
    ]
    assert [each[4] for each in found] == [
        [101, 11, 1111],
        [1010, 11, 1111],
        [101, 1100, 1111],
        [1010, 1100, 1111],
    ]


def test_ranks_that_are_threads_build_equal_models():
    job = Job("zipf:users=9,items=9", sizes=HSTUConfig(dim=32, layers=2, heads=2, qk_dim=16, v_dim=16))
    with ThreadPoolExecutor(4) as pool:
        models = [model.state_dict() for model, _, _ in pool.map(job.build, ["sgd"] * 12)]
    assert all(torch.equal(model[name], models[0][name]) for model in models for name in model)


def test_shards_live_as_long_as_their_rows():
    first = streams.sequences("shards:zipf:users=9,items=9,seed=0")
    for seed in range(1, 6):
        streams.sequences(f"shards:zipf:users=9,items=9,seed={seed}")
        assert streams.sequences("shards:zipf:users=9,items=9,seed=0") is first
    assert next(iter(Job("shards:zipf:users=9,items=9,seed=0", batch_size=2).loader())).num_samples == 2
