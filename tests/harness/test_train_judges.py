"""Promise: what a run says of itself, digest, early end and settings that differ, is so."""

from types import SimpleNamespace

import pytest
import torch

from tritonrec.distributed import Communicators
from tritonrec.embedding import FeatureConfig, HashTableCollection
from tritonrec.harness.job import Job
from tritonrec.harness.train import gather
from tritonrec.harness.train.elastic import Memory, lacks_evaluation
from tritonrec.harness.train.gather import rows_of_all, state_digest
from tritonrec.harness.train.loop import _outcome
from tritonrec.harness.train.resume import metadata, resume
from tritonrec.harness.train.run import Run
from tritonrec.harness.verify.thread_ranks import run_ranks

pytestmark = pytest.mark.every_case


def test_every_name_key_and_value_is_in_the_digest():
    def digest(key=5, state=0.0, weight=0.0, name="weight", table="item"):
        tables = HashTableCollection([FeatureConfig(table, 2)], seed=1)
        rows = torch.zeros(1, 6, dtype=torch.float32)
        rows[0, 5] = state
        tables.load(table, torch.tensor([key], dtype=torch.int64), rows)
        dense = {name: torch.full((3,), weight, dtype=torch.float32)}
        return state_digest(Communicators.local(), tables, dense)

    others = digest(key=6), digest(state=-0.0), digest(weight=-0.0), digest(name="bias"), digest(table="user")
    assert digest() == digest() and len({digest(), *others}) == 6


@pytest.mark.parametrize(
    ("step", "evaluated", "lacks"),
    [(0, 0, False), (4, 4, False), (4, 2, True), (5, 4, False), (12, 12, True), (12, 8, True)],
)
def test_a_run_without_lost_ranks_evaluates_what_not_all_have_finished_and_its_last_step(
    step, evaluated, lacks
):
    run = Run(Job(), steps=12, evaluate_every=4)
    assert lacks_evaluation(run, step, evaluated) is lacks

    def all_have(ranks):
        memory = Memory(evaluated=evaluated + 4 * (ranks.rank == 0))
        return memory.evaluated_by_all(ranks)

    assert run_ranks(2, all_have) == [evaluated] * 2


@pytest.mark.parametrize("should_stop", [False, True])
@pytest.mark.parametrize("before_the_end", [False, True])
def test_a_rule_has_ended_a_run_if_it_ended_before_its_last_step(should_stop, before_the_end):
    stopping = SimpleNamespace(should_stop=should_stop, state_dict=lambda: {"metric": "HR@10"})
    assert _outcome(stopping, before_the_end) == {
        "metric": "HR@10", "stopped": should_stop and before_the_end,
    }  # fmt: skip


def test_a_setting_that_a_checkpoint_lacks_had_its_usual_value():
    """It was saved by a version without the setting."""
    run = Run(Job(context_dim=5), checkpoint="saved")
    meta = metadata(run)

    def resumed(**job):
        trainer = SimpleNamespace(load=lambda path, accept, *_: accept({**meta, "job": job}) or 0)
        return resume(trainer, run)[0]

    assert resumed(**meta["job"]) == 0
    older = {name: value for name, value in meta["job"].items() if name != "context_dim"}
    usual = f"context_dim {Job().context_dim} in the checkpoint, 5 now"
    with pytest.raises(ValueError, match=f"made with other settings: {usual};"):
        resumed(**older)


@pytest.mark.parametrize("part", [1, 3, 1 << 16])
def test_a_digest_in_parts_of_any_size_is_that_of_one_rank(monkeypatch, part):
    draw = torch.Generator().manual_seed(4)
    ids, rows = torch.randperm(50, generator=draw), torch.randn(50, 9, generator=draw, dtype=torch.float32)

    def digest(ranks, **dense):
        tables = HashTableCollection([FeatureConfig(name, 3) for name in "abc"], seed=1)
        for name in "ab":  # the third has no rows
            own = ids % ranks.world_size == ranks.rank
            tables.load(name, ids[own], rows[own] + ord(name))
        return state_digest(ranks, tables, dense)

    whole = digest(Communicators.local())
    monkeypatch.setattr(gather, "PART_BYTES", part * 36)
    assert [*run_ranks(1, digest), *run_ranks(3, digest)] == [whole] * 4

    def sent(ranks):
        tables = HashTableCollection([FeatureConfig("a", 3)])
        own = ids % ranks.world_size == ranks.rank
        tables.load("a", ids[own], rows[own])
        every = rows_of_all(ranks.shard_control, tables, to_all=False)
        return [len(part) for _name, _ids, parts in every for part in parts]

    sizes = [min(part, 50 - start) for start in range(0, 50, part)]
    assert run_ranks(3, sent) == [sizes, [0] * len(sizes), [0] * len(sizes)]  # rows go to one rank

    def other_on_the_last(ranks):
        return digest(ranks, weight=torch.full((2,), ranks.rank == 2, dtype=torch.float32))

    found = run_ranks(3, other_on_the_last)
    assert found[0] == found[1] != found[2]
