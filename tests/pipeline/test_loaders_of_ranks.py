"""Promise: ranks whose loaders differ are named with the setting, and train on no parts of two batches."""

from dataclasses import replace

import pytest
import torch
from trainer_parts import JOB

from tritonrec.data import JaggedBatch
from tritonrec.distributed import RanksDisagreeError
from tritonrec.harness.streams import SHARDS
from tritonrec.pipeline import StageFailedError, Trainer, WindowConfig
from tritonrec.pipeline.model_call import CallerSettings
from tritonrec.pipeline.words import may_differ, words_of

STREAMED = replace(JOB, data=SHARDS + JOB.data)
CLICKS = replace(JOB, model="dlrm", data="criteo:samples=400,seed=3")


def differs(*batches):
    rows = [words_of(CallerSettings(), 0, [each], {}).row for each in batches]
    return may_differ(rows)


def settings_that_differ(one, other):
    ours, theirs = one.shard.settings, other.shard.settings
    return {name for name in ours if ours[name] != theirs.get(name)}


@pytest.mark.parametrize(
    "job, change, named",
    [
        (JOB, dict(batch_size=9), {"batch_size"}),
        (JOB, dict(seed=7), {"seed"}),
        (JOB, dict(max_seq_len=8), {"max_seq_len", "samples (number, sum of ids, tokens)"}),
        (JOB, dict(num_negatives=2), {"num_negatives"}),
        (JOB, dict(balance=True), {"balance"}),
        (JOB, dict(data="zipf:users=60,items=200,seed=2"), {"samples (number, sum of ids, tokens)"}),
        (JOB, dict(split="ratio:0.8,0.1,0.1"), {"split", "samples (number, sum of ids, tokens)"}),
        (replace(JOB, dynamic=True), dict(batch_size=12), {"batch_size", "target_tokens"}),
        (STREAMED, dict(batch_size=9), {"batch_size"}),
        (STREAMED, dict(seed=7), {"seed"}),
        (STREAMED, dict(data=f"{SHARDS}zipf:users=60,items=200,seed=2"), {"values", "catalogue"}),
        (replace(STREAMED, dynamic=True), dict(batch_size=12), {"batch_size", "target_tokens"}),
        (CLICKS, dict(batch_size=9), {"batch_size"}),
        (CLICKS, dict(split="ratio:0.7,0.1,0.2"), {"rows", "samples (number, sum of ids, tokens)"}),
    ],
)
def test_each_setting_of_a_loader_is_compared(job, change, named):
    one, other = job.loader(0, 2).batch(0), replace(job, **change).loader(1, 2).batch(0)
    assert named <= settings_that_differ(one, other) and differs(one, other)
    assert not differs(one, job.loader(1, 2).batch(0))


def test_the_number_of_ranks_is_compared_and_what_a_user_divides_is_not():
    one, other = JOB.loader(0, 2).batch(0), JOB.loader(2, 3).batch(0)
    assert settings_that_differ(one, other) == {"world_size"} and differs(one, other)
    whole = JOB.loader().batch(0)
    assert whole.shard is None and JOB.loader(0, 2).global_batch(0).shard is None
    parts = whole.select(torch.arange(4)), replace(JOB, seed=5).loader().batch(0).select(torch.arange(4, 8))
    assert not differs(*parts)


def test_a_batch_keeps_what_it_is_a_part_of():
    batch = JOB.loader(1, 2).batch(3)
    for other in (batch.select(torch.tensor([1])), batch.to("cpu"), JaggedBatch.concat([batch, batch])):
        assert other.shard == batch.shard is not None
    assert JaggedBatch.concat([batch, replace(JOB, seed=5).loader(0, 2).batch(3)]).shard is None


def test_epochs_without_borders_may_share_samples():
    """Of 60 users nearly each batch of 20 has some that are in another rank's, of the next epoch."""
    job = replace(STREAMED, dynamic=True, batch_size=40)
    ranks = [job.loader(rank, 2) for rank in range(2)]
    shared = 0
    for step in range(8):
        batches = [loader.batch(step) for loader in ranks]
        shared += len({*batches[0].sample_ids.tolist()} & {*batches[1].sample_ids.tolist()})
        assert not differs(*batches)
    assert shared


def trained(communicators, job, other):
    model, tables, optimizer = JOB.build("adam")
    last = communicators.rank == communicators.world_size - 1
    loader = (other if last else job).loader(communicators.rank, communicators.world_size)
    try:
        with Trainer(model, tables, optimizer, communicators, "nestpipe", WindowConfig(2)) as trainer:
            return "", [result.step for result in trainer.run(map(loader.batch, range(3)))]
    except (RanksDisagreeError, StageFailedError) as error:
        return str(error), []


@pytest.mark.multi_rank
@pytest.mark.parametrize("job", [JOB, STREAMED])
def test_ranks_with_other_loaders_are_named_on_every_rank(pool, job):
    for message, _ in pool.run(trained, 2, job, replace(job, seed=7)):
        assert (
            "step 0: rank 1 has loader's seed=7 and rank 0 has loader's seed=0: give every rank the same"
            in message
        )
    assert [steps for _, steps in pool.run(trained, 2, job, job)] == [[0, 1, 2]] * 2
