"""Promise: processes of an elastic pool end alone; the results are those of the ranks that are left."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch

from tritonrec.distributed import ElasticPool, RankDiedError
from tritonrec.distributed.elastic_pool import _goes_on

pytestmark = pytest.mark.multi_rank


def work(communicators, victims, calls):
    """Rank by rank what happens to it in the first call; the ranks that are left have its sum."""
    calls.append(communicators.world_size)
    how = victims.get(communicators.rank) if len(calls) == 1 else None
    if how == "raises":
        raise OSError("the disk of this rank is gone")
    if how is not None:
        os.kill(os.getpid(), how)
    ranks = torch.tensor([communicators.rank + 1])
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
