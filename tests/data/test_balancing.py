"""Ranks get about as many tokens each, no sample is lost or repeated, and a dealt batch stays the same."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data.balancing import SequenceCost, dynamic_batches, partition_samples, token_spread
from tritonrec.data.batch import JaggedBatch
from tritonrec.data.dynamic import DynamicBatchLoader
from tritonrec.data.impression_loader import ImpressionLoader
from tritonrec.data.impressions import ImpressionBatch
from tritonrec.data.loader import NextItemLoader
from tritonrec.data.zipf import ZipfOptions, generate

LOG = generate(ZipfOptions(users=170, items=60, median_length=9, max_length=80, extreme_ids=True, seed=4))
RATED = replace(LOG, rating=(LOG.timestamp % 6).astype(np.float64))


def next_item(**changes) -> NextItemLoader:
    return NextItemLoader(LOG, **(dict(batch_size=24, max_seq_len=40, num_negatives=2, seed=11) | changes))


def impressions(**changes) -> ImpressionLoader:
    return ImpressionLoader(RATED, **(dict(batch_size=24, max_history=30, max_exposed=4, seed=11) | changes))


def algorithm_1(chunks: list[list[int]], target: int) -> list[list[int]]:
    """The paper's text with lists: the buffer Q, sums from its front, the closest of them."""
    chunks, buffer, batches = list(chunks), [], []
    while chunks or buffer:
        if sum(buffer) < target and chunks:
            buffer += chunks.pop(0)
            continue
        if sum(buffer) < target:
            batches.append(buffer)
            break
        sums = list(itertools.accumulate(buffer))
        count = min(range(1, len(buffer) + 1), key=lambda k: (abs(sums[k - 1] - target), k))
        batches.append(buffer[:count])
        buffer = buffer[count:]
    return [batch for batch in batches if batch]


def as_chunks(chunks: list[list[int]]) -> list[np.ndarray]:
    return [np.array(chunk, dtype=np.int64) for chunk in chunks]


CHUNKS = st.lists(st.lists(st.integers(1, 30), max_size=8), max_size=8)


@given(CHUNKS, st.integers(1, 80))
def test_cuts_are_those_of_algorithm_1(chunks, target):
    expected = [len(batch) for batch in algorithm_1(chunks, target)]
    assert list(dynamic_batches(as_chunks(chunks), target)) == expected
    assert sum(expected) == sum(map(len, chunks))


@pytest.mark.parametrize(
    "chunks, target, expected",
    [
        ([[4, 3, 5, 9], [2, 2]], 10, [3, 1, 2]),
        ([[3, 8]], 10, [2]),
        ([[5, 10], [1]], 10, [1, 1, 1]),
        ([[100], [100, 1]], 10, [1, 1, 1]),
        ([[10, 10, 10]], 10, [1, 1, 1]),
        ([[9], [], [1]], 10, [2]),
        ([[1, 1, 1]], 10, [3]),
        ([[2, 2]], 1, [1, 1]),
        ([[]], 10, []),
        ([], 10, []),
    ],
    ids=["docstring", "whole_buffer", "tie_takes_fewer", "over_long", "exact", "over_an_empty_chunk",
         "too_few", "target_one", "empty_chunk", "no_chunk"],
)  # fmt: skip
def test_named_cuts(chunks, target, expected):
    assert list(dynamic_batches(as_chunks(chunks), target)) == expected


def test_samples_of_no_tokens_are_not_lost():
    assert sum(dynamic_batches(as_chunks([[0, 0, 3, 0], [0, 9, 0]]), 4)) == 7


def test_a_batch_is_yielded_before_a_later_chunk_is_read():
    def chunks():
        yield np.array([6, 6], dtype=np.int64)
        raise AssertionError("read too far")

    assert next(dynamic_batches(chunks(), 6)) == 1


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 9))
def test_every_sample_is_assigned_to_one_rank(lengths, world_size):
    costs = SequenceCost().of(torch.tensor(lengths, dtype=torch.int64))
    parts = partition_samples(costs, world_size)
    assert len(parts) == world_size
    assert sorted(place for part in parts for place in part.tolist()) == list(range(len(lengths)))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    sums = [float(costs[part].sum()) for part in parts]
    largest = float(costs.max()) if lengths else 0.0
    assert max(sums) <= sum(sums) / world_size + largest + 1e-6


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_the_partition_is_within_four_thirds_of_the_optimum(lengths, world_size):
    parts = partition_samples(torch.tensor(lengths).double(), world_size)
    longest = max(sum(lengths[place] for place in part) for part in parts)
    best = min(
        max(sum(length for length, rank in zip(lengths, ranks, strict=True) if rank == mine)
            for mine in range(world_size))
        for ranks in itertools.product(range(world_size), repeat=len(lengths))
    )  # fmt: skip
    assert 3 * longest <= 4 * best


def test_ties_go_to_the_earlier_sample_and_the_lower_rank():
    parts = partition_samples(torch.tensor([5.0, 7, 5, 5, 7]), 3)
    assert [part.tolist() for part in parts] == [[1, 3], [4], [0, 2]]
    assert [part.tolist() for part in partition_samples(torch.zeros(0), 2)] == [[], []]


def test_cost_of_lengths():
    lengths = torch.tensor([0, 1, 320, 640])
    assert SequenceCost().of(lengths).tolist() == [0, 1 + 1 / 320, 640, 1920]
    assert SequenceCost(2, 0).of(lengths).tolist() == [0, 2, 640, 1280]
    for name in ("linear", "quadratic"):
        for value in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"{name} must be finite and not negative"):
                SequenceCost(**{name: value})


@pytest.mark.parametrize("make", [next_item, impressions])
def test_a_balanced_global_batch_is_the_same_batch(make):
    plain = make(world_size=4)
    ranks = [make(world_size=4, rank=rank, balance=True) for rank in range(4)]
    for step in (0, 1, plain.steps_per_epoch - 1, plain.steps_per_epoch):
        whole = plain.global_batch(step)
        assert whole.sample_ids.tolist() == ranks[0].global_batch(step).sample_ids.tolist()
        parts = [loads.batch(step).validate() for loads in ranks]
        ids = [sample for part in parts for sample in part.sample_ids.tolist()]
        assert sorted(ids) == sorted(whole.sample_ids.tolist())
        places = {sample: place for place, sample in enumerate(whole.sample_ids.tolist())}
        for part in parts:
            same = whole.select(torch.tensor([places[sample] for sample in part.sample_ids.tolist()]).long())
            for name, lookup in same.lookups().items():
                assert torch.equal(lookup.ids, part.lookups()[name].ids)


@pytest.mark.parametrize("make", [next_item, impressions])
@pytest.mark.parametrize("world_size", [4, 8])
def test_balancing_levels_the_tokens(make, world_size):
    sizes = dict(world_size=world_size, batch_size=80)
    steps = range(make(**sizes).num_samples // 80)
    plain = token_spread(make(**sizes), steps)
    balanced = token_spread(make(**sizes, balance=SequenceCost(1, 0)), steps)
    assert 1 <= balanced.ratio < 1 + (plain.ratio - 1) / 3 and balanced.spread < plain.spread / 3
    default = token_spread(make(**sizes, balance=True), steps)
    assert default.ratio < (1 + plain.ratio) / 2


def test_the_cost_decides_the_partition():
    lengths = torch.tensor([100, 60, 50, 0])
    by_tokens = partition_samples(SequenceCost(1, 0).of(lengths), 2)
    by_pairs = partition_samples(SequenceCost(0, 1).of(lengths), 2)
    assert [part.tolist() for part in by_tokens] == [[0, 3], [1, 2]]
    assert [part.tolist() for part in by_pairs] == [[0], [1, 2, 3]]


def test_spread_of_known_tokens():
    class Fixed:
        tokens = torch.tensor([[4, 4, 10], [0, 0, 0], [6, 6, 6], [0, 0, 3]])

        def tokens_per_rank(self, step):
            return self.tokens[step]

    spread = token_spread(Fixed(), range(4))
    assert (spread.ratio, spread.worst_ratio, spread.spread) == (19 / 13, 3.0, 3.0)
    with pytest.raises(ValueError, match="the steps hold no tokens"):
        token_spread(Fixed(), [1])


@pytest.mark.parametrize("make", [next_item, impressions])
@pytest.mark.parametrize("world_size, chunk", [(1, 8), (3, 8), (5, 1), (4, 1000)])
def test_dynamic_batches_visit_every_sample_once_an_epoch(make, world_size, chunk):
    loads = DynamicBatchLoader(make(world_size=world_size), chunk_samples=chunk)
    everyone = sorted(make().sample_ids.tolist())
    step, orders = 0, []
    for epoch in range(3):
        visited = []
        for _ in range(loads.steps_of(epoch)):
            batch = loads.global_batch(step).validate()
            assert batch.step == step
            visited += batch.sample_ids.tolist()
            step += 1
        assert sorted(visited) == everyone
        orders.append(visited)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("make, kind", [(next_item, JaggedBatch), (impressions, ImpressionBatch)])
def test_dynamic_shards_make_the_global_batch(make, kind):
    ranks = [DynamicBatchLoader(make(world_size=3, rank=rank)) for rank in range(3)]
    steps = ranks[0].steps_of(0) + ranks[0].steps_of(1)
    counts = set()
    for step in range(steps):
        parts = [loads.batch(step).validate() for loads in ranks]
        whole, joined = ranks[1].global_batch(step), kind.concat(parts)
        assert whole.sample_ids.tolist() == joined.sample_ids.tolist()
        for name, lookup in whole.lookups().items():
            assert torch.equal(lookup.ids, joined.lookups()[name].ids)
        tokens = ranks[0].tokens_per_rank(step).tolist()
        assert tokens == [part.num_tokens for part in parts]
        assert ranks[2].global_size(step) == (joined.num_samples, joined.num_tokens)
        counts.add(tuple(part.num_samples for part in parts))
    assert len({count for triple in counts for count in triple}) > 2


@pytest.mark.parametrize("make", [next_item, impressions])
def test_each_rank_runs_algorithm_1_over_its_chunks(make):
    loads = DynamicBatchLoader(make(world_size=3), target_tokens=150, chunk_samples=5)
    inner = loads.loader
    first = 0
    for epoch in range(2):
        chunks = inner.epoch_order(epoch).split(5)
        for rank in range(3):
            lengths = [inner.sample_tokens[chunk].tolist() for chunk in chunks[rank::3]]
            expected = [sum(batch) for batch in algorithm_1(lengths, 150)]
            found = [int(loads.tokens_per_rank(first + step)[rank]) for step in range(loads.steps_of(epoch))]
            assert found == expected + [0] * (len(found) - len(expected))
        first += loads.steps_of(epoch)


def test_a_rank_without_chunks_has_empty_batches():
    loads = DynamicBatchLoader(impressions(world_size=3, rank=2), chunk_samples=10**6)
    batch = loads.batch(0).validate()
    assert batch.num_samples == 0 and batch.loss_terms == 0 and list(batch.context) == ["user_id"]
    assert loads.tokens_per_rank(0).tolist()[1:] == [0, 0]


@pytest.mark.parametrize("make", [next_item, impressions])
def test_a_restarted_dynamic_loader_goes_on_where_it_was(make):
    forwards = DynamicBatchLoader(make(world_size=2, rank=1))
    steps = sum(forwards.steps_of(epoch) for epoch in range(3))
    seen = [forwards.batch(step).sample_ids.tolist() for step in range(steps)]
    for step in (steps - 1, 5, forwards.steps_of(0), 0):
        assert DynamicBatchLoader(make(world_size=2, rank=1)).batch(step).sample_ids.tolist() == seen[step]
    other = DynamicBatchLoader(make(world_size=2, rank=1, seed=12))
    assert other.batch(0).sample_ids.tolist() != seen[0]


def test_dynamic_batches_hold_about_the_target():
    inner = next_item(world_size=4, batch_size=32)
    loads = DynamicBatchLoader(inner, target_tokens=200)
    longest = int(inner.sample_tokens.max())
    steps = range(loads.steps_of(0))
    tokens = torch.stack([loads.tokens_per_rank(step) for step in steps])
    for rank in tokens.T.tolist():
        full = [count for count in rank if count][:-1]
        assert all(abs(count - 200) <= (longest + 1) // 2 for count in full)
    fixed = token_spread(inner, range(inner.steps_per_epoch))
    assert token_spread(loads, steps[:-2]).ratio < fixed.ratio


def test_the_default_target_is_the_mean_of_a_rank():
    inner = next_item(world_size=4, batch_size=24)
    expected = float(inner.sample_tokens.double().mean()) * 24 / 4
    assert DynamicBatchLoader(inner).target_tokens == int(expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(target_tokens=0), "target_tokens must be at least 1, got 0"),
        (dict(chunk_samples=0), "chunk_samples must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        DynamicBatchLoader(next_item(), **changes)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        DynamicBatchLoader(next_item()).batch(-1)
    with pytest.raises(ValueError, match="target_tokens must be at least 1, got 0"):
        next(dynamic_batches([], 0))
