"""Promise: in a pause of a run nothing is in flight and no later batch was read, so it saves, evaluates and
changes rates as between two runs, in their bits; between pauses the pipeline is filled."""

import pytest
from trainer_parts import EVERY_MODE, JOB, READS_AHEAD, batches, parts, same, state, trainer

from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import StageFailedError, Trainer, WindowConfig

EVERY, STEPS = 3, 8


def act(trained, loader, directory):
    """What is done at a pause: the evaluation. A checkpoint, and another rate, are left behind."""
    found = trained.evaluate(loader)
    trained.save(directory)
    for group in trained.dense.optimizers[0].param_groups:
        group["lr"] *= 0.5
    return found


def train(communicators, mode, directory, paused):
    """Evaluations, the last state, and by step how many batches were read and are in flight."""
    model, tables, optimizer = JOB.build("adam")
    loader = JOB.loader(communicators.rank, communicators.world_size)
    window, read, evaluations, seen = WindowConfig(1 if mode == "reference" else 2), [], [], {}

    def batch(step):
        read.append(step)
        return loader.batch(step)

    with Trainer(model, tables, optimizer, communicators, mode, window) as trained:
        for first in [0] if paused else range(0, STEPS, EVERY):
            last = STEPS if paused else min(first + EVERY, STEPS)
            for result in trained.run(map(batch, range(first, last)), pause_every=EVERY if paused else 0):
                seen[result.step] = len(read) - result.step - 1, len(trained.in_flight())
                if paused and trained.next_step % EVERY == 0:
                    evaluations.append(act(trained, loader, directory))
            if not paused and last % EVERY == 0:
                evaluations.append(act(trained, loader, directory))
    return evaluations, state((model, tables, optimizer)), seen


@pytest.mark.multi_rank
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", EVERY_MODE)
def test_a_pause_is_the_end_of_a_run(tmp_path, mode, world):
    if mode == "reference" and world > 1:
        world = 1
    found = [
        run_ranks(world, lambda ranks, paused=paused: train(ranks, mode, tmp_path / str(paused), paused))
        for paused in (False, True)
    ]
    for (evaluations, ended, _), (in_pauses, went_on, seen) in zip(*found, strict=True):
        assert len(in_pauses) == 2 and in_pauses == evaluations and same(ended, went_on)
        assert seen[2] == seen[5] == (0, 0)
        ahead = mode in ("dbp", "nestpipe")
        assert all(seen[step][1] > 0 for step in (0, 1, 3, 4, 6)) == ahead  # the pipeline is filled
    ended, paused = (
        [path.read_bytes() for path in sorted((tmp_path / kind).rglob("*.safetensors"))]
        for kind in ("False", "True")
    )
    assert len(ended) >= 2 and ended == paused


@pytest.mark.parametrize(("mode", "consistency"), READS_AHEAD)
def test_what_is_done_between_pauses_is_refused(tmp_path, mode, consistency):
    with trainer(parts(), mode, consistency) as trained:
        for result in trained.run(iter(batches(5)), pause_every=2):
            if result.step == 0:
                with pytest.raises(RuntimeError, match="in flight"):
                    trained.save(tmp_path)
                break
        assert [result.step for result in trained.run([])] == [1]  # none was read beyond the pause


def test_updates_of_several_batches_pause_after_the_last_one():
    with trainer(parts(), accumulate=2) as trained:
        for every in ("4", 4.0, True):
            with pytest.raises(TypeError, match="pause_every must be of type int"):
                next(trained.run(iter(batches(4)), pause_every=every))
        for every in (-2, 1, 3):
            with pytest.raises(ValueError, match=f"multiple of accumulate=2, got {every}"):
                next(trained.run(iter(batches(4)), pause_every=every))
        flights = [len(trained.in_flight()) for _ in trained.run(iter(batches(8)), pause_every=4)]
        assert flights == [2, 2, 0, 0, 2, 2, 0, 0]


def test_ranks_that_pause_elsewhere_are_told():
    def work(communicators):
        with trainer(parts(), communicators=communicators) as trained:
            own = batches(6, rank=communicators.rank, world_size=communicators.world_size)
            list(trained.run(iter(own), pause_every=2 + communicators.rank))

    with pytest.raises(StageFailedError, match="rank 1 has pause_every=3 and rank 0 has pause_every=2"):
        run_ranks(2, work)
