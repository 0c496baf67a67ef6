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
