"""Promise: a DLRM with tables in several processes predicts the bits of one, and a dead process is named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from datetime import timedelta

import pytest
import torch
from live_parts import until
from served_models import ask, export_dlrm, process

from tritonrec.distributed import RankDiedError
from tritonrec.serving import Predictor, spread
from tritonrec.serving.server import ServerConfig
from tritonrec.serving.server.run import Source, serve
from tritonrec.serving.spread import CHUNK, SpreadPredictor

RANKS = 3


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_dlrm(tmp_path_factory.mktemp("dlrm"))


@pytest.fixture(scope="module")
def ranks(exported):
    made = SpreadPredictor(exported[0], RANKS)
    yield made
    made.close()


def drawn(loader, samples, seed=0):
    """Dense features and ids, known and unknown ones."""
    draw, batch = torch.Generator().manual_seed(seed), loader.batch(1)
    rows = torch.randint(0, len(batch.dense), (samples,), generator=draw)
    dense = batch.dense[rows] + torch.randn(samples, batch.dense.shape[1], generator=draw)
    known = {name: lookup.ids[rows] for name, lookup in batch.lookups().items()}
    unknown = torch.rand(samples, generator=draw) < 0.2
    return dense, {name: torch.where(unknown, ids.flip(0) + 10**9, ids) for name, ids in known.items()}


@pytest.mark.if_changed
@pytest.mark.parametrize("samples", [0, 1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
def test_probabilities_have_the_bits_of_one_process(exported, ranks, samples):
    dense, ids = drawn(exported[1], samples, samples)
    got = ranks.predict(dense, ids)
    assert got.shape == (samples,)
    if samples:  # the program of one process takes no empty batch
        assert torch.equal(got, Predictor.load(exported[0]).predict(dense, ids))


@pytest.mark.if_changed
def test_a_wrong_call_is_refused_and_the_ranks_go_on(exported, ranks):
    dense, ids = drawn(exported[1], 3)
    name = next(iter(ids))
    for wrong, own, named in (
        (torch.ones(3, dense.shape[1] + 1), ids, "dense features must be"),
        (dense.double(), ids, "dense"),
        (dense, {**ids, name: ids[name].int()}, name),
        (dense, {**ids, name: ids[name][:2]}, name),
    ):
        with pytest.raises(ValueError, match=named):
            ranks.predict(wrong, own)
    dense.requires_grad_()
    assert torch.equal(ranks.predict(dense, ids), Predictor.load(exported[0]).predict(dense.detach(), ids))


def late(rank):
    """One rank's tables take longer to load than a request may."""
    load = Predictor.load

    def slow(*given, **options):
        time.sleep(2.5 * rank)
        return load(*given, **options)

    spread.Predictor.load = slow


@pytest.mark.if_changed
def test_ranks_load_at_their_own_speed_and_one_that_stops_is_named(exported, monkeypatch):
    pool = spread.RankPool
    monkeypatch.setattr(spread, "RankPool", lambda ranks: pool(ranks, enter=late))
    made = SpreadPredictor(exported[0], 2, timedelta(seconds=1))
    try:
        dense, ids = drawn(exported[1], 4)
        assert torch.equal(made.predict(dense, ids), Predictor.load(exported[0]).predict(dense, ids))
        assert made.failure == ""
        os.kill(made._pool.processes[1].pid, signal.SIGSTOP)  # it lives, and answers nothing
        with pytest.raises(RankDiedError, match="rank 1"):
            made.predict(dense, ids)
        assert "rank 1" in made.failure
    finally:
        made.close()
    with pytest.raises(RankDiedError, match="the tables are gone"):
        made.predict(dense, ids)


@pytest.mark.if_changed
def test_a_rank_that_ends_and_a_predictor_that_was_closed_are_named(exported):
    made = SpreadPredictor(exported[0], 2)
    dense, ids = drawn(exported[1], 4)
    try:
        made._pool.processes[1].kill()
        until(lambda: made.failure == "rank 1 has ended, load the model again")
    finally:
        made.close()
    with pytest.raises(RankDiedError, match="it was closed"):
        made.predict(dense, ids)


def test_an_export_that_is_replaced_while_ranks_load_is_refused(exported, monkeypatch):
    load = Predictor.load

    def earlier(*given, **options):
        found = load(*given, **options)
        found.manifest["step"] -= 1
        return found

    monkeypatch.setattr(Predictor, "load", earlier)  # of this process, not of the ranks
    with pytest.raises(RankDiedError, match="has become another export while its tables were loaded"):
        SpreadPredictor(exported[0], 2)


def held(communicators):
    """Tables that a rank has loaded."""
    (loaded,) = {rows.func.__self__ for rows in spread._opened["model"].tables.values()}
    return [*loaded.tables]


def test_each_table_is_in_one_process(exported, ranks):
    features, tables = ranks.manifest["dense"]["features"], ranks.manifest["tables"]
    of_ranks = ranks._pool.run(held, RANKS)
    assert sorted(name for each in of_ranks for name in each) == sorted(tables) and all(of_ranks)
    assert len(tables) == len(features) and not ranks.tables
    with pytest.raises(ValueError, match="spread over processes"):
        ranks.rows(features[0], torch.tensor([1]))


def test_what_cannot_be_spread_is_refused_before_a_process_starts(exported, monkeypatch):
    monkeypatch.setattr(spread, "RankPool", None)
    for source, workers, named in [
        (Source(exported[0]), 2, "--ranks does not go with --workers"),
        (Source(exported[0], approximate="hnsw"), 1, "--ranks does not go with --approximate"),
    ]:
        with pytest.raises(ValueError, match=named):
            serve(source, ServerConfig(ranks=2, workers=workers))
    load = Predictor.load

    def pooled(path, **options):
        found = load(path, **options)
        next(iter(found.manifest["features"].values()))["pooling"] = "sum"
        return found

    monkeypatch.setattr(Predictor, "load", pooled)
    with pytest.raises(ValueError, match="is pooled: only rows of single ids are spread"):
        SpreadPredictor(exported[0], 2)


@pytest.mark.if_changed
def test_a_rank_that_cannot_load_its_tables_is_named(tmp_path):
    path, _ = export_dlrm(tmp_path)
    shard = next(path.glob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(RankDiedError, match=rf"rank \d.*{shard.name}"):
        SpreadPredictor(path, 2)


@pytest.mark.if_changed
def test_a_server_names_a_dead_rank_and_starts_ranks_anew(exported, tmp_path):
    """SIGHUP loads the tables again; SIGTERM ends all processes."""
    path, loader = exported
    dense, ids = drawn(loader, 5)
    body = json.dumps(
        {"dense": dense.tolist(), "features": {name: each.tolist() for name, each in ids.items()}}
    )
    want = Predictor.load(path).predict(dense, ids)
    with process(path, "--ranks", "2") as (running, port):

        def answered():
            status, answer = ask(port, body.encode())
            return status == 200 and torch.equal(torch.tensor(answer["probabilities"]), want)

        assert answered() and ask(port, None, "ready")[0] == 200
        before = ranks_of(running.pid)
        assert len(before) == 2
        os.kill(before[1], signal.SIGKILL)
        for _ in range(2):
            status, answer = ask(port, body.encode())
            assert status == 503 and answer["error"]["name"] == "rank_died", answer
            assert re.search(r"load the model again: rank [01] died \(SIGKILL\)", answer["error"]["message"])
        assert ask(port, None, "ready")[1]["status"] == "rank_died"
        running.send_signal(signal.SIGHUP)
        until(answered)
        after = ranks_of(running.pid)
        assert len(after) == 2 and not {*after} & {*before}
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
        until(lambda: not any(alive(each) for each in [*before, *after]))


def ranks_of(server):
    """Processes below a server that a pool calls ranks: those with a window of the exchange."""
    found = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
    parents = {int(child): int(parent) for child, parent in map(str.split, found.splitlines())}
    below, found = {server}, []
    for child in sorted(parents):
        if parents[child] in below:
            below.add(child)
            if holds_window(child):
                found.append(child)
    return found


def holds_window(process):
    folder = f"/proc/{process}/fd"
    try:
        return any("tritonrec window" in os.readlink(f"{folder}/{each}") for each in os.listdir(folder))
    except OSError:
        return False


def alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
