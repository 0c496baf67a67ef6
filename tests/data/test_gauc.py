"""GAUC counts pairs exactly: it equals a double loop, whatever the order, ties and users."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data.impression_loader import ImpressionLoader
from tritonrec.data.interactions import Interactions
from tritonrec.data.ranking import auc, evaluate_impressions, gauc, weighted_auc

pytestmark = pytest.mark.smoke

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def area(scores: list[float], labels: list[int]) -> float | None:
    """Pair by pair."""
    won, pairs = 0.0, 0
    for mine, kind in zip(scores, labels, strict=True):
        for other, other_kind in zip(scores, labels, strict=True):
            if kind == 1 and other_kind == 0:
                pairs += 1
                won += 1.0 if mine > other else 0.5 if mine == other else 0.0
    return won / pairs if pairs else None


def naive(users: list[int], scores: list[float], labels: list[int]) -> tuple[float, int, int]:
    total, weight, used, left_out = 0.0, 0, 0, 0
    for user in set(users):
        rows = [row for row, owner in enumerate(users) if owner == user]
        found = area([scores[row] for row in rows], [labels[row] for row in rows])
        if found is None:
            left_out += 1
            continue
        used += 1
        total += found * len(rows)
        weight += len(rows)
    return (total / weight if weight else math.nan), used, left_out


def on_tensors(users, scores, labels):
    return gauc(torch.tensor(users, dtype=torch.int64), torch.tensor(scores, dtype=torch.float64),
                torch.tensor(labels))  # fmt: skip


IMPRESSIONS = st.lists(
    st.tuples(
        st.sampled_from([INT64_MIN, -1, 0, 5, INT64_MAX]),
        st.sampled_from([-math.inf, -3e4, -1.5, -1e-40, -0.0, 0.0, 1e-300, 1e-40, 0.25, 3.0, math.inf]),
        st.integers(0, 1),
    ),
    max_size=40,
)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@given(IMPRESSIONS, st.sampled_from(FLOATS), st.sampled_from([None, 3]))
def test_equals_a_double_loop(impressions, dtype, small):
    """Users in any range, and by numbers from 0 on; scores of every type, and zeros with either sign."""
    users, scores, labels = ([row[at] for row in impressions] for at in range(3))
    users = users if small is None else [user % small for user in users]
    scores = torch.tensor(scores, dtype=dtype).tolist()
    value, used, left_out = naive(users, scores, labels)
    found = gauc(torch.tensor(users, dtype=torch.int64), torch.tensor(scores, dtype=dtype),
                 torch.tensor(labels))  # fmt: skip
    assert found.value == pytest.approx(value, rel=1e-14, nan_ok=True)
    assert (found.users, found.left_out) == (used, left_out)
    alone = area(scores, labels)
    assert auc(torch.tensor(scores, dtype=torch.float64), torch.tensor(labels)) == pytest.approx(
        math.nan if alone is None else alone, rel=1e-14, nan_ok=True
    )


def test_equals_a_double_loop_on_many_users():
    random = np.random.default_rng(5)
    users = (random.zipf(1.3, 900) % 40 - 7).tolist()
    scores = (random.integers(0, 30, 900) / 7).tolist()
    labels = (random.random(900) < 0.2).astype(int).tolist()
    found, (value, used, left_out) = on_tensors(users, scores, labels), naive(users, scores, labels)
    assert found.value == pytest.approx(value, rel=1e-13) and 0.3 < value < 0.7
    assert (found.users, found.left_out) == (used, left_out) and min(used, left_out) > 2


def test_impressions_are_the_weights():
    users = [1] * 4 + [2] * 2 + [3] * 3
    scores = [0.1, 0.2, 0.3, 0.4, 0.9, 0.1, 0.5, 0.5, 0.5]
    labels = [0, 0, 1, 1, 0, 1, 1, 1, 1]
    assert on_tensors(users, scores, labels) == ((4 * 1.0 + 2 * 0.0) / 6, 2, 1)


def test_an_order_of_the_impressions_changes_no_bit():
    random = torch.Generator().manual_seed(3)
    users, labels = (
        torch.randint(0, 20, (500,), generator=random),
        torch.randint(0, 2, (500,), generator=random),
    )
    scores = torch.randint(0, 50, (500,), generator=random) / 9
    order = torch.randperm(500, generator=random)
    assert gauc(users, scores, labels) == gauc(users[order], scores[order], labels[order])
    assert gauc(users, scores, labels) == gauc(users, scores, labels.bool())


def test_users_are_ranked_apart():
    found = on_tensors([1, 1, 2, 2], [10.0, 11.0, -5.0, -4.0], [0, 1, 0, 1])
    assert found == (1.0, 2, 0)
    assert auc(torch.tensor([10.0, 11, -5, -4]), torch.tensor([0, 1, 0, 1])) == 0.75


@pytest.mark.parametrize("labels", [[], [0], [1], [1, 1], [0, 0]])
def test_labels_of_one_kind_have_no_area(labels):
    scores, users = [float(at) for at in range(len(labels))], [7] * len(labels)
    found = on_tensors(users, scores, labels)
    assert math.isnan(found.value) and found.users == 0 and found.left_out == (1 if labels else 0)
    assert math.isnan(auc(torch.tensor(scores), torch.tensor(labels)))


@pytest.mark.parametrize(
    "users, scores, labels, message",
    [
        ([1, 2], [0.1], [0, 1], r"must be \(n,\): got shapes \(2,\), \(1,\) and \(2,\)"),
        ([[1]], [[0.1]], [[0]], r"must be \(n,\): got shapes \(1, 1\)"),
        ([4, 5], [0.1, math.nan], [0, 1], r"scores\[1\] is nan, where user_ids is 5"),
        ([4, 5], [0.1, 0.2], [0, 2], r"labels\[1\] is 2, where user_ids is 5"),
        ([4, 5], [0.1, 0.2], [0, 0.5], r"labels\[1\] is 0.5, where user_ids is 5"),
    ],
)
def test_bad_impressions_are_named(users, scores, labels, message):
    with pytest.raises(ValueError, match=message):
        on_tensors(users, scores, labels)
    if len(scores) == 2:
        with pytest.raises(ValueError, match=message.replace("user_ids", "weights")):
            weighted_auc(torch.tensor(scores), torch.tensor(labels), torch.tensor(users))


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_named(wrong):
    with pytest.raises(ValueError, match=f"at least 0, got {wrong:g}"):
        weighted_auc(torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), torch.tensor([1.0, wrong]))


def rated() -> ImpressionLoader:
    random = np.random.default_rng(8)
    user, item = random.integers(0, 12, 300), random.integers(0, 40, 300)
    log = Interactions(user, item, np.arange(300), random.integers(1, 6, 300).astype(np.float64))
    return ImpressionLoader(log, 8, max_history=10, max_exposed=9, seed=0)


def test_a_model_is_scored_on_the_held_out_impressions():
    loads = rated()
    perfect = evaluate_impressions(lambda batch: batch.labels.float(), loads)
    assert perfect == {"GAUC/click": 1.0, "AUC/click": 1.0, "GAUC/conversion": 1.0, "AUC/conversion": 1.0}
    clicks = evaluate_impressions(lambda batch: batch.labels[:, :1].expand(-1, 2).float(), loads, 5)
    assert clicks["GAUC/click"] == 1.0 and 0.5 < clicks["GAUC/conversion"] < 1.0

    def drifting(batch):  # better scores for later users: seen by AUC, not by GAUC
        return batch.labels.float() * 0.5 + batch.exposed_context("user_id")[:, None]

    drift = evaluate_impressions(drifting, loads, 3)
    assert drift["GAUC/click"] == 1.0 and drift["AUC/click"] < 1.0
    users = torch.cat([batch.exposed_context("user_id") for batch in loads.evaluation_batches()])
    items = torch.cat([batch.exposed_items for batch in loads.evaluation_batches()])
    labels = torch.cat([batch.labels for batch in loads.evaluation_batches()])
    by_item = evaluate_impressions(
        lambda batch: (batch.exposed_items % 7)[:, None].expand(-1, 2).float(), loads
    )
    expected = naive(users.tolist(), (items % 7).tolist(), labels[:, 1].tolist())[0]
    assert by_item["GAUC/conversion"] == pytest.approx(expected, rel=1e-13)


def test_scores_of_another_shape_are_named():
    with pytest.raises(
        ValueError, match=r"scores must be \(\d+, 2\): exposed items by tasks; got shape \(\d+,\)"
    ):
        evaluate_impressions(lambda batch: batch.labels[:, 0].float(), rated())
