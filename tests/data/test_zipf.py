"""The synthetic log has the popularity, the lengths and the ids that its options ask for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonrec.data.zipf import ZipfOptions, generate

pytestmark = pytest.mark.smoke


def test_popularity_follows_the_exponent():
    options = ZipfOptions(users=4000, items=1000, exponent=1.2, seed=5)
    counts = np.bincount(generate(options).item, minlength=1000)
    expected = np.arange(1, 1001) ** -1.2
    expected *= counts.sum() / expected.sum()
    assert np.abs(counts[:20] / expected[:20] - 1).max() < 0.06
    assert abs(counts[500:].sum() / expected[500:].sum() - 1) < 0.06


def test_lengths_are_log_normal_with_the_shortest_always_there():
    lengths = generate(ZipfOptions(users=4000, median_length=30, sigma=0.8, max_length=200)).sequences.lengths
    assert lengths[:3].tolist() == [1, 2, 3]
    assert abs(np.median(lengths) - 30) < 2
    assert abs(np.log(lengths[lengths < 200]).std() - 0.8) < 0.08
    assert lengths.max() == 200 and lengths.min() == 1


def test_communities_share_items():
    log = generate(ZipfOptions(users=2000, items=400, communities=4, affinity=1.0))
    assert (log.item % 4 == log.user % 4).all()
    apart = generate(ZipfOptions(users=2000, items=400, communities=4, affinity=0.0))
    together = (apart.item % 4 == apart.user % 4).mean()
    assert together < 0.35


def test_time_passes_within_a_sequence():
    sequences = generate(ZipfOptions(users=300)).sequences
    gaps = np.diff(sequences.timestamps)[np.diff(np.repeat(np.arange(300), sequences.lengths)) == 0]
    assert set(gaps.tolist()) == {0, 1, 2, 3, 4}


def test_extreme_ids_reach_both_ends():
    log = generate(ZipfOptions(users=50, items=80, extreme_ids=True))
    for ids, most in ((log.user, 50), (log.item, 80)):
        found = set(ids.tolist())
        assert {-(2**63), -1, 0, 2**63 - 1} <= found
        assert len(found) <= most and sum(value < 0 for value in found) > len(found) / 3
    plain = generate(ZipfOptions(users=50, items=80))
    assert plain.sequences.lengths.sum() == log.sequences.lengths.sum()
    assert len(log.sequences.user_ids) == 50


@settings(max_examples=30)
@given(
    users=st.integers(1, 6),
    items=st.integers(1, 6),
    max_length=st.integers(1, 4),
    communities=st.integers(1, 6),
    extreme=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_options_give_a_legal_log_and_the_same_one_twice(
    users, items, max_length, communities, extreme, seed
):
    communities = min(communities, items)
    options = ZipfOptions(users, items, 1.1, 2.0, 1.0, max_length, communities, 0.5, extreme, seed)
    log, again = generate(options), generate(options)
    assert log.sequences.lengths.max() <= max_length and len(log.sequences.lengths) == users
    assert len(set(log.item.tolist())) <= items
    assert (np.diff(log.timestamp) >= 0).all() and (log.timestamp >= 0).all()
    assert (log.user == again.user).all() and (log.item == again.item).all()
    if not extreme:
        assert log.item.min() >= 0 and log.item.max() < items


def test_seeds_differ():
    first, second = generate(ZipfOptions(seed=1)), generate(ZipfOptions(seed=2))
    assert first.sequences.lengths.tolist() != second.sequences.lengths.tolist()


def test_parse():
    assert ZipfOptions.parse("") == ZipfOptions()
    parsed = ZipfOptions.parse("users=10, items=20,exponent=0.9,extreme_ids=true,seed=7")
    assert parsed == ZipfOptions(users=10, items=20, exponent=0.9, extreme_ids=True, seed=7)


@pytest.mark.parametrize(
    "text, message",
    [
        ("user=10", r"'user=10' is no option; known are users, items"),
        ("users", r"'users' is no option"),
        ("users=many", r"users='many' is not a int"),
        ("extreme_ids=maybe", r"extreme_ids='maybe' is not a bool"),
        ("users=0", r"users must be at least 1, got 0"),
        ("items=3,communities=4", r"4 communities cannot share 3 items"),
        ("exponent=nan", r"exponent must be in \[0, 100\), got nan"),
        ("affinity=1.5", r"affinity must be in \[0, 1\], got 1.5"),
        ("median_length=0", r"median_length must be in \(0, 1e9\), got 0"),
        ("seed=-1", r"seed must be in \[0, 2\*\*63\), got -1"),
    ],
)
def test_parse_names_a_bad_option(text, message):
    with pytest.raises(ValueError, match=message):
        ZipfOptions.parse(text)


def test_ratings_are_whole_from_1_to_5_and_change_nothing_else():
    plain, rated = (generate(ZipfOptions(users=200, items=50, seed=4, ratings=on)) for on in (False, True))
    assert plain.rating is None and set(rated.rating) == {1.0, 2.0, 3.0, 4.0, 5.0}
    for name in ("user", "item", "timestamp"):
        assert (getattr(plain, name) == getattr(rated, name)).all()
    assert rated.rating[rated.item < 5].mean() > rated.rating[rated.item >= 40].mean() + 0.5
