"""The synthetic log has the popularity, the lengths and the ids that its options ask for."""

from __future__ import annotations

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
