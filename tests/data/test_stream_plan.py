"""Promise: an epoch has each row once, in an order of the data, the seed and the settings alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data.stream_plan import StreamPlan


def samples(plan, step, readers):
    """Row numbers of a step's samples, read by plain loops over the plan."""
    firsts = np.cumsum(plan.group_rows) - plan.group_rows
    found = []
    for reader in readers:
        epoch, first, last = (each if isinstance(each, int) else each[reader] for each in plan.parts(step))
        for place in range(first, last):
            begin, end = plan.block(reader, place)
            assert begin <= place < end
            stretches = plan.rows(epoch, reader, begin, end)
            numbers = np.concatenate([np.arange(a, b) + firsts[group] for group, a, b in stretches])
            assert len(numbers) == end - begin
            found.append(int(numbers[plan.shuffled(epoch, numbers)][place - begin]))
    return found


PLANS = st.builds(
    StreamPlan,
    st.lists(st.integers(1, 9), min_size=1, max_size=9).map(np.array),
    batch_size=st.integers(1, 13),
    seed=st.integers(-(2**63), 2**63 - 1),
    shuffle=st.booleans(),
    buffer_rows=st.integers(1, 40),
    readers=st.sampled_from([1, 2, 4, 8]),
)


@given(PLANS, st.integers(1, 8))
def test_each_epoch_has_each_row_once_and_ranks_divide_each_batch(plan, world_size):
    world_size = min(world_size, plan.readers)
    for epoch in range(2):
        seen = []
        for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
            whole = samples(plan, step, range(plan.readers))
            ranks = [samples(plan, step, plan.readers_of(rank, world_size)) for rank in range(world_size)]
            assert [number for part in ranks for number in part] == whole
            assert len(whole) == plan.num_samples(step) <= plan.batch_size
            seen += whole
        assert sorted(seen) == list(range(plan.num_rows))


def test_epochs_seeds_and_settings_have_other_orders():
    rows = np.full(40, 7)

    def first(step=0, **changes):
        made = {"seed": 3, "batch_size": 20, "readers": 8, "buffer_rows": 64, **changes}
        plan = StreamPlan(rows, **made)
        return samples(plan, step, range(plan.readers))

    orders = [first(), first(14), first(seed=4), first(readers=4), first(buffer_rows=128)]
    assert len({tuple(order) for order in orders}) == 5
    assert first() == first()
    in_order = first(shuffle=False, readers=1)
    assert in_order == list(range(20))


def test_each_epoch_has_another_order_of_row_groups_and_of_the_rows_of_a_block():
    plan, numbers = StreamPlan(np.full(40, 7), 20, 3, readers=1), np.arange(30)
    groups = [[stretch.group for stretch in plan.rows(epoch, 0, 0, plan.num_rows)] for epoch in (0, 1, 0)]
    assert groups[0] == groups[2] != groups[1] and sorted(groups[0]) == sorted(groups[1]) == list(range(40))
    blocks = [plan.shuffled(epoch, numbers).tolist() for epoch in (0, 1)]
    assert blocks[0] != blocks[1] and sorted(blocks[0]) == sorted(blocks[1]) == list(range(30))


def test_readers_do_not_begin_new_blocks_all_at_once():
    plan = StreamPlan(np.full(40, 7), 20, 3, readers=8, buffer_rows=64)
    assert sorted(plan.block(reader, 0)[1] for reader in range(8)) == list(range(1, 9))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(batch_size=0), "batch_size must be at least 1, got 0"),
        (dict(buffer_rows=0), "buffer_rows must be at least 1, got 0"),
        (dict(readers=6), "readers must be a power of two, got 6"),
    ],
)
def test_bad_numbers_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        StreamPlan(np.array([3]), **{"batch_size": 4, "seed": 0, **changes})
