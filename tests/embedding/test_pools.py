"""Promise: numbers that only a device knows are those of the host, or bounds of them, without a wait."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretended import GPU, pretended

from tritonrec.embedding.device_index import DeviceIndex
from tritonrec.embedding.pools import (
    MAX_ROWS,
    Arriving,
    DeviceNumbers,
    DevicePool,
    IndexPool,
)
from tritonrec.pipeline.places import Common


@given(st.lists(st.tuples(st.booleans(), st.lists(st.booleans(), min_size=1, max_size=9)), max_size=12))
def test_a_devices_pool_gives_the_numbers_of_the_hosts(calls):
    here, there, taken = IndexPool(), DevicePool(torch.device("cpu")), []
    for takes, marks in calls:
        which = torch.tensor(marks)
        count = int(which.sum())
        if takes:
            numbers = here.allocate(count)
            assert there.end_after(count) == here.end
            assert torch.equal(there.next(len(marks))[:count], numbers)
            there.claim(which.sum(), len(marks))
            taken += numbers.tolist()
        else:
            freed = [taken.pop(i % len(taken)) for i, mark in enumerate(marks) if mark and taken]
            padded = torch.full((len(freed) + 3,), -1)
            padded[2 : 2 + len(freed)] = torch.tensor(freed, dtype=torch.int64)
            here.release(torch.tensor(freed, dtype=torch.int64))
            there.release(padded, padded >= 0)
        assert len(there) == len(here) == len(taken)
        assert there.end == here.end


def test_a_devices_pool_refuses_more_numbers_than_there_are():
    pool = DevicePool(torch.device("cpu"))
    pool.claim(torch.tensor(MAX_ROWS - 2), MAX_ROWS - 2)
    assert pool.end_after(2) == MAX_ROWS
    with pytest.raises(MemoryError, match=f"at most {MAX_ROWS} rows .* has {MAX_ROWS - 2}, and up to 3 are"):
        pool.end_after(3)
    pool.release(torch.tensor([7]), torch.tensor([True]))
    assert pool.end_after(3) == MAX_ROWS


def test_a_number_that_is_reset_counts_from_zero():
    numbers = DeviceNumbers(2, torch.device("cpu"))
    numbers.add(torch.tensor([3, 4]), (3, 4))
    numbers.reset(1)
    numbers.add(torch.tensor([1, 1]), (1, 1))
    assert numbers.exact() == [4, 1] and numbers.bound(1) == 1


def test_a_copy_that_has_not_arrived_is_waited_for():
    copy, calls = Arriving(torch.tensor([4])), []
    for there in (False, True):
        copy._event = SimpleNamespace(query=lambda there=there: there, synchronize=lambda: calls.append(1))
        assert copy.take() == [4] and calls == [1]


def test_a_pool_is_filled_to_its_last_number():
    pool = DevicePool(torch.device("cpu"))
    pool.numbers.add(torch.tensor([MAX_ROWS, 2]), (MAX_ROWS, 2))  # numbers so far, free ones
    assert pool.end_after(2) == MAX_ROWS
    with pytest.raises(MemoryError, match=f"it has {MAX_ROWS - 2}, and up to 3 are new"):
        pool.end_after(3)


def test_a_bound_on_a_device_rises_until_a_copy_arrives():
    """A copy takes until the end of its stage."""
    with pretended() as gpu:
        with gpu.stage("first"):
            numbers = DeviceNumbers(2, GPU)
            numbers.add(torch.tensor([1, 2], device=GPU), (3, 4))
            assert [numbers.bound(0), numbers.bound(1)] == [3, 4]
            numbers.add(torch.tensor([1, 0], device=GPU), (2, 1))
            assert [numbers.bound(0), numbers.bound(1)] == [5, 5]
        with gpu.stage("second"):
            numbers.add(torch.tensor([0, 1], device=GPU), (7, 1))
        with gpu.stage("third"):
            assert [numbers.bound(0), numbers.bound(1)] == [2, 3]


def test_numbers_that_are_freed_again_and_again_take_no_more_memory():
    pool = IndexPool()
    for _ in range(9):
        pool.release(pool.allocate(4))
    assert len(pool._free) == 4


def test_rows_that_two_windows_share_are_cut_at_their_number():
    before, now = torch.tensor([5, 2, -1]), torch.tensor([0, 3, -1])
    found = Common(before, now, torch.tensor(2)).trimmed()
    assert (found.before.tolist(), found.now.tolist(), found.count) == ([5, 2], [0, 3], None)


def test_an_erasure_raises_no_bound_but_that_of_erased_slots(monkeypatch):
    index, rises = DeviceIndex(16, torch.device("cpu")), []
    keys = torch.arange(3)
    index.find_or_insert(keys)
    monkeypatch.setattr(index._numbers, "add", lambda change, rise: rises.append(rise))
    index.erase(keys)
    assert rises == [(0, 0, 0, 3)]


def test_a_copy_on_its_way_goes_to_page_locked_memory(monkeypatch):
    pinned, empty = [], torch.empty

    def made(*shape, pin_memory=False, **rest):
        pinned.append(pin_memory)
        return empty(*shape, **rest)

    with pretended() as gpu:
        values = torch.tensor([4, 5], device=GPU)
        with gpu.stage("copy"), monkeypatch.context() as noting:
            noting.setattr(torch, "empty", made)
            copy = Arriving(values)
        assert not [stage for stage, _ in gpu.waits if stage == "copy"] and copy.take() == [4, 5]
    assert pinned == [True]
