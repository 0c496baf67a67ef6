"""The held-out item competes with all unseen items, ties go by the catalogue, and no item is sampled."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonrec.data import movielens, ranking
from tritonrec.data.interactions import Interactions
from tritonrec.data.loader import NextItemLoader
from tritonrec.data.ranking import evaluate, popularity_scores, target_ranks
from tritonrec.data.zipf import ZipfOptions, generate
from tritonrec.metrics import RankingMetrics


def loader_of(*users: list[int]) -> NextItemLoader:
    """User u has the items given, in this order; the last one of each is held out."""
    rows = [(user, item, time) for user, items in enumerate(users) for time, item in enumerate(items)]
    return NextItemLoader(Interactions(*np.array(rows, dtype=np.int64).T), 4, 8, 0, seed=0)


def constant(*scores: float):
    return lambda history: torch.tensor(scores).expand(history.num_samples, -1)


def rank_metrics(rank: int, users: int = 1) -> tuple[float, float]:
    return 1 / users, 1 / math.log2(rank + 2) / users


@pytest.mark.parametrize(
    "scores, rank",
    [
        ((0, 0, 9, 1, 2), 0),  # the target is item 3 of the catalogue [1, 2, 3, 4, 5], 1 and 2 are seen
        ((9, 9, 1, 0, 0), 0),  # seen items do not compete
        ((0, 0, 1, 2, 0), 1),
        ((0, 0, 1, 2, 3), 2),
        ((0, 0, 1, 1, 1), 0),  # ties: the target is the first of them
        ((0, 0, -math.inf, -math.inf, 0), 1),
    ],
)
def test_rank_of_the_target(scores, rank):
    loader = loader_of([1, 2, 3], [3, 4, 5, 99])
    metrics = evaluate(constant(*scores), loader, ks=(rank + 1,))
    # The other user's target was never trained: a miss.
    assert (metrics[f"HR@{rank + 1}"], metrics[f"NDCG@{rank + 1}"]) == rank_metrics(rank, users=2)
    if rank:
        assert evaluate(constant(*scores), loader, ks=(rank,)) == {f"HR@{rank}": 0, f"NDCG@{rank}": 0}


def test_a_tie_goes_to_the_item_that_is_first_in_the_catalogue():
    loader = loader_of([1, 2, 4], [3, 4, 5, 99])
    metrics = evaluate(constant(0, 0, 1, 1, 1), loader, ks=(1, 2))
    assert metrics["HR@1"] == 0 and metrics["HR@2"] == 0.5


def test_a_target_that_was_seen_before_competes():
    loader = loader_of([1, 2, 1], [3, 4, 99])
    assert evaluate(constant(9, 0, 1, 0), loader, ks=(1,))["HR@1"] == 0.5
    assert evaluate(constant(0, 9, 1, 0), loader, ks=(1,))["HR@1"] == 0


def test_items_beyond_the_history_are_seen_as_well():
    users = [[10, 11, 12, 13, 14, 15], [15, 16, 99]]
    rows = np.array(
        [(user, item, time) for user, items in enumerate(users) for time, item in enumerate(items)]
    )
    loader = NextItemLoader(Interactions(*rows.astype(np.int64).T), 4, max_seq_len=1, num_negatives=0, seed=0)
    assert loader.catalogue.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert evaluate(constant(9, 9, 9, 9, 9, 1, 0), loader, ks=(1,))["HR@1"] == 0.5


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), batch_size=st.integers(1, 40), ks=st.sets(st.integers(1, 30), min_size=1))
def test_equals_a_plain_sort(seed, batch_size, ks):
    log = generate(
        ZipfOptions(users=25, items=20, median_length=4, max_length=12, extreme_ids=True, seed=seed)
    )
    loader = NextItemLoader(log, 8, 5, 0, seed=0)
    catalogue = loader.catalogue.tolist()
    table = torch.randint(0, 6, (25, len(catalogue)), generator=torch.Generator().manual_seed(seed)).float()
    row = {user: place for place, user in enumerate(log.sequences.user_ids.tolist())}

    def scores(history):
        return table[[row[user] for user in history.sample_ids.tolist()]]

    ranks = []
    sequences = log.sequences
    for place in row.values():
        items = sequences.items[sequences.offsets[place] : sequences.offsets[place + 1]].tolist()
        if len(items) >= 2:
            *seen, target = items
            order = sorted(range(len(catalogue)), key=lambda item: (-table[place, item].item(), item))
            unseen = [
                catalogue[item] for item in order if catalogue[item] not in seen or catalogue[item] == target
            ]
            ranks.append(unseen.index(target) if target in unseen else math.inf)
    metrics = evaluate(scores, loader, ks=sorted(ks), batch_size=batch_size)
    for k in ks:
        gains = [1 / math.log2(rank + 2) for rank in ranks if rank < k]
        assert metrics[f"HR@{k}"] == len(gains) / len(ranks)
        assert metrics[f"NDCG@{k}"] == math.fsum(gains) / len(ranks)


def test_a_large_k_lists_some_users_at_a_time(monkeypatch):
    log = generate(ZipfOptions(users=25, items=20, median_length=4, max_length=12, seed=3))
    loader, places = NextItemLoader(log, 8, 5, 0, seed=0), []
    expected = evaluate(popularity_scores(loader), loader, ks=(2, 100))
    listed = ranking.list_terms
    monkeypatch.setattr(
        ranking, "list_terms", lambda hits, *rest: [places.append(hits.numel()), listed(hits, *rest)][1]
    )
    monkeypatch.setattr(ranking, "LISTED", 50)
    assert evaluate(popularity_scores(loader), loader, ks=(2, 100)) == expected
    assert len(places) > 5 and max(places) <= 50


@pytest.mark.parametrize(("most", "users"), [(1, 1), (3 * 50 + 7, 3), (2**26, 39)])
def test_scores_of_a_large_catalogue_are_of_few_users_at_a_time(monkeypatch, most, users):
    log = generate(ZipfOptions(users=40, items=60, seed=2))
    loader, asked = NextItemLoader(log, 8, 5, 0, seed=0), []
    loader.catalogue = loader.catalogue[:50]

    def scores(history):
        asked.append(history.num_samples)
        return history.sample_ids[:, None] * 7 % torch.arange(1, 51) * 1.0

    expected = evaluate(scores, loader, batch_size=40)
    monkeypatch.setattr(ranking, "AT_A_TIME", most)
    asked.clear()
    assert evaluate(scores, loader) == expected and max(asked) == users


def test_popularity_beats_chance_and_loses_to_the_truth():
    loader = NextItemLoader(generate(ZipfOptions(users=400, items=300, seed=2)), 32, 20, 0, seed=0)
    random = torch.Generator().manual_seed(1)
    chance = evaluate(
        lambda history: torch.rand(history.num_samples, loader.num_items, generator=random), loader
    )
    popular = evaluate(popularity_scores(loader), loader)
    batches = iter(loader.evaluation_batches())

    def truth(history):
        batch = next(batches)
        return torch.nn.functional.one_hot(batch.targets.clamp(min=0), loader.num_items)

    perfect = evaluate(truth, loader)
    assert list(popular) == ["HR@10", "NDCG@10", "HR@50", "NDCG@50"]
    for name in popular:
        assert 2 * chance[name] < popular[name] < perfect[name] <= 1


def test_bad_scores_are_named():
    loader = loader_of([1, 2, 3], [3, 4, 5, 99])
    with pytest.raises(ValueError, match=r"scores must be \(2, 5\).*got shape \(2, 4\)"):
        evaluate(constant(0, 0, 0, 0), loader)
    with pytest.raises(ValueError, match=r"score of user 0 for item 4 is NaN"):
        evaluate(constant(0, 0, 0, math.nan, 0), loader)
    for ks in ((), (0, 10)):
        with pytest.raises(ValueError, match="ks must hold numbers of at least 1"):
            evaluate(constant(0, 0, 0, 0, 0), loader, ks=ks)
    for ks in (10, "10", [1.5], None, (True,), [3, False]):
        for call in (partial(evaluate, constant(0, 0, 0, 0, 0), loader), RankingMetrics):
            with pytest.raises(TypeError, match=r"ks must hold whole numbers, as \(10, 50\), got"):
                call(ks=ks)
    same = evaluate(constant(0, 0, 0, 0, 0), loader, ks=(k for k in (np.int64(1), 2)))
    assert same == evaluate(constant(0, 0, 0, 0, 0), loader, ks=[1, 2])
    for scores in (None, [[0.0] * 5] * 2):
        with pytest.raises(TypeError, match=r"scores must be a tensor \(2, 5\): users by cat"):
            evaluate(lambda history, scores=scores: scores, loader)


def test_popularity_on_the_real_log():
    try:
        log = movielens.load()
    except RuntimeError as error:
        pytest.skip(f"neither cached nor downloadable: {error}")
    loader = NextItemLoader(log, 64, 50, 0, seed=0)
    metrics = evaluate(popularity_scores(loader), loader)
    # Worked out once with pandas, user by user.
    assert metrics["HR@10"] == 81 / 943 and metrics["HR@50"] == 187 / 943
    assert metrics["NDCG@10"] == pytest.approx(0.044912560002852334, abs=1e-12)
    assert metrics["NDCG@50"] == pytest.approx(0.06927747821479935, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_scores_of_every_type_are_compared_as_they_are(dtype):
    """2**53 + 1 is no float64, and the item with it is above the one with 2**53."""
    loader = loader_of([1, 2, 3], [3, 4, 5, 1])
    large = torch.tensor([2**53, 0, 2**53, 2**53 + 1, 0])  # of items 1 to 5; 3 and 1 are held out
    scores = (large if dtype == torch.int64 else large / 2**54).to(dtype)
    ranks = target_ranks(scores.expand(2, -1), next(iter(loader.evaluation_batches())), loader, False)
    assert ranks.tolist() == ([2, 1] if dtype == torch.int64 else [1, 0])
