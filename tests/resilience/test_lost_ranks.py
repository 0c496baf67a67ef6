"""Promise: where ranks are lost, the others go on, and the bits are those of a run without a loss."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from datetime import timedelta
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from losing import STEPS, Case, Outcome, Ranks, undisturbed
from speeds import slow_except
from trainer_parts import JOB, ONE_DRAWS

from tritonrec.checkpoint import steps
from tritonrec.distributed import RankDiedError
from tritonrec.distributed.limits import within
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.resilience import PeerCopies, elastic, run_elastic
from tritonrec.resilience.peer_copies import _newest_whole, _packed, _unpacked

pytestmark = pytest.mark.multi_rank

QUICK = Case(2, {1: "compute 5"}, copy_every=2, timeout=6)
"""A rank dies in a step, and its rows come from the other one's memory."""


@cache
def expected(job) -> Outcome:
    return undisturbed(job)


def check(case: Case, calls: list[tuple[int, int]], victims: tuple[int, ...] = ()) -> None:
    """Every rank but the `victims` ends, after these calls (ranks, first step), with the expected bits."""
    shared = set(os.listdir("/dev/shm"))
    with Ranks(case) as ranks:
        outcomes = ranks.outcomes()
        for rank, process in enumerate(ranks.processes):
            if rank not in (victims or case.victims):
                process.join(20)
                assert process.exitcode == 0
    assert set(os.listdir("/dev/shm")) <= shared
    want = expected(case.job)
    for rank, found in enumerate(outcomes):
        if rank in (victims or case.victims):
            continue
        assert isinstance(found, Outcome), found
        assert found.calls == calls
        assert found.losses == want.losses and len(found.losses) == STEPS
        assert found.digest == want.digest


SECOND = Case(4, {1: "compute 3", 3: "restore"}, copy_every=2)
"""The second rank dies while it sends its rows to those that go on from its memory."""


def case_name(value: object) -> str:
    if not isinstance(value, Case):
        return ""
    kind = "saved" if value.save_every else "copies"
    return f"{kind}, {value.world_size} ranks, " + ", ".join(map(" ".join, _words(value.victims)))


def _words(victims: dict[int, str]) -> list[tuple[str, str]]:
    return [(str(rank), place) for rank, place in victims.items()]


@pytest.mark.if_changed
@pytest.mark.parametrize(
    "case, calls",
    slow_except(
        [(QUICK, [(2, 0), (1, 4)])],
        [
            (QUICK, [(2, 0), (1, 4)]),
            (Case(2, {0: "route 5"}, copy_every=2), [(2, 0), (1, 4)]),
            (Case(3, {0: "exchange 5"}, copy_every=2), [(3, 0), (2, 4)]),
            (Case(3, {1: "write_back 5"}, copy_every=3), [(3, 0), (2, 3)]),
            (Case(3, {1: "dense_update 1"}, copy_every=3), [(3, 0), (2, 0)]),
            (Case(3, {2: "keep 4"}, copy_every=2), [(3, 0), (2, 2)]),
            (Case(3, {2: "raises retrieve 5"}, copy_every=2), [(3, 0), (2, 4)]),
            (Case(3, {1: "compute 5"}, copy_every=2, mode="sequential"), [(3, 0), (2, 4)]),
            (Case(4, {1: "gradient_exchange 5"}, copy_every=2, replicas=2), [(4, 0), (3, 4)]),
            (Case(4, {0: "compute 5", 2: "compute 5"}, copy_every=2), [(4, 0), (2, 4)]),
            (SECOND, [(4, 0), (2, 2)]),
        ],
    ),
    ids=case_name,
)  # fmt: skip
def test_the_others_go_on_from_a_peers_copy(case, calls):
    check(case, calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, calls",
    [
        (Case(2, {1: "compute 5"}, save_every=2), [(2, 0), (1, 4)]),
        (Case(2, {0: "dense_reduce 5"}, save_every=4), [(2, 0), (1, 4)]),
        (Case(3, {0: "copy_kept_rows 5"}, save_every=2), [(3, 0), (2, 4)]),
        (Case(3, {1: "sparse_update 3"}, save_every=4), [(3, 0), (2, 0)]),
        (Case(3, {1: "save 4"}, save_every=2), [(3, 0), (2, 2)]),
        (Case(3, {0: "save 4"}, save_every=2), [(3, 0), (2, 2)]),
        (Case(3, {2: "exchange 5"}, save_every=2, copy_every=3), [(3, 0), (2, 4)]),
    ],
    ids=case_name,
)
def test_the_others_go_on_from_the_last_checkpoint(tmp_path, case, calls):
    check(replace(case, directory=str(tmp_path)), calls)
    assert steps(tmp_path)[-1] == STEPS


@pytest.mark.slow
def test_with_two_neighbours_lost_there_is_no_copy_of_a_shard_and_the_checkpoint_is_used(tmp_path):
    lost = {1: "compute 5", 2: "compute 5"}
    check(Case(4, lost, copy_every=2, save_every=3, directory=str(tmp_path)), [(4, 0), (2, 3)])


STOPPED = {
    "in a step": Case(3, {1: "stops compute 5"}, copy_every=2, timeout=5),
    "the one whose store the others use": Case(3, {0: "stops compute 5"}, copy_every=2, timeout=5),
    "in a save": Case(3, {1: "stops save 4"}, save_every=4, copy_every=2, timeout=5),
    "in a copy": Case(3, {0: "stops keep 6"}, copy_every=2, timeout=5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPPED)
def test_a_rank_that_stands_still_is_left_behind(name, tmp_path):
    case = replace(STOPPED[name], directory=str(tmp_path))
    (victim,) = case.victims
    with Ranks(case) as ranks:
        left = [each for rank, each in enumerate(ranks.connections) if rank != victim]
        assert all(each.poll(90) for each in left)
        first, last = (each.recv() for each in left)
        assert isinstance(first, Outcome), first
        assert first.calls == last.calls == [(3, 0), (2, 4)]
        assert first.digest == last.digest == expected(case.job).digest


@pytest.mark.slow
def test_rank_0_that_stands_still_in_a_save_is_named_and_keeps_its_folder(tmp_path):
    """It may go on and write, so the others cannot save there before it ends."""
    case = Case(3, {0: "stops save 4"}, save_every=4, copy_every=2, timeout=5, directory=str(tmp_path))
    with Ranks(case) as ranks:
        left = ranks.connections[1:]
        assert all(each.poll(90) for each in left)
        for each in left:
            assert f"is in use: process {ranks.processes[0].pid} on " in each.recv()


@pytest.mark.slow
def test_too_few_ranks_do_not_go_on():
    with Ranks(Case(3, {1: "compute 5"}, copy_every=2, min_ranks=3)) as ranks:
        outcomes = ranks.outcomes()
    for rank in (0, 2):
        assert outcomes[rank].startswith(
            "RankDiedError: ranks 0, 2 cannot go on, since 3 are needed: lost rank 1"
        )


def test_a_run_of_one_rank_is_plain(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert run_elastic(lambda communicators: communicators.world_size) == 1
    with pytest.raises(ValueError, match="min_ranks must be at least 1, got 0"):
        run_elastic(lambda communicators: None, min_ranks=0)


@pytest.mark.parametrize(
    "ranks, step, holders",
    {
        "whole": ([[(4, 2, [0, 1])], [(4, 2, [1, 0])]], 4, {0: 0, 1: 0}),
        "a rank lacks the newest": ([[(2, 2, [0]), (4, 2, [0])], [(2, 2, [1])]], 2, {0: 0, 1: 1}),
        "a shard is lost": ([[(4, 3, [0, 2])], [(4, 3, [2])]], -1, {}),
        "an older one is whole": ([[(2, 1, [0]), (4, 2, [0])], [(2, 1, [0]), (4, 2, [0])]], 2, {0: 0}),
        "two layouts of a step": ([[(4, 3, [0]), (4, 2, [0])], [(4, 3, [1]), (4, 2, [1])]], 4, {0: 0, 1: 1}),
        "none": ([[], [(4, 2, [0, 1])]], -1, {}),
    }.values(),
)
def test_the_newest_copy_that_all_ranks_have_and_no_shard_of_which_is_lost(ranks, step, holders):
    found, shards, by_shard = _newest_whole(ranks)
    assert (found, by_shard) == (step, holders) and shards == len(holders)


def test_a_copy_that_some_ranks_lack_is_gone_after_the_return_to_one_that_all_have():
    def step_of_each_copy(communicators):
        copies, loader = PeerCopies(), JOB.loader(communicators.rank, communicators.world_size)
        for run in "before", "after":
            with ONE_DRAWS:
                parts = JOB.build("adam")
            with Trainer(*parts, communicators, "nestpipe", WindowConfig(2)) as training:
                if run == "after":
                    assert copies.restore(training) == training.next_step == 2
                    return [each.step for each in copies._copies]
                for step in range(4):
                    training.step(loader.batch(step))
                    if step % 2:
                        copies.keep(training)
            if communicators.rank:
                copies._copies.pop()  # this one was being made when a third rank was lost

    assert run_ranks(2, step_of_each_copy) == [[2, 2]] * 2


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_columns_of_any_dtype_and_stride_are_packed_and_unpacked(rows):
    columns = {
        "scores": torch.randint(0, 9, (rows, 3), dtype=torch.int64)[:, 1],
        "keys": torch.randint(-(2**63), 2**63 - 1, (rows,), dtype=torch.int64),
        "recent": torch.rand(rows) < 0.5,
        "rows": torch.randn(rows, 7),
        "heat": torch.randint(0, 255, (rows,), dtype=torch.uint8),
    }
    packed = _packed(columns)
    assert packed.shape == (rows, 8 + 8 + 1 + 28 + 1)
    for name, values in _unpacked(packed, columns).items():
        assert torch.equal(values, columns[name]) and values.dtype == columns[name].dtype


@pytest.mark.parametrize(("error", "gone"), [(ConnectionRefusedError, True), (TimeoutError, False)])
def test_a_machine_that_does_not_answer_is_not_a_process_that_has_ended(monkeypatch, error, gone):
    def connect(address, timeout):
        raise error

    monkeypatch.setattr(elastic.socket, "create_connection", connect)
    assert elastic.Member(0, "localhost", 1).is_gone() is gone


def test_the_rank_that_decides_stays_until_the_others_have_read(monkeypatch):
    monkeypatch.setattr(elastic.Member, "is_gone", lambda self: False)
    members = [elastic.Member(number, "localhost", 1) for number in range(2)]
    ranks = elastic._Ranks.__new__(elastic._Ranks)
    ranks.store, ranks.members, ranks.own = dist.HashStore(), members, members[0]
    ranks.generation, ranks.patience = 4, 5.0
    ranks.store.set("joined 1", "3")
    decided = []
    thread = threading.Thread(target=lambda: decided.append(ranks._decide([])))
    thread.start()
    assert json.loads(ranks.store.get("decision for 1")) == [5, [0, 1]]
    thread.join(0.2)
    assert thread.is_alive()  # the store is this process
    ranks.store.delete_key("decision for 1")
    thread.join(5)
    assert decided == [(5, [0, 1])]


def test_a_call_with_a_limit_returns_raises_or_is_given_up():
    with pytest.raises(KeyError, match="7"):
        within(30.0, lambda: {}[7])
    assert within(30.0, lambda: 8) == 8
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(timedelta(seconds=0.05), threading.Event().wait)
    assert all(each.daemon for each in threading.enumerate() if each.name == "limited call")


def test_a_rank_that_is_alone_asks_nobody():
    me = SimpleNamespace(number=3)
    ranks = SimpleNamespace(members=[me], own=me, still=set(), _answers=None, _decide=lambda still: (4, [3]))
    assert elastic._Ranks._agree(ranks) == (4, [3])


@pytest.mark.parametrize("still", [set(), {0}])
def test_the_first_rank_that_is_left_says_who_goes_on(still):
    members = [SimpleNamespace(number=number) for number in (0, 2, 5)]
    ranks = SimpleNamespace(
        members=members, own=members[1], min_ranks=1, _agree=lambda: (4, [2, 5]), still=still
    )
    with pytest.warns(RuntimeWarning) as said:
        elastic._Ranks.meet(ranks, RankDiedError("rank 0 has ended"))
    words = ["rank 0 has ended\nthe other ranks meet"] * len(still)  # before they wait for each other
    assert [str(each.message) for each in said] == [*words, "lost rank 0: rank 0 has ended\nranks 2, 5 go on"]
    assert (ranks.generation, ranks.members) == (4, members[1:])
