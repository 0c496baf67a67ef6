"""A batch is a function of (seed, step): any rank makes its shard of it alone, and it resumes anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tritonrec.data import DynamicBatchLoader, NumberedLoader
from tritonrec.data.batch import JaggedBatch
from tritonrec.data.interactions import Interactions
from tritonrec.data.loader import NextItemLoader
from tritonrec.data.zipf import ZipfOptions, generate

FIELDS = ("sample_ids", "offsets", "ids", "timestamps", "labels", "negatives")
LOG = generate(ZipfOptions(users=90, items=60, median_length=6, max_length=30, extreme_ids=True, seed=4))


def loader(log: Interactions = LOG, **changes) -> NextItemLoader:
    options = dict(batch_size=16, max_seq_len=8, num_negatives=3, seed=11) | changes
    return NextItemLoader(log, **options)


def same(left: JaggedBatch, right: JaggedBatch) -> bool:
    return left.step == right.step and all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in FIELDS
    )


def small_log(*users: list[int]) -> Interactions:
    """User u has the items given, in this order."""
    rows = [(user, item, time) for user, items in enumerate(users) for time, item in enumerate(items)]
    return Interactions(*np.array(rows, dtype=np.int64).T)


@pytest.mark.parametrize("kind", [NextItemLoader, DynamicBatchLoader])
def test_a_loader_has_no_end_and_says_what_to_take(kind):
    made = loader() if kind is NextItemLoader else kind(loader())
    for function in (iter, list, NumberedLoader(made).__next__):
        with pytest.raises(TypeError, match=rf"a {kind.__name__} has no end: \(loader.batch\(step\) for"):
            function(*[made] * (function in (iter, list)))
    with pytest.raises(TypeError, match=rf"a {kind.__name__} has no end: an epoch has loader.steps"):
        len(made)
    assert made


def test_the_sequence_of_the_docstring():
    batch = loader(small_log([10, 11, 12, 13, 14]), max_seq_len=3).batch(0).validate()
    assert batch.ids.tolist() == [10, 11, 12] and batch.labels.tolist() == [11, 12, 13]
    assert batch.timestamps.tolist() == [0, 1, 2] and batch.sample_ids.tolist() == [0]
    shorter = loader(small_log([10, 11, 12, 13, 14]), max_seq_len=2).batch(0)
    assert shorter.ids.tolist() == [11, 12] and shorter.labels.tolist() == [12, 13]


def test_users_without_a_token_are_left_out_and_their_training_items_stay_in_the_catalogue():
    loads = loader(small_log([1], [2, 3], [4, 5, 6], [7, 4, 8, 9]))
    assert sorted(loads.batch(0).sample_ids.tolist()) == [2, 3]
    assert loads.catalogue.tolist() == [1, 2, 4, 5, 7, 8]
    assert loads.popularity.tolist() == [1, 1, 2, 1, 1, 1]
    evaluated = next(loads.evaluation_batches())
    assert evaluated.history.sample_ids.tolist() == [1, 2, 3]


def test_an_epoch_visits_every_user_once_and_the_next_one_in_another_order():
    loads = loader()
    lengths = LOG.sequences.lengths
    trained = sorted(LOG.sequences.user_ids[lengths >= 3].tolist())
    assert loads.num_samples == len(trained) and len(trained) % 16 != 0
    epochs = []
    for epoch in range(2):
        steps = range(epoch * loads.steps_per_epoch, (epoch + 1) * loads.steps_per_epoch)
        batches = [loads.global_batch(step).validate() for step in steps]
        assert [batch.step for batch in batches] == list(steps)
        assert [batch.num_samples for batch in batches] == [16] * (len(trained) // 16) + [len(trained) % 16]
        epochs.append([sample for batch in batches for sample in batch.sample_ids.tolist()])
        assert sorted(epochs[-1]) == trained
    assert epochs[0] != epochs[1] and epochs[0] != trained


@pytest.mark.parametrize("world_size", [1, 2, 3, 20])
def test_the_shards_of_all_ranks_make_the_global_batch(world_size):
    step = loader().steps_per_epoch + 2
    whole = loader().global_batch(step)
    everything = torch.arange(whole.num_samples)
    for rank in range(world_size):
        shard = loader(rank=rank, world_size=world_size).batch(step).validate()
        assert same(shard, whole.select(everything[rank::world_size]))
    assert loader().global_size(step)[1] == whole.num_tokens
    assert loader().global_size(step) == (whole.num_samples, whole.num_tokens)


def test_any_step_can_be_made_first():
    forwards = loader()
    batches = [forwards.batch(step) for step in range(9)]
    for step in (8, 3, 0):
        assert same(loader().batch(step), batches[step])
    assert not torch.equal(loader(seed=12).batch(0).sample_ids, batches[0].sample_ids)


def test_negatives_depend_on_seed_step_sample_and_position_only():
    by_place = {}
    for loads in (loader(batch_size=16), loader(batch_size=90)):
        batch = next(batch for step in range(9) if (batch := loads.global_batch(step)).step == 0)
        places = zip(batch.token_sample_ids().tolist(), batch.token_positions().tolist(), strict=True)
        for place, drawn in zip(places, batch.negatives.tolist(), strict=True):
            assert by_place.setdefault(place, drawn) == drawn
    first, later = loader(batch_size=90).batch(0), loader(batch_size=90).batch(1)
    order = torch.argsort(first.sample_ids), torch.argsort(later.sample_ids)
    first, later = first.select(order[0]), later.select(order[1])
    assert torch.equal(first.ids, later.ids) and not torch.equal(first.negatives, later.negatives)


def test_negatives_cover_the_catalogue_evenly():
    loads = loader(num_negatives=64)
    drawn = torch.cat([loads.batch(step).negatives.flatten() for step in range(12)])
    values, counts = torch.unique(drawn, return_counts=True)
    assert torch.equal(values, loads.catalogue)
    expected = len(drawn) / loads.num_items
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < loads.num_items + 5 * (2 * loads.num_items) ** 0.5


def test_no_negatives_are_legal():
    batch = loader(num_negatives=0).batch(0).validate()
    assert batch.negatives.shape == (batch.num_tokens, 0)


def test_the_held_out_item_never_trains():
    log = small_log([1, 2, 3, 99], [2, 3, 1, 98])
    loads = loader(log)
    assert not {98, 99} & set(loads.batch(0).lookups()["item"].ids.tolist())
    evaluated = next(loads.evaluation_batches())
    assert evaluated.targets.tolist() == [-1, -1]
    assert not {98, 99} & set(evaluated.history.lookups()["item"].ids.tolist())


def test_evaluation_batches_have_targets_and_seen_items():
    loads = loader(small_log([5, 6, 7, 8, 9], [9, 8, 5]), max_seq_len=2)
    (batch,) = loads.evaluation_batches()
    assert loads.catalogue.tolist() == [5, 6, 7, 8, 9]
    history = batch.history.validate()
    assert history.ids.tolist() == [7, 8, 9, 8] and history.offsets.tolist() == [0, 2, 4]
    assert history.timestamps.tolist() == [2, 3, 0, 1]
    assert batch.targets.tolist() == [4, 0]
    assert batch.seen_users.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.seen_items.tolist() == [0, 1, 2, 3, 4, 3]


def test_evaluation_visits_every_user_with_two_items_once():
    loads = loader()
    batches = list(loads.evaluation_batches(7))
    visited = [user for batch in batches for user in batch.history.validate().sample_ids.tolist()]
    assert visited == LOG.sequences.user_ids[LOG.sequences.lengths >= 2].tolist()
    assert all(batch.history.num_samples == len(batch.targets) <= 7 for batch in batches)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(batch_size=0), r"batch_size must be at least 1, got 0"),
        (dict(max_seq_len=0), r"max_seq_len must be at least 1, got 0"),
        (dict(num_negatives=-1), r"num_negatives must be at least 0, got -1"),
        (dict(world_size=0), r"world_size must be at least 1, got 0"),
        (dict(rank=2, world_size=2), r"rank must be in \[0, 2\), got 2"),
        (dict(log=small_log([1, 2], [3])), r"none of the 2 users has the three interactions"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        loader(**changes)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        loader().batch(-1)
