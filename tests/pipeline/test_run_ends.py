"""Promise: ranks end a run after the same step, or all say which rank ended or is elsewhere."""

from itertools import takewhile

import pytest
from test_agreement import JOB

from tritonrec.distributed import Communicators, RanksDisagreeError
from tritonrec.pipeline import PIPELINED, StageFailedError, Trainer, WindowConfig

pytestmark = pytest.mark.multi_rank


def train(communicators, counts, mode="nestpipe", first=0, accumulate=1, late=None):
    """Train ``counts[rank]`` batches; results there were, and the error."""
    model, tables, optimizer = JOB.build("adam")
    rank = communicators.rank
    loader = JOB.loader(rank, communicators.world_size)
    window, done = WindowConfig(2, accumulate=accumulate), []
    start = first if late == rank else 0
    try:
        with Trainer(model, tables, optimizer, communicators, mode, window) as trainer:
            for result in trainer.run(loader.batch(start + step) for step in range(counts[rank])):
                done.append(result.step)
    except (RanksDisagreeError, StageFailedError) as error:
        return done, str(error)
    return done, ""


@pytest.mark.parametrize("mode", ["sequential", *PIPELINED])
def test_ranks_with_6_and_8_batches(pool, mode):
    (short, its), (_, others) = pool.run(train, 2, [6, 8], mode)[:2]
    assert short == [*range(6)]
    expected = (
        "rank 0 ended after 6 batches and rank 1 goes on with step 6: give every rank the same number "
        "(drop_last=True, or pad with empty batches)"
    )
    assert its == expected and expected in others


def test_replicas_see_the_end_of_a_rank_of_another_group(pool):
    messages = [error for _, error in pool.run(train, 4, [3, 3, 3, 2], replicas=2)]
    assert all("rank 3 ended after 2 batches and rank 0 goes on with step 2" in each for each in messages)


def test_the_last_update_of_accumulated_batches_is_compared_too(pool):
    errors = [error for _, error in pool.run(train, 2, [4, 3], "sequential", 0, 2)]
    assert all("rank 1 is at step 2 and rank 0 at step 3" in each for each in errors)


@pytest.mark.parametrize("world, replicas", [(2, 1), (4, 2)])
def test_ranks_at_different_steps(pool, world, replicas):
    results = pool.run(train, world, [3] * world, "nestpipe", 2, 1, world - 1, replicas=replicas)
    for done, error in results:
        assert done == []
        assert f"rank {world - 1} is at step 2 and rank 0 at step 0: give every rank its part" in error


def train_until_stopped(communicators, mode, when, window):
    """One rank is asked to stop while the batch of step `when` is read; the steps of every result."""
    model, tables, optimizer = JOB.build("adam")
    loader = JOB.loader(communicators.rank, communicators.world_size)
    communicators.stop.clear()

    def batch(step):
        if step == when and communicators.rank == communicators.world_size - 1:
            communicators.stop.set()
        return loader.batch(step)

    with Trainer(model, tables, optimizer, communicators, mode, window) as trainer:
        until = takewhile(lambda step: not trainer.stopping, range(100))
        steps = [result.step for result in trainer.run(batch(step) for step in until)]
        assert trainer.stopping
    communicators.stop.clear()
    return steps


@pytest.mark.parametrize("mode", ["sequential", *PIPELINED])
def test_ranks_that_are_asked_to_stop_do_so_after_the_same_step(pool, mode):
    for world_size, replicas in ((2, 1), (4, 2)):
        first, *others = pool.run(
            train_until_stopped, world_size, mode, 5, WindowConfig(2), replicas=replicas
        )
        assert others == [first] * (world_size - 1)
        # Which step it is may depend on how far the batches are read ahead.
        assert first == [*range(len(first))] and 5 < len(first) < 20


def test_the_reference_stops_too():
    assert train_until_stopped(Communicators.local(), "reference", 3, WindowConfig()) == [0, 1, 2, 3]


def single_steps(communicators):
    """As many steps as each likes to drain in between; the ranks need no agreement about the end."""
    model, tables, optimizer = JOB.build("adam")
    loader = JOB.loader(communicators.rank, communicators.world_size)
    with Trainer(model, tables, optimizer, communicators, "nestpipe", WindowConfig(2)) as trainer:
        for step in range(3):
            trainer.step(loader.batch(step))
            if communicators.rank == 0:
                assert list(trainer.run([])) == []
    return True


def test_a_single_step_is_no_run_that_ends(pool):
    assert pool.run(single_steps, 2) == [True, True]
