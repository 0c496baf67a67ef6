"""Promise: a rank that stands still is named within a bounded time, with its stage, also while it saves."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from stalling import work

from tritonrec.distributed import Communicator, RankDiedError, RankPool, Watch, limits
from tritonrec.distributed.fork_server import start_process
from tritonrec.distributed.groups import _watch_from_environment
from tritonrec.distributed.rank_process import start_store
from tritonrec.distributed.reports import Report, read_reports

pytestmark = pytest.mark.multi_rank
TIMEOUT = 3.0
BUSY = 2.0
"""Seconds beyond what is promised, for machines that are busy; a second wait would be `TIMEOUT` more."""
BOUND = 40.0
"""Three times what is promised, for machines that are busy; a save alone would wait 30 minutes."""


@pytest.mark.parametrize("where, stage", [("compute", "in compute(3, 0)"), ("save", "save(4)")])
@pytest.mark.slow
def test_a_pool_names_a_stopped_rank_and_its_stage(tmp_path, where, stage):
    with RankPool((2,), timedelta(seconds=TIMEOUT)) as pool:
        assert pool.run(work, 2, "", 1, None, 2) == [2, 2]  # all kernels are loaded
        began = time.monotonic()
        with pytest.raises(RankDiedError) as caught:
            pool.run(work, 2, where, 1, str(tmp_path))
        pool.close()
        assert time.monotonic() - began < BOUND
    first, last = str(caught.value).splitlines()[::-1][-1], str(caught.value).splitlines()[-1]
    assert first.startswith("rank 0: ") and "rank 1 has not " in first and "s ago" in first
    assert stage in first and stage in last
    assert last.startswith("rank 1 did not answer within ")


class Ranks:
    """Ranks started as torchrun starts them; `agent` says whether this process serves their store."""

    def __init__(self, tmp_path, where, victim, agent=True, world_size=2):
        script = Path(__file__).with_name("stalling.py")
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.store, port = store, store.port
        environment = {
            **os.environ,
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        if agent:
            environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        else:
            self.store = None
        environment |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, script, where, str(victim), str(TIMEOUT), str(tmp_path)],
                stdout=subprocess.PIPE, text=True, env={**environment, "RANK": str(rank)},
            )
            for rank in range(world_size)
        ]  # fmt: skip

    def ending_of(self, rank):
        """Seconds from this rank's beginning to its end, and its last words."""
        output, _ = self.processes[rank].communicate(timeout=60)
        begun, *_, ended = output.splitlines()
        word, moment, message = ended.split(" ", 2)
        assert word == "ended" and self.processes[rank].returncode == 2
        return float(moment) - float(begun.split()[1]), message

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "where, stage", [("compute", "in compute(3, 0)"), pytest.param("save", "save(4)", marks=pytest.mark.slow)]
)
def test_a_stopped_rank_is_named_under_torchrun(tmp_path, where, stage):
    with Ranks(tmp_path, where, 1) as ranks:
        seconds, message = ranks.ending_of(0)
    assert seconds < BOUND
    assert "rank 1 has not " in message and stage in message and "s ago" in message


@pytest.mark.slow
def test_rank_0_is_named_though_it_serves_the_store(tmp_path):
    with Ranks(tmp_path, "compute", 0, agent=False) as ranks:
        seconds, message = ranks.ending_of(1)
    assert seconds < BOUND
    assert "rank 0 has not " in message and "compute(3, 0)" in message


@pytest.mark.slow
@pytest.mark.parametrize("where", ["save", "a save", "a load", "an evaluation"])
def test_rank_0_is_named_at_any_place_though_it_serves_the_store(tmp_path, where):
    with Ranks(tmp_path, where, 0, agent=False) as ranks:
        _seconds, message = ranks.ending_of(1)
    if where.startswith("a"):  # which begins before the place, so that the time is that of the wait
        assert _seconds < TIMEOUT + 5 + BUSY
    assert "rank 0 has not " in message and ("s ago" in message or "never seen" in message)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a copy", "a restoration", "a trainer", "a step", "a publication"])
@pytest.mark.parametrize(("victim", "agent"), [(0, False), (1, True)])
def test_a_rank_that_stops_at_any_other_place_is_named(tmp_path, where, victim, agent):
    with Ranks(tmp_path, where, victim, agent) as ranks:
        seconds, message = ranks.ending_of(1 - victim)
    assert seconds < TIMEOUT + 5 + BUSY
    assert f"rank {victim} has not " in message and ("s ago" in message or "never seen" in message), message


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a step after SIGTERM", "a copy after SIGTERM"])
def test_three_ranks_name_a_fourth_that_was_told_to_end(tmp_path, where):
    with Ranks(tmp_path, where, 2, world_size=4) as ranks:
        endings = [ranks.ending_of(rank) for rank in (0, 1, 3)]
    for seconds, message in endings:
        assert seconds < TIMEOUT + 5 + BUSY and "rank 2" in message, message


@pytest.mark.slow
@pytest.mark.parametrize("place", ["init_process_group", "new_group"])
@pytest.mark.parametrize(("victim", "agent"), [(0, False), (1, False), (1, True)])
def test_a_rank_that_stops_while_ranks_join_is_named(tmp_path, place, victim, agent):
    with Ranks(tmp_path, f"join {place}", victim, agent) as ranks:
        seconds, message = ranks.ending_of(1 - victim)
    assert seconds < BOUND
    assert re.search(rf"rank {victim} (has not reached stage|did not answer)", message), message


def stop_process(number):
    """Stop it, and wait until none of its threads runs."""
    os.kill(number, signal.SIGSTOP)
    threads = Path(f"/proc/{number}/task")
    while any(path.read_text().rpartition(")")[2].split()[0] != "T" for path in threads.glob("*/stat")):
        time.sleep(0.001)


def serve_reports(connection):
    """A process that serves a store, and sends its port."""
    store = start_store()
    connection.send(store.port)
    connection.recv()


@pytest.fixture
def stopped(monkeypatch):
    """A connection to a store, and a function that stops the process that serves it."""
    monkeypatch.setattr("tritonrec.distributed.watch.READ_TIMEOUT", 0.2)
    here, there = multiprocessing.Pipe()
    process = start_process("store", serve_reports, (there,))
    store = dist.TCPStore("127.0.0.1", here.recv(), None, False, wait_for_workers=False)
    yield store, partial(stop_process, process.pid)
    process.kill()
    for (
        each
    ) in threading.enumerate():  # one that a store answers while the interpreter ends would end it badly
        if each.name in ("limited call", "watch"):
            each.join(10)


@pytest.mark.if_changed
@pytest.mark.parametrize("when", ["before it came", "after it came", "while others are missing"])
def test_a_save_names_the_rank_whose_process_serves_the_store_where_it_is_stopped(stopped, when):
    store, stop = stopped
    watch = Watch(store, 1, 3, timedelta(seconds=0.6))
    store.set("a 1 2", "here")
    if when == "before it came":
        stop()
    elif when == "after it came":
        store.set("a 1 0", "here")
        stop()
    else:
        threading.Timer(0.2, stop).start()
    began = time.monotonic()
    with (
        pytest.raises(RankDiedError, match=r"^rank 0 has not reached stage save\(4\) within "),
        watch.doing("save(4)"),
    ):
        watch.monitored_barrier("a", [0, 1, 2], timedelta(minutes=30))
    assert time.monotonic() - began < BOUND
    began = time.monotonic()
    error = watch.explain("reduce", 1, [0, 1], 0.6, RuntimeError("Timed out"))
    assert str(error).startswith("rank 0 has not reached collective 1 of group reduce within ")
    assert time.monotonic() - began < BOUND
    assert watch.still == (0,)
    watch.close()


def test_a_store_that_does_not_answer_costs_less_than_five_seconds(store, monkeypatch):
    watch, limits = Watch(store, 1, 2, timedelta(seconds=0.4)), []

    def silent(seconds, _function):
        limits.append(seconds)
        raise TimeoutError

    monkeypatch.setattr("tritonrec.distributed.watch.within", silent)
    watch.fail(watch.explain("routing", 1, [0, 1], 0.4, RuntimeError("Timed out")))
    assert 0 < sum(limits) < 5
    watch.close()


@pytest.mark.parametrize("server", [0, None])  # the agent of torchrun serves it
def test_rank_0_names_those_that_it_has_never_seen(store, server):
    watch = Watch(store, 0, 2, timedelta(seconds=0.2), server=server)
    error = watch.explain("routing", 1, [0, 1], 0.2, RuntimeError("Timed out"))
    assert str(error).startswith("rank 1 has not reached") and str(error).endswith(": it was never seen")
    watch.close()


@pytest.mark.if_changed
def test_ranks_do_not_name_rank_0_where_the_launcher_serves_the_store(stopped):
    store, stop = stopped
    watch = Watch(store, 1, 2, timedelta(seconds=0.3), server=None)
    stop()
    with pytest.raises(RankDiedError, match="it is unknown which: the store of their reports, in the launch"):
        watch.monitored_barrier("a", [0, 1], timedelta(minutes=30))
    watch.close()


@pytest.mark.if_changed
def test_a_watch_is_made_though_the_store_is_silent(stopped):
    store, stop = stopped
    stop()
    Watch(store, 1, 2, timedelta(seconds=0.3)).close()


class SlowOnce:
    """A store that answers the first question about reports after everybody has given up."""

    def __init__(self, store):
        self.store, self.slow = store, True

    def check(self, keys):
        if keys[0].startswith("report") and self.slow:
            self.slow = False
            time.sleep(0.5)
            self.store.set("a 1 1", "here")
        return self.store.check(keys)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_a_store_that_does_not_answer_in_time_says_nothing_of_ranks(store, monkeypatch):
    monkeypatch.setattr("tritonrec.distributed.watch.READ_TIMEOUT", 0.3)
    other = Watch(store, 1, 2, timedelta(seconds=0.2))
    watch = Watch(SlowOnce(store), 0, 2, timedelta(seconds=0.2))
    watch.monitored_barrier("a", [0, 1], timedelta(seconds=20))
    watch.close(), other.close()


def test_a_failure_of_another_task_ends_no_task(store):
    here, there = watches(store, 2)
    there.fail(OSError("full"))
    here.begin_task()
    here.begin_call("routing")
    error = here.explain("routing", 1, [0, 1], 0.4, RuntimeError("Timed out"))
    assert "full" not in str(error) and "rank 1 has not reached" in str(error)


def test_a_rank_that_was_named_once_is_not_waited_for_again(store):
    """Neither by another thread, whose group is another, nor by the next call: each would add a timeout."""
    here, there = watches(store, 2)
    there.close()
    saves, steps = (Communicator(None, name, here, [0, 1], name == "saves") for name in ("saves", "steps"))
    with pytest.raises(RankDiedError, match=r"^rank 1 has not reached .* of group saves") as first:
        saves._collective(lambda: None)
    for each in (saves, steps):
        with pytest.raises(RankDiedError, match=f"^{re.escape(str(first.value))}$"):
            each._collective(lambda: pytest.fail("it waits again"))
    here.begin_task()
    steps._collective(lambda: None)


@pytest.mark.if_changed
def test_the_end_of_the_rank_that_serves_the_store_hides_no_other(stopped):
    """It names a third rank, and ends before the others have: they would name it."""
    store, stop = stopped
    serving, here = (Watch(store, rank, 3, timedelta(seconds=1.0)) for rank in range(2))
    serving.fail(RankDiedError("rank 2 has not reached stage route(3)"))
    began = time.monotonic()
    serving.linger()
    assert time.monotonic() - began >= here.interval  # in which every rank reads once
    stop()
    error = here.explain("routing", 1, [0, 1, 2], 1.0, RuntimeError("Connection closed by peer"))
    assert str(error) == "rank 2 has not reached stage route(3)"
    serving.close(), here.close()


def test_a_rank_lingers_no_longer_than_others_need(store):
    here, there = watches(store, 2, timeout=80.0)
    there.fail(OSError("full"))
    began = time.monotonic()
    here.linger()  # all others have failed
    there.linger()  # it serves nothing
    assert time.monotonic() - began < 0.9
    here.close(), there.close()


@pytest.mark.slow
def test_a_rank_that_fails_is_named_with_its_error(tmp_path):
    with Ranks(tmp_path, "fail", 1) as ranks:
        assert "the disk of this rank is gone" in ranks.ending_of(1)[1]
        seconds, message = ranks.ending_of(0)
    assert seconds < BOUND
    assert "rank 1 has failed: StageFailedError: stage compute(0, 0)" in message
    assert "the disk of this rank is gone" in message


@pytest.mark.slow
def test_a_rank_that_dies_is_named_with_its_stage(tmp_path):
    with Ranks(tmp_path, "die", 1) as ranks:
        seconds, message = ranks.ending_of(0)
    assert seconds < BOUND
    assert "rank 1 " in message and "it was last seen " in message


@pytest.fixture
def store():
    return dist.HashStore()


def watches(store, count, timeout=0.4):
    found = [Watch(store, rank, count, timedelta(seconds=timeout)) for rank in range(count)]
    return found


def test_reports_have_the_stage_of_a_rank(store):
    watch = Watch(store, 0, 1, timedelta(seconds=0.1))
    assert read_reports(store, [0, 1])[0].place == "before its first stage"
    with watch.doing("route(6)"):
        watch.begin_call("routing")
        time.sleep(0.1)
        report = read_reports(store, [0, 1])[0]
        assert report.place == "in route(6)" and dict(report.calls) == {"routing": 1} and report.number > 1
    time.sleep(0.1)
    assert read_reports(store, [0])[0].place == "after route(6)"
    watch.close()
    time.sleep(0.05)
    number = read_reports(store, [0])[0].number
    time.sleep(0.1)
    assert read_reports(store, [0])[0].number == number


def test_a_rank_that_is_busy_elsewhere_is_named_with_its_stage(store):
    """It goes on reporting, so it does not stand still; its collective has not begun."""
    here, there, waiting = watches(store, 3)
    waiting.begin_call("routing")
    here.begin_call("routing")
    with there.doing("evaluation(80)"), here.doing("route(6)"):
        error = here.explain("routing", 1, [0, 1, 2], 0.4, RuntimeError("Timed out"))
    assert str(error) == "rank 1 has not reached stage route(6) within 0.4 s: it is in evaluation(80)"


def test_a_rank_that_came_too_late_is_named(store, monkeypatch):
    here, there = watches(store, 2)
    here.begin_call("routing")
    read = here._read

    def reading(ranks):
        found = read(ranks)
        there.begin_call("routing")
        return found

    monkeypatch.setattr(here, "_read", reading)
    with there.doing("tracing"):
        there._report_now()
        error = here.explain("routing", 1, [0, 1], 0.4, RuntimeError("Timed out"))
    assert str(error).endswith("has not reached collective 1 of group routing within 0.4 s: it is in tracing")
    for watch in (here, there):
        watch.close()


def test_a_monitored_barrier_waits_beyond_the_timeout_for_a_rank_that_reports(store):
    import threading

    here, there = watches(store, 2, timeout=1.0)
    late = threading.Timer(1.6, there.monitored_barrier, ("checkpoint", [0, 1], timedelta(seconds=5)))
    late.start()
    began = time.monotonic()
    here.monitored_barrier("checkpoint", [0, 1], timedelta(seconds=5))
    assert time.monotonic() - began >= 1.5  # beyond the timeout
    late.join()


def test_a_slow_answer_of_the_store_is_no_silence_of_a_rank(store, monkeypatch):
    here = Watch(store, 0, 2, timedelta(seconds=0.4))
    reads = []

    def read(_ranks):
        reads.append(time.sleep(0 if reads else 0.5))  # the first answer takes longer than the timeout
        if len(reads) == 3:
            store.set("checkpoint 1 1", "here")
        return {1: Report(number=1, time=time.time())}

    monkeypatch.setattr(here, "_read", read)
    here.monitored_barrier("checkpoint", [0, 1], timedelta(seconds=5))
    assert len(reads) == 3


def test_a_monitored_barrier_ends_where_a_rank_stalls_fails_or_takes_too_long(store):
    here, there = watches(store, 2)
    with (
        here.doing("save(8)"),
        pytest.raises(RankDiedError, match=r"rank 1 has not reached stage save\(8\) "),
    ):
        here.monitored_barrier("a", [0, 1], timedelta(seconds=0.2))  # it reports, for longer than that
    there.close()
    with pytest.raises(
        RankDiedError,
        match=r"rank 1 has not reached collective 1 of group b within .*: it was last seen before",
    ):
        here.monitored_barrier("b", [0, 1], timedelta(seconds=60))
    assert here.still == (1,)
    there.still = (5,)  # what it has found itself
    there.fail(OSError("full"))
    with pytest.raises(RankDiedError, match="rank 1 has failed: OSError: full"):
        here.monitored_barrier("c", [0, 1], timedelta(seconds=60))
    assert here.still == (5,)
    here.lost = "rank 1 has ended"  # as a collective has named it
    with pytest.raises(RankDiedError, match=r"^rank 1 has ended$"):
        here.monitored_barrier("d", [0, 1], timedelta(seconds=60))


def test_failures_that_follow_from_another_come_after_it(store):
    first, second, third = watches(store, 3)
    second.fail(RankDiedError("rank 2 ended"))
    third.fail(ValueError("bad batch"))
    error = first.explain("routing", 1, [0, 1, 2], 0.1, RuntimeError("Connection closed"))
    assert str(error) == "rank 2 has failed: ValueError: bad batch"
    for watch in (first, second, third):
        watch.begin_task()
        watch.begin_call("routing")
        watch._report()
    error = first.explain("routing", 1, [0, 1, 2], 0.1, RuntimeError("Connection closed by peer"))
    assert "every rank still reports" in str(error)


def test_an_error_that_no_other_rank_caused_is_raised_as_it_is(store):
    (watch,) = watches(store, 1)

    def fails():
        raise RuntimeError("Split sizes doesn't match total dim 0 size")

    with pytest.raises(RuntimeError, match=r"^Split sizes") as caught:
        Communicator(None, "routing", watch, [0])._collective(fails)
    assert caught.type is RuntimeError
    watch.close()


class Control:
    """Rank 0 of two, the other one of which has this text."""

    rank, world_size = 0, 2

    def __init__(self, other):
        self.other, self.own = other, None

    def all_gather_texts(self, text):
        self.own = text
        return [text, self.other]


def test_ranks_are_watched_where_all_of_them_reach_the_store_of_torchrun(monkeypatch):
    server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    control, store, made = Control("0123"), dist.TCPStore, []
    monkeypatch.setattr(dist, "TCPStore", lambda *given, **rest: made.append(given) or store(*given, **rest))
    watch = _watch_from_environment(control, timedelta(seconds=1))
    assert watch is not None and len(control.own) == 16
    assert [is_server for _, _, _, is_server, _ in made] == [False]
    watch.store.set("place", "here")
    assert server.get(f"{control.own}/place") == b"here"
    watch.close()
    assert _watch_from_environment(Control(""), timedelta(seconds=1)) is None
    monkeypatch.delenv("MASTER_PORT")
    assert _watch_from_environment(control, timedelta(seconds=1)) is None and control.own == ""


def test_a_store_that_does_not_answer_names_rank_0(monkeypatch):
    from tritonrec.distributed import watch as module

    monkeypatch.setattr(module, "READ_TIMEOUT", 0.1)
    watch = Watch(dist.HashStore(), 1, 2, timedelta(seconds=0.4))
    watch.close()
    watch._last_of_rank_0 = {0: Report(3, time.time(), ("compute(5)",))}

    class Silent:
        def check(self, keys):
            time.sleep(60)

    watch.store = Silent()
    error = watch.explain("routing", 7, [0, 1], 0.4, RuntimeError("Timed out"))
    assert (
        "rank 0 has not reached collective 7 of group routing within 0.4 s: it was last seen in compute(5)"
        in str(error)
    )


def test_behind_a_stage_inside_another_the_outer_one_is_reported(store):
    watch = Watch(store, 0, 1, timedelta(seconds=9))
    with watch.doing("outer"):
        with watch.doing("inner"):
            pass
        watch._report_now()
        assert read_reports(store, [0])[0].place == "in outer"
    watch._report_now()
    assert read_reports(store, [0])[0].place == "after outer"
    watch.close()


def test_reports_end_with_the_store(store):
    watch = Watch(store, 0, 1, timedelta(seconds=9))
    with watch._close_if_store_is_gone():
        raise RuntimeError("the store has ended")
    assert watch._closed.is_set()


def test_a_call_that_was_given_up_ends_before_the_interpreter_does():
    ended = threading.Event()
    with pytest.raises(TimeoutError):
        limits.within(0.01, lambda: time.sleep(0.2) or ended.set())
    limits.join_left()
    assert ended.is_set() and limits.within(5, lambda: 3) == 3
