"""Promise: models with their rows in several processes have the bits of one, also followed live."""

from __future__ import annotations

import json
import os
import signal
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from live_parts import Training, opened, settled, traced_once, until  # noqa: F401
from served_models import LONGEST, SIZES, ask, export_dlrm, export_hstu, process
from trainer_parts import adam_trainer

from tritonrec import FeatureConfig
from tritonrec.data import ImpressionLoader, load
from tritonrec.distributed import RankDiedError
from tritonrec.nn import GRM, HSTU, GRMConfig
from tritonrec.serving import Predictor, export, spread_rows
from tritonrec.serving.cached import CachedPredictor
from tritonrec.serving.live import CorruptDeltaError, Follower, LiveError
from tritonrec.serving.server import ServerConfig
from tritonrec.serving.server.run import Source
from tritonrec.serving.spread_rows import SpreadFollower, SpreadRowsPredictor

RANKS = 3


@pytest.fixture(scope="module")
def hstu(tmp_path_factory):
    return export_hstu(tmp_path_factory.mktemp("hstu"))


@pytest.fixture(scope="module")
def spread(hstu):
    made = SpreadRowsPredictor.load(hstu[1], RANKS)
    yield made
    made.close()


def drawn(users, seed=0, least=0, most=90):
    """Histories with ids that have no row, some of them negative."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(least, most, (1 + user % LONGEST,), generator=draw) for user in range(users)]


@pytest.mark.if_changed
@pytest.mark.parametrize("users", [1, 2, 70])
def test_scores_and_searches_have_the_bits_of_one_process(hstu, spread, users):
    full, histories = Predictor.load(hstu[1]), drawn(users, users, -5)
    candidates = torch.tensor([5, 17, -3, 9999, 5, 4], dtype=torch.int64)
    assert torch.equal(spread.encode(histories), full.encode(histories))
    assert torch.equal(spread.scores(histories), full.scores(histories))
    assert torch.equal(spread.scores(histories, candidates), full.scores(histories, candidates))
    for k in (1, 7, len(full.item_ids) - 12):
        for exclude in ("history", None, [each[:2] for each in histories]):
            got, want = (each.retrieve(histories, k, exclude=exclude) for each in (spread, full))
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.if_changed
def test_of_equal_scores_the_smaller_id_comes_first(hstu, spread):
    """Whatever rank has it: all rows of the model's items are scored alike by a vector of zeros."""
    nothing, none = torch.zeros(1, 16, dtype=torch.float32), torch.zeros(0, dtype=torch.int64)
    ids, scores = spread.best_without(nothing, 9, none, torch.zeros(2, dtype=torch.int64))
    assert ids[0].tolist() == spread.item_ids[:9].tolist() and not scores.any()


@pytest.mark.if_changed
def test_no_process_has_all_rows_and_the_front_has_none(spread, hstu):
    assert all(table.weights.numel() == 0 for table in spread.tables.values())
    shapes = spread.ranks._run(shapes_of)
    assert sum(rows for rows, _ in shapes) == len(spread.item_ids) and all(
        0 < rows < len(spread.item_ids) and dim == 16 for rows, dim in shapes
    )


def shapes_of(_):
    return tuple(spread_rows._versions[0]["item"].weights.shape)


def test_what_is_wrong_is_refused_and_the_ranks_go_on(hstu, spread):
    with pytest.raises(ValueError, match="the model takes 1 to"):
        spread.encode([[1] * (LONGEST + 1)])
    with pytest.raises(ValueError, match="items are wanted"):
        spread.retrieve([[1, 2, 3]], len(spread.item_ids))
    with pytest.raises(ValueError, match="NaN"):
        spread.best_without(torch.full((1, 16), torch.nan), 2, *spread.left_out(2, None, spread.read([1])[0]))
    with pytest.raises(ValueError, match="publication 7 is not here any more, but 0"):
        SpreadRowsPredictor(spread, spread.ranks, 7).encode([[1]])
    full = Predictor.load(hstu[1])
    assert torch.equal(spread.encode([[1, 2]]), full.encode([[1, 2]])) and spread.failure == ""


@pytest.mark.if_changed
def test_rows_in_8_bits_and_a_damaged_file(hstu, tmp_path):
    path = hstu[0].parent / "run"
    export(path, tmp_path / "int8", HSTU(SIZES), weights="int8")
    full, histories = Predictor.load(tmp_path / "int8"), drawn(5)
    made = SpreadRowsPredictor.load(tmp_path / "int8", 2)
    try:
        assert torch.equal(made.scores(histories), full.scores(histories))
    finally:
        made.close()
    shard = next((tmp_path / "int8").glob("item*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=shard.name):
        SpreadRowsPredictor.load(tmp_path / "int8", 2)


def test_keys_and_values_are_cached_over_ranks(hstu, spread):
    cached, full = CachedPredictor(spread, HSTU(SIZES), "1MiB"), Predictor.load(hstu[1])
    for first, last in ((0, 5), (5, 9)):
        cached.append("u", [*range(first, last)])
        assert torch.equal(cached.scores(["u"]), full.scores([*range(last)]))
    assert cached.stats().reused == 5


@pytest.mark.if_changed
def test_clicks_judge_alike_row_by_row(tmp_path):
    """As of a DLRM that is followed."""
    path, loader = export_dlrm(tmp_path)
    made = SpreadRowsPredictor.load(path, 2)
    try:
        assert torch.equal(made.predict(loader.batch(1)), Predictor.load(path).predict(loader.batch(1)))
    finally:
        made.close()


@pytest.mark.if_changed
def test_a_grm_judges_alike(tmp_path):
    shown = ImpressionLoader(
        load("zipf:users=60,items=80,ratings=1,seed=3"), 16, max_history=6, max_exposed=4, seed=0
    )
    sizes = {"dim": 16, "heads": 2, "qk_dim": 8, "v_dim": 8, "context_dim": 8}
    model = GRM(GRMConfig(max_seq_len=11, context=shown.context, tasks=shown.tasks, **sizes))
    features = [FeatureConfig("item", 16), FeatureConfig("action", 16), FeatureConfig("user_id", 8)]
    with adam_trainer(model, features) as trainer:
        trainer.step(shown.batch(0))
        trainer.save(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", model)
    served = Source(tmp_path / "out").open(ServerConfig(ranks=2))
    made = served.version.predictor
    try:
        assert isinstance(made, SpreadRowsPredictor)
        for step in (1, 2):
            want = Predictor.load(tmp_path / "out").predict(shown.batch(step))
            assert torch.equal(made.predict(shown.batch(step)), want)
    finally:
        made.close()


def assert_alike(got, want):
    histories = drawn(4, 1)
    histories = [each[:6] for each in histories]
    assert got.step == want.step and torch.equal(got.item_ids, want.item_ids)
    assert torch.equal(got.scores(histories), want.scores(histories))
    for one, other in zip(got.retrieve(histories, 5), want.retrieve(histories, 5), strict=True):
        assert torch.equal(one, other)


@pytest.mark.if_changed
def test_ranks_follow_a_trainer_and_a_reader_sees_one_step_whole(tmp_path):
    """Rows are evicted meanwhile, and a version that somebody still reads answers as it was."""
    training, url = Training(), str(tmp_path / "live")
    publisher = opened(training, url)
    training.run(publisher, 2)
    publisher.flush()
    settled(publisher)
    follower, alone = SpreadFollower(url, 2), Follower.open(url)
    try:
        assert not follower.poll()
        assert_alike(follower.predictor, alone.predictor)
        for _ in range(4):
            before, kept = follower.predictor, alone.predictor
            training.run(publisher, 4)
            publisher.flush()
            settled(publisher)
            assert follower.poll() and alone.poll()
            assert follower.sequence == alone.sequence and follower.step == alone.step > kept.step
            assert_alike(follower.predictor, alone.predictor)
            assert_alike(before, kept)
            assert follower.published_at == alone.published_at and follower.lag_seconds() < 100
    finally:
        follower.close()
        publisher.close()
        training.close()


def test_requests_come_between_while_a_rank_makes_its_next_version(monkeypatch):
    go, asked = threading.Event(), []

    def poll(until):
        asked.append(until)
        if not go.wait(10):
            raise LiveError("it waited for a request that waits for it")

    tables = {"item": SimpleNamespace(ids=torch.arange(3))}
    follower = SimpleNamespace(poll=poll, sequence=5, predictor=SimpleNamespace(tables=tables))
    monkeypatch.setattr(spread_rows, "_followers", [follower])
    monkeypatch.setattr(spread_rows, "_making", {})
    monkeypatch.setattr(spread_rows, "_versions", versions := {3: "before", 4: "served"})
    assert [spread_rows._advance(None, 5, 4) for _ in range(2)] == [None, None]
    assert versions == {3: "before", 4: "served"}
    go.set()
    until(lambda: (made := spread_rows._advance(None, 5, 4)) and made == (5, {"item": 3}))
    assert spread_rows._advance(None, 5, 4) == (5, {"item": 3})  # another rank is not ready yet
    assert versions == {4: "served", 5: tables} and asked == [5]


def test_a_rank_that_has_not_reached_a_publication_looks_for_it_again(monkeypatch):
    came = [4, 5]  # first the sink shows this rank less than the front has seen

    def poll(until):
        follower.sequence = came.pop(0)

    tables = {"item": SimpleNamespace(ids=torch.arange(3))}
    follower = SimpleNamespace(poll=poll, sequence=4, predictor=SimpleNamespace(tables=tables))
    monkeypatch.setattr(spread_rows, "_followers", [follower])
    monkeypatch.setattr(spread_rows, "_making", {})
    monkeypatch.setattr(spread_rows, "_versions", {})
    found = []
    while len(found) < 3:
        found += filter(None, [spread_rows._advance(None, 5, 4)])
    assert found == [(4, {"item": 3}), (5, {"item": 3}), (5, {"item": 3})] and not came


@pytest.mark.if_changed
def test_a_damaged_delta_is_named_and_a_dead_rank_comes_back(tmp_path):
    training, place = Training(), tmp_path / "live"
    publisher = opened(training, str(place))
    publisher.flush()
    follower = SpreadFollower(str(place), 2)
    try:
        training.run(publisher, 2)
        publisher.flush()
        settled(publisher)
        files = [each for each in place.rglob("*") if each.is_file() and "delta" in str(each)]
        newest = max(files, key=lambda each: each.stat().st_mtime_ns)
        right = newest.read_bytes()
        newest.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
        served, step = follower.predictor, follower.step
        rows = len(served.item_ids)
        with pytest.raises(LiveError, match=rf"ranks have \[{rows}, 1\] rows of item at publication 7"):
            follower._check(7, [{"item": rows}, {"item": 1}])
        with pytest.raises(CorruptDeltaError):
            follower.poll()
        assert follower.predictor is served and follower.step == step
        newest.write_bytes(right)
        assert follower.poll() and follower.step > step
        want = follower.predictor.scores([[1, 2, 3]])
        os.kill(follower._ranks._pool.processes[1].pid, signal.SIGKILL)
        until(lambda: follower.predictor.failure)
        with pytest.raises(RankDiedError):
            follower.predictor.scores([[1, 2, 3]])
        assert follower.poll() and torch.equal(follower.predictor.scores([[1, 2, 3]]), want)
    finally:
        follower.close()
        publisher.close()
        training.close()


def test_a_rank_that_makes_no_version_is_named_in_time():
    """Its sink does not answer, or it was stopped where a call of it still ends."""
    follower = SpreadFollower.__new__(SpreadFollower)
    follower._front = SimpleNamespace(poll=lambda: None, sequence=6)
    follower._ranks = SimpleNamespace(failure=None, ask=lambda *_: [(6, {}), None])
    follower._timeout, follower.sequence = timedelta(seconds=0.05), 5
    with pytest.raises(LiveError, match=r"ranks \[1\] have not made publication 6 within 0.05 s"):
        follower.poll()
    assert follower.sequence == 5


@pytest.mark.if_changed
def test_a_server_follows_with_ranks(tmp_path):
    training, url = Training(), str(tmp_path / "live")
    publisher = opened(training, url)
    training.run(publisher, 2)
    publisher.flush()
    settled(publisher)
    body = json.dumps({"histories": [[1, 2, 3], [4]], "k": 5}).encode()
    try:
        with process("--follow", url, "--ranks", "2") as (running, port):
            until(lambda: ask(port, None, "ready")[0] == 200)
            for _ in range(2):
                alone = Follower.open(url)
                until(lambda at=alone.sequence: ask(port, None, "ready")[1]["sequence"] == at)
                status, answer = ask(port, body, "retrieve")
                items, scores = alone.predictor.retrieve([[1, 2, 3], [4]], 5)
                assert status == 200 and answer["step"] == alone.step and answer["items"] == items.tolist()
                assert torch.equal(torch.tensor(answer["scores"], dtype=torch.float32), scores)
                training.run(publisher, 4)
                publisher.flush()
                settled(publisher)
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0
    finally:
        publisher.close()
        training.close()
