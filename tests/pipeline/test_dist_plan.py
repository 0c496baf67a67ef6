"""Promise: every row is there when a micro-batch uses it; every gradient reaches its owner once, complete."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planned_exchange import exchange, micro_batches

from tritonrec import ops
from tritonrec.pipeline.dist_plan import InputDist, plan_lookups, plan_lookups_of_one_rank, plan_output_dist
from tritonrec.pipeline.exchange_groups import joined_groups

KEYS = st.sampled_from([-(2**63), -5, -1, 0, 1, 2, 3, 4, 5, 6, 7, 2**31, 2**63 - 1])


def plan_input_dist(keys, world, dedup, first_use, padded=False, groups=None) -> InputDist:
    owners = partial(ops.owner_of, world_size=world)
    lookups = plan_lookups(keys, owners, world, dedup, first_use, padded, groups)
    return lookups.input_dist(lookups.sizes.tolist())


@given(
    st.integers(1, 4).flatmap(
        lambda m: st.lists(
            st.lists(st.lists(KEYS, max_size=7), min_size=m, max_size=m), min_size=1, max_size=3
        )
    ),
    st.sampled_from([(False, False), (True, False), (True, True)]),
    st.booleans(),
    st.sampled_from([None, (False, False), (False, True), (True, False), (True, True)]),
)
def test_rows_come_before_use_and_gradients_reach_their_owners_complete(ranks, how, padded, joined):
    dedup, first_use = how
    world, count = len(ranks), len(ranks[0])
    keys = [micro_batches(parts) for parts in ranks]
    groups = None if joined is None else joined_groups(count, *joined)
    asked = [plan_input_dist(parts, world, dedup, first_use, padded, groups) for parts in keys]
    if groups is not None:
        alone = [plan_input_dist(parts, world, dedup, first_use, padded) for parts in keys]
        for one, other in zip(asked, alone, strict=True):
            pairs = zip(one.keys.split(one.input_splits), other.keys.split(other.input_splits), strict=True)
            for mine, others in pairs:  # the order of rows in a table is that of its keys
                assert list(dict.fromkeys(mine.tolist())) == list(dict.fromkeys(others.tolist()))
            for i in range(count):
                assert groups.rows_with[i] == i or not sum(one.splits[i])
                assert groups.gradients_with[i] == i or not sum(one.gradients.splits[i])
    owned = list(exchange(asked))
    plans = []
    for owner, (received, last_use, receive, back) in enumerate(owned):
        assert bool((ops.owner_of(received, world) == owner).all())
        plans.append(plan_output_dist(torch.arange(len(received)), receive, last_use, back))

    for rank, one in enumerate(asked):
        store = torch.full((one.num_rows,), 99, dtype=torch.int64)
        held = torch.zeros(one.num_rows, dtype=torch.bool)
        uses = torch.zeros(one.num_rows, dtype=torch.int64)
        for i in range(count):
            came = []
            for owner, (received, *_) in enumerate(owned):
                sent = plans[owner][0]
                came.append(received[sent.rows[i].split(sent.splits[i])[rank]])
            store[one.slots(i)] = torch.cat(came)
            held[one.slots(i)] = True
            assert bool(held[one.inverse[i]].all()) and torch.equal(store[one.inverse[i]], keys[rank][i])
            uses.index_add_(0, one.inverse[i], torch.ones_like(one.inverse[i]))
            # What leaves now is used by no later micro-batch, and arrives at the owner as the same keys.
            leaving = one.gradients.rows[i]
            later = torch.cat([*one.inverse[i + 1 :], torch.empty(0, dtype=torch.int64)])
            assert not bool(torch.isin(leaving, later).any())
            for owner, (received, *_) in enumerate(owned):
                back = plans[owner][1]
                assert back.splits[i][rank] == one.gradients.splits[i][owner]
                rows = back.rows[i].split(back.splits[i])[rank]
                assert torch.equal(received[rows], store[leaving.split(one.gradients.splits[i])[owner]])
        everything = torch.cat(one.gradients.rows)
        assert sorted(everything.tolist()) == list(range(one.num_rows))
        assert int(uses.sum()) == sum(map(len, keys[rank])) and bool((uses > 0).all())
        if first_use:
            assert one.num_rows == len(torch.cat(keys[rank]).unique())


def test_micro_batches_that_share_both_exchanges_get_a_row_once():
    keys = micro_batches([[1, 2], [2, 3], [3, 1, 1], [4, 3], [3, 5], [6], [5, 6], [6, 6]])

    def counts(overlap, ordered=False, **how):
        groups = joined_groups(8, overlap, ordered)
        one = plan_input_dist(keys, 1, how.get("dedup", True), False, how.get("padded", False), groups)
        return [sum(each) for each in one.splits], [sum(each) for each in one.gradients.splits]

    for padded in (False, True):
        assert counts(False, padded=padded) == ([6, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 6])
        # 2 with 3: 3 1 4; 4 with 5: 3 5 6
        assert counts(True, padded=padded) == ([2, 2, 3, 0, 6, 0, 0, 0], [0, 0, 0, 7, 0, 3, 2, 1])
    assert sum(counts(False, ordered=True)[0]) == 14 and sum(counts(False, dedup=False)[0]) == 16


def test_the_table_of_the_docstring():
    keys = micro_batches([[1, 2, 3], [2, 3, 4], [1, 4]])
    plain, first = (plan_input_dist(keys, 1, True, use) for use in (False, True))
    assert plain.splits == [[3], [3], [2]] and plain.num_rows == 8
    assert first.splits == [[3], [1], [0]] and first.num_rows == 4
    assert [first.keys[rows].tolist() for rows in first.gradients.rows] == [[], [2, 3], [1, 4]]
    assert first.last_use is not None and first.last_use.tolist() == [2, 1, 1, 2]


@pytest.mark.parametrize("first_use", [False, True])
def test_micro_batches_without_keys_are_legal(first_use):
    asked = plan_input_dist(micro_batches([[], [7, 7], []]), 2, True, first_use)
    assert asked.num_rows == 1 and [len(part) for part in asked.inverse] == [0, 2, 0]
    empty = plan_input_dist(micro_batches([[], []]), 2, True, first_use)
    assert empty.num_rows == 0 and empty.input_splits == [0, 0]


@given(st.lists(st.lists(KEYS, max_size=7), min_size=1, max_size=4))
def test_one_rank_gets_its_rows_before_the_first_micro_batch_and_sends_gradients_after_the_last(parts):
    keys = micro_batches(parts)
    lookups = plan_lookups_of_one_rank(keys)
    one = lookups.input_dist(lookups.sizes.tolist())
    distinct = list(dict.fromkeys(key for part in parts for key in part))
    assert one.keys.tolist() == distinct and one.input_splits == [len(distinct)]
    for inverse, part in zip(one.inverse, parts, strict=True):
        assert one.keys[inverse].tolist() == part
    rows = torch.randperm(len(distinct))
    sent, gradients = plan_output_dist(rows, one.splits, None, one.gradients.splits)
    everything, nothing = rows.tolist(), [[]] * (len(parts) - 1)
    assert [each.tolist() for each in sent.rows] == [everything, *nothing]
    assert [each.tolist() for each in gradients.rows] == [*nothing, everything]
    values = torch.randn(len(distinct), 3)
    assert torch.equal(sent.of(values, 0), values[rows])
    for number in range(len(parts)):
        of = values if number == len(parts) - 1 else values[:0]
        assert torch.equal(one.gradients.of(values, number), of)
        assert one.slots(number) == (
            slice(0, len(distinct)) if number == 0 else slice(len(distinct), len(distinct))
        )
