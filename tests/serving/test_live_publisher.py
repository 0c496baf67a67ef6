"""Promise: what is published is whole, whoever else publishes, fails, starts again or is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from live_parts import (
    Training,
    assert_has,
    opened,
    settled,
    state_of,
    traced_once,  # noqa: F401, a fixture of this module
    until,
)
from power_cut import Disk

from tritonrec import Communicators
from tritonrec.data import Vocabulary
from tritonrec.distributed import RankDiedError, Watch
from tritonrec.harness.job import Job
from tritonrec.harness.train.gather import whole_tables
from tritonrec.harness.train.loop import train
from tritonrec.harness.train.run import Run
from tritonrec.pipeline import WindowConfig
from tritonrec.serving import ExportedTable, Predictor, export, programs
from tritonrec.serving.exporter import copied_scorer
from tritonrec.serving.live import (
    CorruptDeltaError,
    DirectorySink,
    Follower,
    LiveError,
    OtherRunError,
    Publisher,
    RedisSink,
    SinkError,
    sink_of,
)
from tritonrec.serving.live.replica import LiveTable
from tritonrec.serving.live.snapshot import name_of_part
from tritonrec.serving.live.wire import pack, unpack


@pytest.mark.if_changed
def test_a_trainer_that_starts_again_begins_an_epoch_and_warns_where_it_is_elsewhere(tmp_path):
    first = Training()
    with opened(first, tmp_path / "sink") as publisher:
        first.run(publisher, 4)
    run, sequence = publisher.run_id, publisher.sequence
    first.trainer.save(tmp_path / "checkpoint")
    follower = Follower.open(tmp_path / "sink")
    first.close()
    (tmp_path / "sink" / f"delta-{sequence + 1:012d}.00000").write_bytes(b"half of a del")  # of a kill

    again = Training(seed=9)
    again.trainer.load(tmp_path / "checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(again, tmp_path / "sink") as publisher:
            assert (publisher.run_id, publisher.sequence, publisher.epoch) == (run, sequence + 1, 2)
            again.run(publisher, 2)
    assert publisher.sequence == sequence + 2
    assert follower.poll() and follower.sequence == sequence + 2
    assert_has(follower.predictor, state_of(again.trainer))

    again.trainer.load(tmp_path / "checkpoint")  # two steps back
    with pytest.warns(RuntimeWarning, match="begins epoch 3 at step 4: steps were published"):
        publisher = opened(again, tmp_path / "sink")
    with publisher:
        settled(publisher)
        assert follower.poll() and (follower.step, follower.sequence) == (4, sequence + 3)
        assert_has(follower.predictor, state_of(again.trainer))
        again.run(publisher, 2)
    assert follower.poll() and follower.step == 6
    assert_has(follower.predictor, state_of(again.trainer))
    again.close()


def test_rows_that_are_others_at_the_published_step_reach_a_replica(tmp_path):
    """Of as many rows, which no step has trained since: a replica would keep those that it has."""
    first = Training()
    with opened(first, tmp_path / "sink") as publisher:
        first.run(publisher, 4)
    follower = Follower.open(tmp_path / "sink")
    first.trainer.save(tmp_path / "checkpoint")
    first.close()
    again = Training()
    again.trainer.load(tmp_path / "checkpoint")
    ids, weights = again.tables.weights()["item"]
    again.tables.load_weights("item", ids, weights + 1)
    with opened(again, tmp_path / "sink"):
        pass
    assert follower.poll()
    assert_has(follower.predictor, state_of(again.trainer))
    again.close()


def test_another_state_at_the_published_step_is_a_new_epoch(tmp_path):
    first = Training()
    with opened(first, tmp_path / "sink"):
        pass
    first.close()
    other = Training(seed=3)
    with pytest.warns(RuntimeWarning, match="its state is another one"):
        opened(other, tmp_path / "sink").close()
    other.close()


@pytest.mark.if_changed
def test_words_are_published_as_they_come(tmp_path):
    training = Training()
    words = training.trainer.vocabularies["item"] = Vocabulary(["a", "", "ü"])
    with opened(training, "memory://live-words") as publisher:
        settled(publisher)
        follower = Follower.open("memory://live-words")
        old = follower.predictor
        words.encode(["bb", "a", "c" * 70], extend=True)
        training.run(publisher, 2)
        settled(publisher)
        sink, whole = sink_of("memory://live-words"), sink_of("memory://live-words").get(0, 2)
        header, tensors = unpack(whole, "it")
        sink.put(0, 2, pack(replace(header, spelled={"item": "other"}), tensors))
        with pytest.raises(CorruptDeltaError, match="other words of 'item'"):
            follower.poll()
        sink.put(0, 2, whole)
        assert follower.poll()
        assert follower.predictor.vocabularies["item"].words.to_pylist() == ["a", "", "ü", "bb", "c" * 70]
        assert len(old.vocabularies["item"]) == 3
        training.trainer.vocabularies["item"] = Vocabulary(["other"])  # numbered anew: a new epoch
        training.run(publisher, 2)
        settled(publisher)
        assert follower.poll() and follower.predictor.vocabularies["item"].words.to_pylist() == ["other"]
        assert publisher.epoch == 2
        more = ["more", "and", "more of them"]
        training.trainer.vocabularies["item"] = Vocabulary(more)  # as long or longer, and other words
        training.run(publisher, 2)
        settled(publisher)
        assert follower.poll() and follower.predictor.vocabularies["item"].words.to_pylist() == more
        assert publisher.epoch == 3
    training.trainer.vocabularies["item"] = Vocabulary(more[::-1])
    with pytest.warns(RuntimeWarning, match="its state is another one"):
        opened(training, "memory://live-words").close()
    assert follower.poll() and follower.predictor.vocabularies["item"].words.to_pylist() == more[::-1]
    assert follower.prove()
    name, value = next(iter(follower.predictor.program.state_dict().items()))
    value.neg_()
    follower.predictor.vocabularies["item"].encode(["new"], extend=True)
    with pytest.raises(CorruptDeltaError, match=f"differs from its deltas in {re.escape(name)}, words item$"):
        follower.prove()
    training.close()


@pytest.mark.if_changed
def test_training_by_command_publishes_and_dlrm_is_followed(tmp_path):
    job = Job("criteo:samples=400,scale=0.0001,seed=3", model="dlrm", batch_size=9, merge=True)
    place, saved = str(tmp_path / "sink"), str(tmp_path / "saved")
    run = Run(job, "nestpipe", WindowConfig(2), steps=7, checkpoint=saved, publish=place, publish_every=3)
    train(Communicators.local(), run, quiet=True)
    follower = Follower.open(place)
    assert (follower.step, follower.sequence) == (7, 4)
    model, _, _ = job.build("adam")
    export(saved, tmp_path / "export", model)
    full, batch = Predictor.load(tmp_path / "export"), job.loader(0, 1).batch(20)
    for name, table in full.tables.items():
        own = follower.predictor.tables[name]
        assert torch.equal(own.ids, table.ids) and torch.equal(own.weights, table.weights), name
    assert torch.equal(follower.predictor.predict(batch), full.predict(batch))
    stopping = Communicators.local()
    stopping.stop.set()
    other = replace(run, checkpoint=None, publish=f"{place}-stopped", publish_every=6)
    stopped = train(stopping, other, quiet=True)
    assert stopped["stopped"] and Follower.open(other.publish).step == stopped["step"] < 6
    for wrong in (replace(run, publish_every=0), replace(run, publish="")):
        with pytest.raises(ValueError, match="go together"):
            train(Communicators.local(), replace(wrong, checkpoint=None), quiet=True)


def test_two_publishers_of_one_trainer_have_all_changes_each(tmp_path):
    training = Training("sequential")
    with opened(training, tmp_path / "a") as first:
        with opened(training, tmp_path / "b") as second:
            for _ in range(3):
                training.run(first, 2)
                second.publish()
        training.run(first, 2)
        want = state_of(training.trainer)
    followers = [Follower.open(tmp_path / name) for name in ("a", "b")]
    assert [each.step for each in followers] == [8, 6]
    assert_has(followers[0].predictor, want)
    log = training.tables.groups[0].table._metadata.changes
    assert not log.readers and not log.active  # who has closed is owed nothing
    training.close()


@pytest.mark.if_changed
def test_programs_are_written_and_read_by_several_threads(tmp_path):
    """What torch saves and loads by is the whole process's."""
    training, start = Training(), Barrier(3)
    described = training.tables.describe()
    program = programs.save_program(
        copied_scorer(training.model, None, (), described)[1], tmp_path / "program.pt2"
    )

    def write_and_read(number):
        path = tmp_path / f"{number}.pt2"
        start.wait()
        for _ in range(3):
            programs.write_program(program, path)
            programs.load_program(path)
        return path.stat().st_size

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(write_and_read, range(3)))) == 1
    training.close()


@pytest.mark.if_changed
def test_a_snapshot_that_is_pruned_while_it_is_loaded(tmp_path, monkeypatch):
    training, load, overtaken = Training("sequential"), Predictor.load, []

    def slow(place, **options):
        if not overtaken:
            overtaken.append(place)
            for _ in range(3):
                training.run(publisher, 2)
                settled(publisher)
        return load(place, **options)

    monkeypatch.setattr(Predictor, "load", slow)
    with opened(training, tmp_path / "sink", snapshot_every=1) as publisher:
        settled(publisher)
        follower = Follower.open(tmp_path / "sink")
        assert not overtaken[0].exists()
        assert_has(follower.predictor, state_of(training.trainer))
        for _ in range(3):  # a snapshot with each
            training.run(publisher, 2)
            settled(publisher)
        overtaken.clear()
        assert follower.poll() and not overtaken[0].exists()
        assert_has(follower.predictor, state_of(training.trainer))
    training.close()


def test_publications_by_time_and_another_model_in_the_same_place(tmp_path):
    training = Training("sequential")
    with opened(training, tmp_path / "sink", every=0, seconds=0.01) as publisher:
        training.run(publisher, 6)
    assert publisher.sequence > 2
    follower = Follower.open(tmp_path / "sink")
    assert follower.step == 6
    assert_has(follower.predictor, state_of(training.trainer))
    training.close()
    other = Training("sequential")
    other.trainer.config = replace(other.trainer.config, precision="bf16")
    with pytest.raises(OtherRunError, match="another model"):
        opened(other, tmp_path / "sink")
    other.close()


def test_a_power_cut_leaves_no_snapshot_without_its_files(tmp_path, monkeypatch):
    sink = DirectorySink(tmp_path / "sink")
    disk = Disk(monkeypatch, tmp_path, lambda path: path.name == "live.json")
    (tmp_path / "file").write_bytes(b"rows")
    for number in (1, 2):
        sink.put_file(number, "item", tmp_path / "file")
        sink.put(0, number, b"delta")
        sink.put_document(number, "{}")
        assert not disk.named and disk.commits == number
    sink.prune(1, 2)
    assert sink.snapshots() == [2]


class Flaky(DirectorySink):
    """Fails while `down`."""

    down = False

    def _write(self, place, content):
        if self.down:
            raise SinkError(f"{self.name} is down")
        super()._write(place, content)


def test_a_store_that_pyarrow_alone_knows_is_a_sink():
    assert sink_of("abfs://container@account.dfs.core.windows.net/live").name.startswith("abfs://")
    with pytest.raises(ValueError, match="mem://live cannot be opened: Protocol not known"):
        sink_of("mem://live")


def test_a_sink_that_is_down_for_a_while_loses_nothing(tmp_path):
    training, sink = Training(), Flaky(tmp_path / "sink")
    with opened(training, sink) as publisher:
        settled(publisher)
        follower = Follower.open(sink)
        sink.down = True
        training.run(publisher, 2)
        time.sleep(0.1)
        assert not follower.poll()
        sink.down = False
        settled(publisher)
        assert follower.poll()
        assert_has(follower.predictor, state_of(training.trainer))
    training.close()


def test_a_sink_that_stays_down_is_an_error_and_then_a_new_epoch(tmp_path):
    training, sink = Training(), Flaky(tmp_path / "sink")
    with opened(training, sink, patience=0.2) as publisher:
        settled(publisher)
        follower = Follower.open(sink)
        sink.down = True
        training.run(publisher, 2)
        time.sleep(0.5)
        with pytest.raises(SinkError, match=r"rank 0 could not publish.*is down"):
            training.run(publisher, 2)
        sink.down = False
        publisher.publish()
        settled(publisher)
        assert follower.poll() and follower.step == 4 and publisher.epoch == 2
        assert_has(follower.predictor, state_of(training.trainer))
    training.close()


def test_a_snapshot_names_the_rank_that_stalls_in_its_part(tmp_path):
    store, limit = dist.HashStore(), timedelta(seconds=0.4)
    here, stopped = Watch(store, 0, 3, limit), Watch(store, 2, 3, limit)
    stopped.begin_call("snapshots")
    with stopped.doing("snapshot(3)"):
        stopped._report()
    stopped.close()
    publisher = Publisher.__new__(Publisher)
    publisher._sink, publisher._patience, publisher._closing = DirectorySink(tmp_path), 600.0, Event()
    publisher._groups = SimpleNamespace(watch=here, routing=SimpleNamespace(peers=[0, 2]))
    match = r"^rank 2 has not finished stage snapshot\(3\) within .* last seen in snapshot\(3\), "
    with pytest.raises(RankDiedError, match=match), here.doing("snapshot(3)"):
        publisher._files_of_others(3, 2, 1)
    (tmp_path / "part").write_text("[1, 2]")
    publisher._sink.put_file(3, name_of_part(1), tmp_path / "part")
    assert publisher._files_of_others(3, 2, 1) == [[1, 2]]
    here.close()


def test_no_delta_is_written_behind_one_that_is_missing(tmp_path):
    class WithoutSecond(DirectorySink):
        def _write(self, place, content):
            if "delta-000000000002" in str(place):
                raise SinkError("down")
            super()._write(place, content)

    training, sink = Training("sequential"), WithoutSecond(tmp_path / "sink")
    with pytest.raises(SinkError), opened(training, sink, patience=2.0) as publisher:
        training.run(publisher, 4)  # deltas 2 and 3
        publisher.flush()
    assert not list((tmp_path / "sink").glob("delta-*"))
    training.close()


@pytest.mark.if_changed
def test_ranks_publish_their_own_parts(pool, tmp_path):
    assert all(pool.run(_two_ranks, 2, str(tmp_path)))


def _two_ranks(communicators, folder):
    training = Training("nestpipe", communicators=communicators)
    follower, sink = None, Path(folder, "sink")
    with opened(training, sink, snapshot_every=2) as publisher:
        for turn in range(4):
            training.run(publisher, 2)
            settled(publisher)
            communicators.control.all_gather_texts("")
            follower = follower or Follower.open(sink)
            follower.poll()
            assert follower.step == training.trainer.next_step, turn
            whole = whole_tables(training.trainer.rows_of_ranks()).weights()["item"]
            table = follower.predictor.tables["item"]
            at = torch.searchsorted(whole[0], table.ids)
            assert torch.equal(whole[0][at], table.ids) and torch.equal(whole[1][at], table.weights)
            rows = communicators.control.all_gather_texts(str(len(training.tables.groups[0].table)))
            assert len(table.ids) == sum(map(int, rows))
            communicators.control.all_gather_texts("")
        # Clocks and writes are each rank's own, and all decide alike: rank 1 takes longer, then is busy; the
        # sink that rank 0 looks at has lost the last snapshot.
        rank = communicators.rank
        publisher._seconds, publisher._began, publisher._steps = 1.0, time.monotonic() - 10 - 90 * rank, 100
        assert len({*communicators.control.all_gather_texts(str(publisher._paced(1)))}) == 1
        publisher._seconds, publisher._is_busy = 0.0, lambda: rank == 1
        training.run(publisher, 4)
        assert publisher._snapshot is None
        del publisher._is_busy
        settled(publisher)
        publisher._lost = rank == 0
        training.run(publisher, 2)
        assert publisher.epoch == 2
    names = sorted(path.name for path in sink.glob("delta-*"))
    assert any(name.endswith(".00001") for name in names)
    training.close()
    return True


def table_of(ids, draw):
    weights = torch.from_numpy(draw.standard_normal((len(ids), 3)).astype(np.float32))
    return ExportedTable(torch.tensor(sorted(ids), dtype=torch.int64), weights, 1, 0, 0.1, "initial")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hold", [0, 1, 5])
def test_versions_of_a_table_equal_a_dictionary(seed, hold):
    draw = np.random.default_rng(seed)
    live = LiveTable(table_of(range(-20, 20, 2) if seed else [], draw))
    want = dict(zip(live.table.ids.tolist(), live.table.weights.tolist(), strict=True))
    held = []
    for turn in range(60):
        changed = sorted(set(draw.integers(-30, 30 + 2 * turn, draw.integers(0, 9)).tolist()))
        gone = sorted(set(draw.choice([*want, 99], 3).tolist()) - set(changed)) if turn % 3 == 0 else []
        if turn % 4 == 1:  # behind the last one
            changed += [max([*want, *changed, 0]) + 1]
        weights = torch.from_numpy(draw.standard_normal((len(changed), 3)).astype(np.float32))
        arguments = (torch.tensor(changed, dtype=torch.int64), weights, torch.tensor(gone, dtype=torch.int64))
        if turn % 7 == 3:
            live.prepare(arguments[0], -weights, arguments[2])
            live.drop()
        live.prepare(*arguments)
        live.commit()
        want = {key: row for key, row in want.items() if key not in gone}
        want |= dict(zip(changed, weights.tolist(), strict=True))
        table = live.table
        held = [*held, (table.weights[: len(table.ids)], table.ids, dict(want))][-hold:] if hold else []
        del table
        for weights, ids, then in [*held, (live.table.weights, live.table.ids, want)]:
            assert ids.tolist() == sorted(then) and weights.tolist() == [then[key] for key in sorted(then)]
        del weights, ids


def test_a_delta_writes_the_rows_that_differ_and_no_others():
    draw = np.random.default_rng(1)
    live = LiveTable(table_of(range(1000), draw))
    none, moved = torch.empty(0, dtype=torch.int64), []
    for ids in ([5, 6], [7], [6, 900, 999], [1000], [3]):
        live.prepare(torch.tensor(ids, dtype=torch.int64), torch.ones(len(ids), 3, dtype=torch.float32), none)
        live.commit()
        moved.append(live.moved)
    assert moved == [1002, 1001, 3 + 1, 1 + 3, 1 + 1]  # two buffers are filled, and then catch up


def test_arguments_and_places_are_checked(tmp_path):
    training = Training()
    for options, words in (
        ({"every": 0}, "every= steps or seconds="), ({"seconds": 2.0}, "every= steps or seconds="),
        ({"snapshot_every": 0}, "snapshot_every"), ({"patience": 0.0}, "patience"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            opened(training, tmp_path, **options)
    (tmp_path / "file").write_text("kept")
    for place in (tmp_path / "file", tmp_path / "file" / "sink", "/proc/nowhere/sink"):
        with pytest.raises(SinkError, match="cannot be used"):
            opened(training, place, patience=1e6)  # at once
    assert (tmp_path / "file").read_text() == "kept"
    training.close()
    with pytest.raises(LiveError, match="nothing was published"):
        Follower.open(tmp_path / "nothing")


@pytest.fixture(params=["fake", "server"])
def redis_server(request, tmp_path, monkeypatch):
    """A URL, and functions that stop a server and start it again with what it had."""
    import redis

    if request.param == "fake":
        import fakeredis

        server = fakeredis.FakeServer()
        monkeypatch.setattr(redis.Redis, "from_url", lambda *_, **__: fakeredis.FakeRedis(server=server))
        yield (
            "redis://127.0.0.1/0",
            lambda: setattr(server, "connected", False),
            lambda: setattr(server, "connected", True),
        )
        return
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server; fakeredis checks the same without one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = []

    def start():
        command = ["redis-server", "--port", str(port), "--dir", str(tmp_path), "--appendonly", "yes"]
        command += ["--appendfsync", "always", "--bind", "127.0.0.1"]
        servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        sink = RedisSink(f"redis://127.0.0.1:{port}/0?key=wait")

        def answers():
            try:
                return sink.snapshots() == []
            except SinkError:
                return False

        until(answers)

    def stop():
        servers[-1].kill()
        servers[-1].wait()

    start()
    yield f"redis://127.0.0.1:{port}/0", stop, start
    stop()


@pytest.mark.if_changed
def test_redis_is_killed_and_started_again(redis_server):
    url, stop, start = redis_server
    training = Training()
    stop()
    with pytest.raises(SinkError, match="cannot be used"):
        opened(training, f"{url}?key=model", patience=1e6)
    start()
    with opened(training, f"{url}?key=model", snapshot_every=3) as publisher:
        settled(publisher)
        follower = Follower.open(f"{url}?key=model")
        training.run(publisher, 2)
        settled(publisher)
        assert follower.poll()
        assert_has(follower.predictor, state_of(training.trainer))
        stop()
        training.run(publisher, 2)
        with pytest.raises(SinkError, match="cannot be used"):
            follower.poll()
        assert follower.step == 2
        start()
        settled(publisher)
        assert follower.poll()
        assert_has(follower.predictor, state_of(training.trainer))
        training.run(publisher, 6)
        settled(publisher)
    sink = RedisSink(f"{url}?key=model")
    assert Follower.open(sink).step == 10 and len(sink.snapshots()) == 2
    sink.truncate(0, publisher.sequence - 1)
    assert sink.last(0) == publisher.sequence - 1 and sink.get(0, publisher.sequence) is None
    sink.put(0, publisher.sequence, b"again")
    sink.put(0, publisher.sequence, b"again")  # its answer was lost
    with pytest.raises(SinkError, match="equal or smaller"):
        sink.put(0, publisher.sequence, b"other")
    training.close()


def test_a_file_of_a_snapshot_in_redis_stays_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sink = RedisSink.__new__(RedisSink)
    sink._key, sink._failure = "model", OSError
    sink._redis = SimpleNamespace(smembers=lambda _: {b"../outside", b"dense.pt2"}, get=lambda _: b"x")
    with sink.opened(3) as folder:
        assert [each.name for each in folder.iterdir()] == ["dense.pt2"]
        assert os.listdir(tmp_path) == [folder.name]


@pytest.mark.slow
@pytest.mark.multi_rank
def test_kills_at_any_byte_leave_whole_states_and_right_answers(tmp_path):
    """A handful of kills; ci/attack/kill_serving.py has hundreds."""
    command = [sys.executable, str(Path(__file__).parents[2] / "ci" / "attack" / "kill_serving.py")]
    command += ["--kills", "3", "--seed", "4", "--folder", str(tmp_path / "kills")]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": root},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["kills"] == 3 and told["wrong"] == 0 and told["states"] > 3 and told["answers"] > 0
