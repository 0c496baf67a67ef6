"""Promise: the trained bits depend neither on mode, nor on world size, nor on a restart in between."""

import time
from dataclasses import replace

import pytest

from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness import train as train_module
from tritonrec.harness.train import Run, train
from tritonrec.pipeline import WindowConfig

pytestmark = pytest.mark.multi_rank


@pytest.fixture(scope="module")
def pool():
    with RankPool((2, 3)) as pool:
        yield pool


@pytest.fixture(scope="module")
def reference(job):
    return train(Communicators.local(), Run(job, "sync", WindowConfig(1), steps=7), quiet=True)


def same(a, b):
    return all(a[name] == b[name] for name in ("step", "loss", "metrics", "popularity", "digest"))


def test_nestpipe_at_two_ranks_gives_the_digits_of_sync(pool, job, reference):
    summaries = pool.run(train, 2, Run(job, "nestpipe", WindowConfig(3, clustering=True), steps=7), True)
    for summary in summaries:
        assert same(summary, reference)


def test_the_window_level_differs_from_sync_by_rounding_only(pool, job):
    # Its own reference shares its stages: a sum that both forget would show nowhere else.
    job = replace(job, lr=0.05)
    sync = train(Communicators.local(), Run(job, "sync", WindowConfig(1), "sgd", steps=7), quiet=True)
    window = Run(job, "nestpipe", WindowConfig(3, "window"), "sgd", steps=7)
    for summary in pool.run(train, 2, window, True):
        assert summary["loss"] == pytest.approx(sync["loss"], rel=1e-6)


def train_with_a_slow_caller(communicators, run):
    """`train`, but rank 1's own thread is late with every loss, while its lanes go on with later batches."""
    mean_loss = train_module._mean_loss

    def late(communicators, *args):
        if communicators.rank == 1:
            time.sleep(0.1)
        return mean_loss(communicators, *args)

    train_module._mean_loss = late
    try:
        return train(communicators, run, quiet=True)
    finally:
        train_module._mean_loss = mean_loss


def test_the_callers_collectives_do_not_meet_those_of_the_lanes(pool, job, reference):
    run = Run(job, "nestpipe", WindowConfig(2), steps=7)
    assert same(pool.run(train_with_a_slow_caller, 2, run)[0], reference)


def test_evaluating_in_between_changes_nothing(job, reference):
    run = Run(job, "nestpipe", WindowConfig(2), steps=7, evaluate_every=3)
    assert same(train(Communicators.local(), run, quiet=True), reference)


def test_resuming_at_another_world_size_changes_nothing(pool, job, reference, tmp_path):
    run = Run(job, "nestpipe", WindowConfig(2), steps=4, checkpoint=str(tmp_path))
    pool.run(train, 3, run, True)
    resumed = pool.run(train, 2, replace(run, mode="dbp", steps=7, resume=True), True)
    assert same(resumed[0], reference)


def test_another_job_cannot_resume(job, tmp_path):
    run = Run(job, "nestpipe", WindowConfig(2), steps=2, checkpoint=str(tmp_path))
    train(Communicators.local(), run, quiet=True)
    with pytest.raises(ValueError, match="made with another lr"):
        train(Communicators.local(), replace(run, job=replace(job, lr=0.5), steps=3, resume=True), True)
    with pytest.raises(ValueError, match="made with another optimizer"):
        train(Communicators.local(), replace(run, optimizer="sgd", steps=3, resume=True), True)
    with pytest.raises(ValueError, match="holds checkpoints of another run"):
        train(Communicators.local(), run, True)
    with pytest.raises(ValueError, match="ask for more steps"):
        train(Communicators.local(), replace(run, resume=True), True)


def test_a_trace_of_all_ranks_is_written(pool, job, tmp_path):
    from tritonrec.trace import read

    file = tmp_path / "run.pftrace"
    pool.run(train, 2, Run(job, "nestpipe", WindowConfig(2), steps=3, trace=str(file)), True)
    trace = read(file)
    assert {span.rank for span in trace.spans} == {0, 1}
    assert trace.metadata["mode"] == "nestpipe"
    assert [path.name for path in tmp_path.iterdir()] == ["run.pftrace"]
