"""Every sample is in exactly one micro-batch, and clustering lowers the payload at balanced tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data import JaggedBatch
from tritonrec.data.clustering import payload_inflation, split, tapered
from tritonrec.data.loader import NextItemLoader
from tritonrec.data.zipf import ZipfOptions, generate

COMMUNITIES = ZipfOptions(users=600, items=2000, communities=16, exponent=1.0, median_length=30, seed=6)


def jagged(samples: list[list[int]], negatives: int = 0) -> JaggedBatch:
    """Samples of given keys: ids are the keys, labels repeat them, negatives follow from the ids."""
    lengths = torch.tensor([len(sample) for sample in samples], dtype=torch.int64)
    ids = torch.tensor([key for sample in samples for key in sample], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    drawn = ids[:, None] * 31 + torch.arange(negatives)
    sample_ids = torch.arange(len(samples))
    return JaggedBatch.from_sequences(0, sample_ids, offsets, ids, ids, ids, drawn).validate()


def indices(parts) -> list[list[int]]:
    return [part.tolist() for part in parts]


@pytest.mark.if_changed
def test_the_batch_of_the_docstring():
    batch = jagged([[1, 2], [3, 4], [1, 2], [3, 5]])
    plain, clustered = split(batch, 2, clustering=False), split(batch, 2, clustering=True)
    assert indices(plain) == [[0, 1], [2, 3]] and indices(clustered) == [[1, 3], [0, 2]]
    assert payload_inflation(batch, plain) == 8 / 5 and payload_inflation(batch, clustered) == 1


def test_plain_micro_batches_are_runs_of_nearly_equal_counts():
    batch = jagged([[1]] * 7)
    assert indices(split(batch, 3, clustering=False)) == [[0, 1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("clustering", [False, True])
def test_more_micro_batches_than_samples_leave_the_last_ones_empty(clustering):
    parts = split(jagged([[1], [2]]), 5, clustering)
    assert [len(part) for part in parts] == [1, 1, 0, 0, 0]
    assert indices(split(jagged([]), 3, clustering)) == [[], [], []]
    assert payload_inflation(jagged([]), split(jagged([]), 3, clustering)) == 1


samples = st.lists(st.lists(st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 2**63 - 1]), max_size=6), max_size=12)


@given(samples, st.integers(0, 2), st.integers(1, 15), st.booleans(), st.sampled_from([1.0, 0.5, 0.01]))
def test_no_sample_is_lost_or_twice(samples, negatives, num_micro_batches, clustering, taper):
    batch = jagged(samples, negatives)
    parts = split(batch, num_micro_batches, clustering, taper)
    assert len(parts) == num_micro_batches and all(part.dtype == torch.int64 for part in parts)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(samples)))
    if clustering or taper == 1:
        assert sum(len(part) > 0 for part in parts) == min(num_micro_batches, len(samples))
    assert indices(split(batch, num_micro_batches, clustering, taper)) == indices(parts)
    assert payload_inflation(batch, parts) >= 1
    if clustering:
        share = batch.num_tokens * float(tapered(num_micro_batches, taper).max()) + 1
        longest = int(batch.lengths.max()) if samples else 0
        assert all(int(batch.lengths[part].sum()) <= share + longest for part in parts)


def keys_of(batch: JaggedBatch, sample: int) -> set[int]:
    return set(batch.select(torch.tensor([sample])).lookups()["item"].ids.tolist())


def greedy(batch: JaggedBatch, num_micro_batches: int) -> list[list[int]]:
    """The scheme of the module's docstring, in sets and loops."""
    keys = [keys_of(batch, sample) for sample in range(batch.num_samples)]
    holders = {key: sum(key in other for other in keys) for key in set().union(*keys)}
    weight = {key: 2**20 // count if count > 1 else 0 for key, count in holders.items()}
    total = [sum(weight[key] for key in own) for own in keys]
    free, parts = list(range(batch.num_samples)), []
    tokens_left = batch.num_tokens
    for later in reversed(range(num_micro_batches)):
        part, held, tokens = [], set(), 0
        while free and not (later and part and (tokens >= tokens_left / (later + 1) or len(free) <= later)):
            shared = {sample: sum(weight[key] for key in keys[sample] & held) for sample in free}
            score = {s: shared[s] / max(total[s], 1) if part else total[s] for s in free}
            best = max(free, key=lambda sample, score=score: (score[sample], -sample))
            free.remove(best)
            part.append(best)
            held |= keys[best]
            tokens += int(batch.lengths[best])
        tokens_left -= tokens
        parts.append(part)
    return parts


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=12), st.integers(0, 1), st.integers(2, 6))
def test_clusters_equal_the_plain_greedy_scheme(samples, negatives, num_micro_batches):
    batch = jagged(samples, negatives)
    parts = indices(split(batch, num_micro_batches, clustering=True))
    assert sorted(parts) == sorted(greedy(batch, num_micro_batches))
    payloads = [len(set().union(*(keys_of(batch, sample) for sample in part))) for part in parts if part]
    rising = sorted(
        payloads
    )  # the last one's gradients are sent when nothing is computed, as the first one's rows are
    assert payloads == [*rising[1::2], *reversed(rising[::2])]


@pytest.mark.parametrize("num_micro_batches", [2, 4, 8])
@pytest.mark.parametrize("negatives", [0, 1])
def test_clustering_lowers_the_payload_of_communities(num_micro_batches, negatives):
    loader = NextItemLoader(generate(COMMUNITIES), 128, 50, negatives, seed=9)
    for step in range(2):
        batch = loader.batch(step)
        plain = payload_inflation(batch, split(batch, num_micro_batches, clustering=False))
        clustered = payload_inflation(batch, split(batch, num_micro_batches, clustering=True))
        # Random negatives are shared by chance only, so less can be won with them.
        assert clustered - 1 < (0.6 if negatives == 0 else 0.95) * (plain - 1)


@given(samples, st.integers(2, 5))
def test_swapped_samples_fill_the_same_micro_batches_with_fewer_keys(samples, num_micro_batches):
    batch = jagged(samples)
    before, after = (split(batch, num_micro_batches, True, swaps=swaps) for swaps in (False, True))
    assert sorted(torch.cat(after).tolist()) == list(range(len(samples)))
    assert sorted(map(len, after)) == sorted(map(len, before))
    assert payload_inflation(batch, after) <= payload_inflation(batch, before)


def test_swaps_put_together_what_the_greedy_pass_took_apart():
    loader = NextItemLoader(generate(COMMUNITIES), 128, 50, 0, seed=9)
    batch = loader.batch(0)
    clustered, swapped = (split(batch, 8, True, swaps=swaps) for swaps in (False, True))
    assert payload_inflation(batch, swapped) < payload_inflation(batch, clustered)
    keys = [len(batch.select(part).sample_keys()[1].unique()) for part in swapped]
    rising = sorted(keys)
    assert keys == [*rising[1::2], *reversed(rising[::2])]  # the fewest stand at the ends, as they are now


def test_negatives_count_as_keys():
    batch = jagged([[1], [2], [3], [4]])
    shared = torch.tensor([[70, 71], [80, 81], [80, 81], [70, 71]])
    assert indices(split(replace(batch, negatives=shared), 2, clustering=True)) == [[0, 3], [1, 2]]


def test_labels_count_as_keys():
    batch = replace(jagged([[1], [2], [3], [4]]), labels=torch.tensor([9, 8, 8, 9]))
    assert indices(split(batch, 2, clustering=True)) == [[0, 3], [1, 2]]


def test_popular_keys_weigh_little():
    # All share keys 50 to 53; key 1 and key 2 tell two pairs apart.
    popular = [50, 51, 52, 53]
    batch = jagged([[1, *popular], [2, *popular], [2, *popular], [1, *popular]])
    assert indices(split(batch, 2, clustering=True)) == [[0, 3], [1, 2]]


def test_fewer_than_one_micro_batch_is_refused():
    with pytest.raises(ValueError, match="num_micro_batches must be at least 1, got 0"):
        split(jagged([[1]]), 0, clustering=True)


def test_tapered_shares_fall_towards_both_ends():
    assert tapered(5, 0.5).tolist() == [0.1, 0.2, 0.4, 0.2, 0.1]
    assert tapered(4, 0.5).tolist() == pytest.approx([1 / 6, 1 / 3, 1 / 3, 1 / 6])
    assert tapered(1, 0.3).tolist() == [1.0] and tapered(3, 1.0).tolist() == pytest.approx([1 / 3] * 3)
    for wrong in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="taper is a ratio"):
            tapered(3, wrong)


@pytest.mark.parametrize("clustering", [False, True])
def test_micro_batches_follow_the_taper(clustering):
    batch = jagged([[sample % 7, sample] for sample in range(100)])
    parts = split(batch, 5, clustering, 0.5)
    assert [len(part) for part in parts] == [10, 20, 40, 20, 10]
    assert sorted(torch.cat(parts).tolist()) == list(range(100))


def test_a_taper_that_leaves_nothing_for_the_ends_still_cuts():
    batch = jagged([[sample] for sample in range(40)])
    parts = split(batch, 300, True, 1e-3)
    assert sorted(torch.cat(parts).tolist()) == list(range(40))


@pytest.mark.parametrize("offsets", [[0, 10**9], [0, -4, 5], [0, 5, 4], [3, 5]])
def test_offsets_of_a_batch_of_the_users_own_are_checked(offsets):
    class Own:
        num_samples = len(offsets) - 1

        def sample_keys(self):
            return torch.tensor(offsets), torch.arange(5)

    with pytest.raises(ValueError, match=r"offsets of sample_keys\(\)"):
        split(Own(), 2, clustering=True)
