"""Promise: every row is there when a micro-batch uses it, and every gradient goes home once, complete."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonrec import ops
from tritonrec.pipeline.routes import Asked, answer, ask

KEYS = st.sampled_from([-(2**63), -5, -1, 0, 1, 2, 3, 4, 5, 6, 7, 2**31, 2**63 - 1])


def micro_batches(parts):
    return [torch.tensor(part, dtype=torch.int64) for part in parts]


def exchange(asked: list[Asked]):
    """What each owner gets in the key exchange: keys, last uses, and how many from whom with which."""
    world = len(asked)
    for owner in range(world):
        parts = [one.keys.split(one.send)[owner] for one in asked]
        uses = [one.last_use.split(one.send)[owner] for one in asked if one.last_use is not None]
        receive = [[one.arriving[i][owner] for one in asked] for i in range(len(asked[0].arriving))]
        yield torch.cat(parts), torch.cat(uses) if uses else None, receive


@settings(deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda m: st.lists(
            st.lists(st.lists(KEYS, max_size=7), min_size=m, max_size=m), min_size=1, max_size=3
        )
    ),
    st.sampled_from([(False, False), (True, False), (True, True)]),
)
def test_rows_come_before_use_and_gradients_go_home_complete(ranks, how):
    dedup, first_use = how
    world, count = len(ranks), len(ranks[0])
    keys = [micro_batches(parts) for parts in ranks]
    asked = [ask(parts, lambda k: k, world, dedup, first_use) for parts in keys]
    owned = list(exchange(asked))
    plans = []
    for owner, (received, last_use, receive) in enumerate(owned):
        assert bool((ops.owner_of(received, world) == owner).all())
        plans.append(answer(torch.arange(len(received)), receive, last_use))

    for rank, one in enumerate(asked):
        store = torch.full((one.rows,), 99, dtype=torch.int64)
        held = torch.zeros(one.rows, dtype=torch.bool)
        uses = torch.zeros(one.rows, dtype=torch.int64)
        for i in range(count):
            came = []
            for owner, (received, _, _) in enumerate(owned):
                wanted = plans[owner][0]
                came.append(received[wanted.rows[i].split(wanted.counts[i])[rank]])
            store[one.slots(i)] = torch.cat(came)
            held[one.slots(i)] = True
            assert bool(held[one.inverse[i]].all()) and torch.equal(store[one.inverse[i]], keys[rank][i])
            uses.index_add_(0, one.inverse[i], torch.ones_like(one.inverse[i]))
            # What leaves now is used by no later micro-batch, and arrives at the owner as the same keys.
            leaving = one.leaving.rows[i]
            later = torch.cat([*one.inverse[i + 1 :], torch.empty(0, dtype=torch.int64)])
            assert not bool(torch.isin(leaving, later).any())
            for owner, (received, _, _) in enumerate(owned):
                back = plans[owner][1]
                assert back.counts[i][rank] == one.leaving.counts[i][owner]
                rows = back.rows[i].split(back.counts[i])[rank]
                assert torch.equal(received[rows], store[leaving.split(one.leaving.counts[i])[owner]])
        everything = torch.cat(one.leaving.rows)
        assert sorted(everything.tolist()) == list(range(one.rows))
        assert int(uses.sum()) == sum(map(len, keys[rank])) and bool((uses > 0).all())
        if first_use:
            assert one.rows == len(torch.cat(keys[rank]).unique())


def test_the_table_of_the_docstring():
    keys = micro_batches([[1, 2, 3], [2, 3, 4], [1, 4]])
    plain, first = (ask(keys, lambda k: k, 1, True, use) for use in (False, True))
    assert plain.arriving == [[3], [3], [2]] and plain.rows == 8
    assert first.arriving == [[3], [1], [0]] and first.rows == 4
    assert [first.keys[rows].tolist() for rows in first.leaving.rows] == [[], [2, 3], [1, 4]]
    assert first.last_use is not None and first.last_use.tolist() == [2, 1, 1, 2]


@pytest.mark.parametrize("first_use", [False, True])
def test_micro_batches_without_keys_are_legal(first_use):
    asked = ask(micro_batches([[], [7, 7], []]), lambda k: k, 2, True, first_use)
    assert asked.rows == 1 and [len(part) for part in asked.inverse] == [0, 2, 0]
    empty = ask(micro_batches([[], []]), lambda k: k, 2, True, first_use)
    assert empty.rows == 0 and empty.send == [0, 0]
