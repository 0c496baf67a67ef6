"""Promise: processes of an elastic pool end alone; the results are those of the ranks that are left."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tritonrec.distributed import RankDiedError, RankPool, Watch
from tritonrec.distributed.join import made_within
from tritonrec.distributed.limits import within
from tritonrec.distributed.stores import serve_store
from tritonrec.resilience import ElasticPool, elastic, elastic_pool
from tritonrec.resilience.elastic_pool import _goes_on

pytestmark = pytest.mark.multi_rank


def work(communicators, victims, calls):
    """Rank by rank what happens to it in the first call; the ranks that are left have its sum."""
    calls.append(communicators.world_size)
    ranks = torch.tensor([communicators.rank + 1])
    communicators.control.all_reduce(ranks.clone(), "begun")  # a victim dies once every rank is here
    how = victims.get(communicators.rank) if len(calls) == 1 else None
    if how == "raises":
        raise OSError("the disk of this rank is gone")
    if how is not None:
        os.kill(os.getpid(), how)
    for _ in range(20):  # collectives, in which the others wait for the victim
        total = communicators.control.all_reduce(ranks.clone(), "ranks")
    return int(total), calls


@pytest.mark.parametrize(
    ("world_size", "victims"),
    [(2, {}), (3, {0: signal.SIGKILL})],
    ids=["none", "rank 0 is killed"],
)
def test_the_ranks_that_are_left_have_results(world_size, victims):
    left = world_size - len(victims)
    with ElasticPool(world_size) as pool:
        results = pool.run(work, victims, [])
    sizes = [world_size, left] if victims else [world_size]
    assert results == [(left * (left + 1) // 2, sizes)] * left
    assert not any(process.is_alive() for process in pool.processes)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", signal.SIGSTOP])
def test_a_rank_that_fails_or_stands_still_is_left(how):
    with ElasticPool(3, timedelta(seconds=5)) as pool:
        results = pool.run(work, {1: how}, [])
    assert results == [(3, [3, 2])] * 2
    assert not any(process.is_alive() for process in pool.processes)


def failing(communicators):
    raise ValueError("choose another place")


def killed(communicators):
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_of_all_ranks_is_raised_once():
    with ElasticPool(2) as pool, pytest.raises(RankDiedError) as error:
        pool.run(failing)
    assert str(error.value) == "ranks 0, 1: ValueError: choose another place"
    assert "rank 1:\nTraceback" in error.value.details


def test_where_all_ranks_die_the_error_names_the_signal():
    with ElasticPool(2) as pool, pytest.raises(RankDiedError, match=r"died \(SIGKILL\)"):
        pool.run(killed)


def until_stopped(communicators, folder):
    (folder / str(communicators.rank)).touch()
    return communicators.stop.wait(60)


def test_all_ranks_are_asked_to_stop(tmp_path):
    with ElasticPool(2) as pool:

        def ask():
            while len(os.listdir(tmp_path)) < 2:
                time.sleep(0.01)
            pool.request_stop()

        threading.Thread(target=ask).start()
        assert pool.run(until_stopped, tmp_path) == [True, True]


@pytest.mark.parametrize(
    ("sizes", "waiting", "goes_on"),
    {
        "nobody has begun": ({}, [0, 1], True),
        "one is late": ({0: 2}, [1], True),
        "at work": ({0: 2, 1: 2}, [1], True),
        "one was left": ({0: 1, 1: 2}, [1], False),
        "two of three go on": ({0: 2, 1: 3, 2: 2}, [1, 2], True),
        "one of two has not begun again": ({0: 2, 1: 3, 2: 3}, [1, 2], True),
    }.values(),
)
def test_the_newest_groups_are_waited_for(sizes, waiting, goes_on):
    assert _goes_on(sizes, waiting) is goes_on


def test_ranks_that_replicas_do_not_divide_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(elastic, "join_environment", lambda timeout: pytest.fail("joined"))
    with pytest.raises(ValueError, match="2 replicas do not divide 3 ranks"):
        elastic._Ranks(timedelta(seconds=5), 2, 1)


def meeting(numbers, min_ranks=1):
    """Ranks 0 and 1, of which those of `numbers` have joined."""
    ranks = object.__new__(elastic._Ranks)
    ranks.still = set()
    ranks.members, ranks.min_ranks = [SimpleNamespace(number=number) for number in (0, 1)], min_ranks
    ranks._agree = lambda: (3, numbers)
    return ranks


def test_where_all_ranks_are_alive_the_error_is_raised():
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        meeting([0, 1]).meet(error)
    assert caught.value is error


def test_fewer_ranks_than_are_needed_do_not_go_on():
    with pytest.raises(RankDiedError, match="rank 1 cannot go on, since 2 are needed: lost rank 0"):
        meeting([1], min_ranks=2).meet(KeyError("mine"))


def test_a_rank_that_has_said_nothing_did_not_join():
    here, _there = multiprocessing.Pipe()
    silent = SimpleNamespace(poll=here.poll, recv=lambda: pytest.fail("waited"))
    assert ElasticPool(2)._receive(silent, 0) == ("error", ("did not join the others", ""))


def test_connections_to_ranks_that_are_given_up_are_closed(monkeypatch):
    monkeypatch.setattr(elastic_pool, "_goes_on", lambda sizes, ranks: False)
    here, there = multiprocessing.Pipe()
    with pytest.raises(RankDiedError):
        ElasticPool.__new__(ElasticPool)._collect({here: 0})
    assert here.closed
    there.close()


def test_a_member_that_listens_is_not_gone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        member = elastic.Member(0, *server.getsockname())
        assert not member.is_gone()
    assert member.is_gone()


def test_the_own_address_is_that_of_the_network_of_the_peer():
    assert elastic._own_address("127.0.0.1", 9) == "127.0.0.1"


def test_one_rank_goes_on_unless_more_are_needed(monkeypatch):
    class Asked(Exception):
        pass

    def ranks(timeout, replicas, min_ranks):
        raise Asked(replicas, min_ranks)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(elastic, "_Ranks", ranks)
    with pytest.raises(Asked) as asked:
        elastic.run_elastic(lambda communicators: None)
    pool = ElasticPool(2)
    assert asked.value.args == (pool.replicas, pool.min_ranks) == (1, 1)


class Stalling:
    """A store whose process has been stopped before the `last` of its calls; a join is its second one."""

    def __init__(self, last):
        self.left = last

    def check(self, keys):
        self.left -= 1
        return self.left >= 0 or threading.Event().wait()

    def set(self, key, value):
        self.check([key])


@pytest.mark.parametrize("last", [0, 1])
def test_a_rank_that_is_stopped_while_it_is_joined_does_not_decide(monkeypatch, last):
    monkeypatch.setattr(elastic.Member, "is_gone", lambda member: False)
    monkeypatch.setattr(elastic, "READ_TIMEOUT", 0.05)
    ranks = elastic._Ranks.__new__(elastic._Ranks)
    ranks.members, ranks.patience = [elastic.Member(number, "here", 1) for number in range(2)], 60.0
    ranks.own, ranks.timeout, ranks.generation = ranks.members[1], timedelta(seconds=0.1), 3
    monkeypatch.setattr(ranks, "_answers", lambda member: True)
    ranks.still = {0}  # but now it answers
    stores = []
    monkeypatch.setattr(elastic.Member, "connect", lambda member: stores.append(Stalling(last)) or stores[-1])
    ranks._decide = lambda still: (4, [1])
    assert ranks._agree() == (4, [1]) and len(stores) == 1


def test_ranks_that_were_waited_for_are_not_waited_for_again(monkeypatch):
    monkeypatch.setattr(elastic.Member, "is_gone", lambda member: False)
    monkeypatch.setattr(elastic.Member, "connect", lambda member: Stalling(0))
    monkeypatch.setattr(elastic, "READ_TIMEOUT", 1.0)
    ranks = elastic._Ranks.__new__(elastic._Ranks)
    ranks.members = [elastic.Member(number, "here", 1) for number in range(9)]
    ranks.own, ranks.still, ranks.generation = ranks.members[8], set(range(8)), 3
    ranks.store, ranks.patience, ranks.timeout = dist.HashStore(), 3600.0, timedelta(hours=1)
    began = time.monotonic()
    assert within(60, ranks._agree) == (4, [8])
    assert time.monotonic() - began < 5  # all at once


def test_ranks_that_have_ended_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(elastic.Member, "is_gone", lambda member: member.number == 2)
    ranks = elastic._Ranks.__new__(elastic._Ranks)
    ranks.store, ranks.members = dist.HashStore(), [elastic.Member(each, "here", 1) for each in (0, 2)]
    ranks.own, ranks.generation, ranks.patience = ranks.members[0], 4, 3600.0
    assert within(60, lambda: ranks._decide([])) == (5, [0])


def test_a_stranger_at_a_rank_s_store_leaves_nobody_behind():
    served = serve_store("127.0.0.1")
    member = elastic.Member(1, "127.0.0.1", served.port, "secret")
    own = dist.PrefixStore("secret", served)
    ranks = elastic._Ranks.__new__(elastic._Ranks)
    ranks.own, ranks.patience = elastic.Member(3, "127.0.0.1", 1), 5.0
    stranger = dist.TCPStore("127.0.0.1", served.port, None, False, wait_for_workers=False)
    stranger.set("left 3", "")
    assert ranks._answers(member)
    own.set("left 3", "")
    with pytest.raises(elastic.LeftBehindError):
        ranks._answers(member)


def served_to_ranks(communicators):
    """Of this rank: the token of the launcher's store, as far as the names of its keys show it."""
    return type(communicators.watch.store).__name__, communicators.watch.store.check(["report of rank 0"])


def test_reports_of_a_pool_have_names_that_strangers_do_not_know():
    with RankPool((2,)) as pool:
        assert pool.run(served_to_ranks, 2) == [("PrefixStore", True)] * 2
        port = pool._store.underlying_store.port
        stranger = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        assert not stranger.check(["report of rank 0"])


def test_a_rank_that_is_stopped_before_it_reads_the_decision_is_waited_for_a_while(monkeypatch):
    monkeypatch.setattr(elastic.Member, "is_gone", lambda member: False)
    ranks = elastic._Ranks.__new__(elastic._Ranks)
    ranks.store, ranks.members = dist.HashStore(), [elastic.Member(number, "here", 1) for number in range(2)]
    ranks.own, ranks.generation, ranks.patience = ranks.members[0], 4, 0.3
    ranks.store.set("joined 1", "7")
    # above the numbers of all that join: another part of the ranks may have met more often
    assert ranks._decide([]) == (8, [0, 1])
    assert not ranks.store.check(["joined 1"])  # a later meeting would take it for alive


@pytest.mark.parametrize(
    "kind", [TimeoutError("no answer"), RuntimeError("[gloo] Timed out waiting"), dist.DistError("x")]
)
def test_groups_that_are_not_made_in_time_are_the_loss_of_a_rank(kind):
    def fails():
        raise kind

    store, limit = dist.HashStore(), timedelta(seconds=0.4)
    watch, stopped = Watch(store, 0, 2, limit), Watch(store, 1, 2, limit)
    stopped.begin_call("rendezvous")
    with stopped.doing("making of groups"):
        stopped._report()
    stopped.close()
    match = "^rank 1 ended before stage making of groups was done: it was last seen in making of groups, "
    with pytest.raises(RankDiedError, match=match):
        made_within(limit, fails, watch)
    with pytest.raises(RuntimeError, match=r"^out of memory$") as caught:
        made_within(limit, lambda: _raise(RuntimeError("out of memory")), watch)
    watch.close()
    assert type(caught.value) is RuntimeError


def _raise(error):
    raise error


@pytest.mark.parametrize(("left", "replicas"), [(4, 2), (3, 3), (5, 1)])
def test_replicas_are_the_most_that_divide_the_ranks_that_are_left(monkeypatch, left, replicas):
    watch = SimpleNamespace(fail=lambda error: None, close=lambda: None, still=())
    monkeypatch.setattr(elastic.dist, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(elastic.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(elastic, "Watch", lambda *given: watch)
    monkeypatch.setattr(elastic, "made_within", lambda timeout, make, watch: make())
    monkeypatch.setattr(elastic.Communicators, "over", lambda *given: given)
    ranks = elastic._Ranks.__new__(elastic._Ranks)
    ranks.members = [elastic.Member(number, "here", 1) for number in range(left)]
    ranks.own, ranks.generation, ranks.replicas, ranks.timeout = ranks.members[1], 0, 3, None
    ranks._connect_to_first = lambda: "store"
    with ranks.groups() as (numbers, _, found, *_):
        assert (list(numbers), found) == (list(range(left)), replicas)
