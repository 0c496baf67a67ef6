"""Promise: the smallest (score, id) of each group over all ranks, whichever rank holds them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_table import Ranks

from tritonrec.embedding.select import select_smallest
from tritonrec.embedding.selection import valid

INT64 = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-3, 3),
    st.sampled_from([-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1]),
)
SCORES = st.one_of(st.integers(-2, 2), st.sampled_from([255, 256, 65536, 2**31 - 1, -(2**31)]))


def chosen_of(ranks, items, owners, k):
    """(group, score, id) chosen on any rank; each rank gets the items it owns."""

    def run(rank, all_reduce):
        mine = [item for item, owner in zip(items, owners, strict=True) if owner == rank]
        columns = torch.tensor(mine, dtype=torch.int64).view(-1, 3)
        mask = select_smallest(
            columns[:, 1].to(torch.int32), columns[:, 2], columns[:, 0], torch.tensor(k), all_reduce
        )
        assert mask.shape == (len(mine),) and mask.dtype == torch.bool
        return [item for item, taken in zip(mine, mask.tolist(), strict=True) if taken]

    return sorted(item for part in ranks(run) for item in part)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), SCORES, INT64), max_size=40, unique_by=lambda item: (item[0], item[2])
    ),
    st.lists(st.integers(0, 15), min_size=3, max_size=3),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_the_smallest_of_each_group(items, k, world_size, random):
    ranks = Ranks(world_size)
    owners = [random.randrange(world_size) for _ in items]
    expected = []
    for group, count in enumerate(k):
        mine = sorted((score, number) for member, score, number in items if member == group)
        expected += [(group, *item) for item in mine[:count]]
    assert chosen_of(ranks, items, owners, k) == expected
    ranks.close()


@pytest.mark.parametrize("k", [0, 1, 499, 500, 501, 999, 1000, 1001])
def test_ties_of_the_score_go_by_signed_id(k):
    ids = torch.randperm(1000) - 500
    scores = torch.full((1000,), 9)
    mask = select_smallest(scores, ids, torch.zeros(1000, dtype=torch.int64), torch.tensor([k]))
    assert sorted(ids[mask].tolist()) == list(range(-500, -500 + min(k, 1000)))


def test_stops_as_soon_as_it_is_decided():
    """Ids that differ in their top byte need one round for it, after the four of equal scores."""
    ranks = Ranks(2)
    items = [(0, 5, number << 56) for number in range(-100, 100)]
    chosen = chosen_of(ranks, items, [i % 2 for i in range(200)], [7])
    assert chosen == items[:7]
    assert ranks.sums == 5
    ranks.close()


@pytest.mark.parametrize("count", [None, torch.tensor(2)])
def test_which_are_valid_is_known_on_the_device_of_the_keys(count):
    """Whatever the default device is."""
    with torch.device("meta"):
        found = valid(3, count, torch.device("cpu"))
    assert found.tolist() == [True, True, count is None]
