"""Promise: the smallest (score, id) of each group over all ranks, whichever rank holds them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_table import Ranks

from tritonrec.embedding import KeyLayout
from tritonrec.embedding.select import _end_of_share, in_order_of_keys, select_smallest, smallest_slots
from tritonrec.embedding.selection import valid

FIRST, LAST = -(2**63), 2**63 - 1
MERGED = KeyLayout(("action", "item", "user"))
IDS = {
    False: st.one_of(
        st.integers(FIRST, LAST), st.integers(-3, 3), st.sampled_from([FIRST, FIRST + 1, LAST - 1, LAST])
    ),
    True: st.one_of(st.integers(0, 2**61 - 1), st.integers(0, 3), st.sampled_from([0, 2**61 - 2, 2**61 - 1])),
}
SCORES = st.one_of(st.integers(-2, 2), st.sampled_from([255, 256, 65536, 2**31 - 1, -(2**31)]))
PLACES = pytest.mark.parametrize("device", [False, True], ids=["host", "device"])


def packed(member, number):
    return int(MERGED.pack(member, torch.tensor([number]), "f"))


def chosen_of(ranks, items, owners, k, device=False):
    """(group, score, id) chosen on any rank; each rank has its own items (group, score, id, candidate)."""

    def run(rank, all_reduce):
        mine = [item for item, owner in zip(items, owners, strict=True) if owner == rank]
        if not device:
            mine = [item for item in mine if item[3]]
        groups, scores, ids, among = torch.tensor(mine, dtype=torch.int64).view(-1, 4).unbind(1)
        if not device:
            mask = select_smallest(scores.to(torch.int32), ids, groups, torch.tensor(k), all_reduce)
            assert mask.shape == (len(mine),) and mask.dtype == torch.bool
            return [item[:3] for item, taken in zip(mine, mask.tolist(), strict=True) if taken]
        # of several groups the keys of the first are smaller
        keys = ids if len(k) == 1 else torch.tensor([packed(item[0], item[2]) for item in mine]).long()
        positions, count = smallest_slots(
            scores.to(torch.int32), keys.contiguous(), groups, among.bool(), k, all_reduce
        )
        assert len(positions) == sum(min(each, len(mine)) for each in k)
        return [mine[i][:3] for i in positions[: int(count)].tolist()]

    return sorted(item for part in ranks(run) for item in part)


@PLACES
@given(st.booleans(), st.integers(1, 4), st.randoms(use_true_random=False), st.data())
def test_the_smallest_of_each_group(device, merged, world_size, random, data):
    items = data.draw(
        st.lists(
            st.tuples(st.integers(0, 2) if merged else st.just(0), SCORES, IDS[merged], st.booleans()),
            min_size=1,
            max_size=30,
            unique_by=lambda item: (item[0], item[2]),
        )
    )
    k = data.draw(st.lists(st.integers(0, 12), min_size=3 if merged else 1, max_size=3 if merged else 1))
    owners, expected = [random.randrange(world_size) for _ in items], []
    for group, most in enumerate(k):
        expected += sorted(item[:3] for item in items if item[0] == group and item[3])[:most]
    ranks = Ranks(world_size)
    assert chosen_of(ranks, items, owners, k, device) == expected
    ranks.close()


@PLACES
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("k", [0, 1, 99, 100, 101, 200, 201])
def test_ties_of_the_score_go_by_signed_key(k, world_size, device):
    ranks = Ranks(world_size)
    keys = [FIRST, LAST, *range(-99, 99)]
    items = [(0, 9, key, True) for key in keys]
    chosen = chosen_of(ranks, items, [i % world_size for i in range(200)], [k], device)
    assert [key for _group, _score, key in chosen] == sorted(keys)[:k]
    ranks.close()


@pytest.mark.parametrize(("first", "second"), [(6, 1), (256 + 6, 256 + 1)], ids=["low", "ninth_bit"])
@PLACES
def test_over_ranks_the_score_comes_before_the_key(first, second, device):
    """Rank 0 has the smaller keys and the larger scores, in the second group."""
    items = [(1, first, 10, True), (1, second, 20, True)]
    ranks = Ranks(2)
    assert chosen_of(ranks, items, [0, 1], [0, 1, 0], device) == [items[1][:3]]
    ranks.close()


def test_the_greatest_key_is_not_lost_behind_the_count():
    keys, positions = torch.tensor([LAST, 3, 8]), torch.tensor([5, 6, 7])
    assert in_order_of_keys(keys, positions, torch.tensor(2))[1][:2].tolist() == [6, 5]


def test_a_choice_is_made_on_the_device_of_its_scores():
    """Whatever the default device is."""
    word, keys = torch.tensor([1, 2, 3]), torch.tensor([20, 30, 10])
    edges = torch.tensor([0]), torch.tensor([3])
    with torch.device("meta"):
        end = _end_of_share(word, keys, *edges, [2], lambda counts: counts)
    assert end.tolist() == [2]


def test_stops_as_soon_as_it_is_decided():
    """Ids that differ in their top byte need one round for it, after the four of equal scores."""
    ranks = Ranks(2)
    items = [(0, 5, number << 56, True) for number in range(-100, 100)]
    chosen = chosen_of(ranks, items, [i % 2 for i in range(200)], [7])
    assert chosen == [item[:3] for item in items[:7]]
    assert ranks.sums == 5
    ranks.close()


@pytest.mark.parametrize("count", [None, torch.tensor(2)])
def test_which_are_valid_is_known_on_the_device_of_the_keys(count):
    """Whatever the default device is."""
    with torch.device("meta"):
        found = valid(3, count, torch.device("cpu"))
    assert found.tolist() == [True, True, count is None]
