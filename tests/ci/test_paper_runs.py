"""Promise: what the runs of `make papers` compare is what they name: stale rows, remapped ids, techniques."""

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from tritonrec.data import NextItemLoader, load_interactions
from tritonrec.distributed import Communicators
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.pipeline.places import Buffer, OwnedRows
from tritonrec.pipeline.stage import Read

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci" / "benchmarks"))
curves = import_module("consistency_curves")
grm = import_module("grm_throughput")
mch = import_module("bench_mch")
frontier = import_module("slipstream_frontier")
simulate_grm = import_module("simulate_grm")


def test_stale_rows_are_those_before_the_last_update_and_updates_go_to_the_newer():
    job = Job("zipf:users=30,items=900,seed=2", batch_size=16, num_negatives=2, sizes=HSTUConfig(dim=8))
    model, tables, optimizer = job.build("sgd")
    loader = job.loader()
    sent, updated = [], []
    with Trainer(model, tables, optimizer, Communicators.local(), "sequential", WindowConfig(1)) as trainer:

        def before_update(owned: Read[OwnedRows], buffer: Read[Buffer]) -> None:
            updated.append((owned.tables[0].keys.clone(), buffer[0].clone()))

        def as_sent(owned: Read[OwnedRows], buffer: Read[Buffer]) -> None:
            sent.append((owned.tables[0].keys.clone(), buffer[0].clone()))

        trainer.program.before("exchange", as_sent)
        curves.Stale(trainer.program)  # its rows are in the buffer when `as_sent` sees it
        trainer.program.before("sparse_update", before_update)
        for step in range(4):
            trainer.step(loader.batch(step))
    stale, compared = 0, 0
    for step in range(1, 4):
        old = dict(zip(updated[step - 1][0].tolist(), updated[step - 1][1], strict=True))
        new = dict(zip(updated[step][0].tolist(), updated[step][1], strict=True))
        for key, row in zip(sent[step][0].tolist(), sent[step][1], strict=True):
            expected = old.get(key, new[key])
            assert torch.equal(row, expected), (step, key)
            stale += not torch.equal(row, new[key])
            compared += 1
    assert 0 < stale < compared


def test_curves_hold_what_is_left_of_each_user():
    log = load_interactions("zipf:users=20,items=30,seed=1")
    loader = NextItemLoader(log, 8, 50, 1, seed=1)
    model = curves.build("fuxi", 1).eval()
    ids = loader.catalogue
    rows = torch.randn(len(ids), curves.DIM, generator=torch.Generator().manual_seed(0))
    found = curves.scores(model, ids, rows, loader)
    shuffled = torch.randperm(len(ids))
    assert found == curves.scores(model, ids[shuffled], rows[shuffled], loader)
    assert set(found) == set(curves.METRICS) - {"loss"} and 0 < found["HR@50"] <= 1


def test_differences_are_to_the_synchronous_run_of_the_seed():
    point = dict.fromkeys(curves.METRICS, 1.0)
    rows = [
        {"model": "hstu", "seed": seed, "method": method, "points": [{**point, "HR@10": value}]}
        for seed, base in ((1, 0.2), (2, 0.4))
        for method, value in zip(curves.METHODS, (base, base, base - 0.1 * seed, base + 0.1), strict=True)
    ]
    found = {row["method"]: row for row in curves.summary(rows)}
    assert found["nestpipe"]["HR@10 minus synchronous"] == 0
    assert found["stale"]["HR@10 minus synchronous"] == pytest.approx(-0.15)
    assert found["stale"]["HR@10 deviation"] == pytest.approx(np.std([-0.1, -0.2], ddof=1))
    assert found["averaged"]["HR@10"] == pytest.approx(0.4)


def test_a_remapping_table_keeps_the_ids_of_most_accesses():
    table = mch.Remapped(capacity=3, every=2)
    assert table(np.array([5, 5, 7])).tolist() == [0, 0, 0]  # nothing is known yet
    assert table(np.array([5, 9, 9, 9])).tolist() == [0, 0, 0, 0]
    known = table(np.array([5, 7, 9, 11]))
    assert sorted(known[:3].tolist()) == [1, 2, 3] and known[3] == 0
    table(np.array([5, 9] + [11] * 9))  # 11 has now more accesses than 7, which leaves
    again = table(np.array([5, 7, 9, 11]))
    assert again[0] == known[0] and again[2] == known[2] and again[1] == 0 and again[3] == known[1]


def test_remapped_ids_are_counted_and_checked():
    stream = mch.batches(6, 500, 400, 10, seed=3)
    small, large = (mch.measure(capacity, stream, every=2) for capacity in (20, 5000))
    assert 0 < large["on_the_shared_row"] < small["on_the_shared_row"] < 1
    assert small["distinct"] == len(np.unique(np.concatenate(stream)))
    assert large["peer_bytes"] == 5000 * (24 + 4 * mch.DIM)


@pytest.mark.slow
def test_techniques_change_counts_and_no_loss(tmp_path, monkeypatch, capsys):
    file = tmp_path / "grm.json"
    words = "--sizes small --ranks 2 --samples 2 --steps 1 --rounds 1 --tokens 10 --json"
    monkeypatch.setattr(sys, "argv", ["grm_throughput.py", *words.split(), str(file)])
    grm.main()
    rows = {row["setting"]: row for row in json.loads(file.read_text())["rows"]}
    none, merged, both = rows["baseline"], rows["+ merging"], rows["+ both"]
    assert merged["lookups"] < none["lookups"] and merged["keys_exchanged"] == none["keys_exchanged"]
    assert (
        rows["+ dedup before the exchange"]["keys_exchanged"]
        == both["keys_exchanged"]
        < none["keys_exchanged"]
    )
    assert rows["+ dedup before the lookup"]["rows_read"] == both["rows_read"] < none["rows_read"]
    assert rows["+ balancing"]["longest_over_mean"] <= both["longest_over_mean"]
    assert none["tokens_per_second_ratio"] == 1 and len(capsys.readouterr().out.splitlines()) == 6


def test_an_unknown_size_is_one_clear_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grm_throughput.py", "--sizes", "GRM-7G"])
    with pytest.raises(SystemExit):
        grm.main()
    assert "no GRM-7G; there are small, GRM-4G, GRM-110G" in capsys.readouterr().err


def slipstream(accuracy, seconds):
    """The JSON of `tritonrec train --slipstream` with one share, and its control."""
    runs = [
        (None, False, 100, 40, 8.0, 0.7),
        (0.5, False, 50, 20, seconds, accuracy),
        (0.5, True, 50, 20, 4.0, 0.6),
    ]
    names = ("drop", "at_random", "inputs", "steps", "cpu_seconds")
    return {
        "classify_at": 40,
        "overhead_cpu_seconds": 1.0,
        "runs": [
            {**dict(zip(names, run, strict=False)), "metrics": {"accuracy": run[5], "AUC": 0.75}}
            for run in runs
        ],
    }


def test_speed_counts_the_whole_run_and_accuracy_is_that_of_the_seed():
    stale, at_random = frontier.points(slipstream(0.69, 4.0))
    assert stale["inputs"] == at_random["inputs"] == 0.75
    assert stale["whole_speedup"] == pytest.approx(16 / 13) and at_random["whole_speedup"] == pytest.approx(
        16 / 12
    )
    assert stale["accuracy"] == pytest.approx(-1) and at_random["accuracy"] == pytest.approx(-10)
    seeds = [frontier.points(slipstream(accuracy, 4.0)) for accuracy in (0.69, 0.67)]
    chosen, control = frontier.summary({"early": seeds})
    assert chosen["accuracy"][0] == pytest.approx(-2) and chosen["accuracy"][1] == pytest.approx(
        12.706, rel=1e-3
    )
    assert (
        control["at_random"]
        and control["accuracy"][1] == pytest.approx(0, abs=1e-9)
        and control["seeds"] == 2
    )


def test_a_frontier_of_one_seed_or_of_an_unknown_plan_is_one_clear_error(monkeypatch, capsys):
    for words, error in (
        ("--seeds 1", "needs two seeds, got 1"),
        ("--plans late", "no plan late; there are half"),
    ):
        monkeypatch.setattr(sys, "argv", ["slipstream_frontier.py", *words.split()])
        with pytest.raises(SystemExit):
            frontier.main()
        assert error in capsys.readouterr().err


def test_gpus_reach_less_than_the_ideal_and_most_of_it_where_exchanges_overlap():
    small, large, *_ = simulate_grm.SETTINGS
    for setting in (small, large):
        exposed, overlapped = (simulate_grm.scaling(setting, each) for each in (False, True))
        assert exposed[0] == overlapped[0] == 1 and exposed == sorted(exposed, reverse=True)
        assert all(a < b < 1 for a, b in zip(exposed[1:], overlapped[1:], strict=True))
    compute = 3 * 110e9 * 116 / (0.4 * 312e12)
    exchanged = large.step(8, False) - compute
    assert 0 < exchanged < 0.1 * compute
    reduced = 2 * 127 / 128 * 4 * 22 * 5 * 1024**2 / 12.5e9  # seconds, 12.5 GB/s for each GPU of a node
    assert reduced < large.step(128, False) - compute < 1.2 * reduced
