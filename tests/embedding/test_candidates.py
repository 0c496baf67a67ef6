"""Candidates for admission are bounded by steps, and forgotten by them."""

from __future__ import annotations

import pytest
import torch

from tritonrec.embedding import DynamicTable, Eviction, FeatureConfig, HashTableCollection, TablePolicy
from tritonrec.embedding.candidates import Candidates

WINDOW = 10
POLICY = TablePolicy(Eviction("lru", capacity=50), admission=3, admission_window=WINDOW)
NEW = 120


def keys_at(step: int) -> torch.Tensor:
    """Distinct keys of a step: many that never come again, and some of a hundred that do."""
    draw = torch.Generator().manual_seed(step)
    once = torch.arange(NEW) * 2**40 + step * NEW
    again = torch.randperm(100, generator=draw)[:20] - 2**63
    return torch.cat([again, once])[torch.randperm(NEW + 20, generator=draw)]


def make(policy: TablePolicy = POLICY) -> DynamicTable:
    return DynamicTable(2, slots=8, chunk_rows=64, policy=policy)


def test_candidates_stay_bounded_however_long_the_run():
    """Far more keys come once than candidates may stay; keys, slots and counts stop growing."""
    table, most, bytes_at = make(), 0, {}
    for step in range(12 * WINDOW):
        table.lookup(keys_at(step), step)
        if (step + 1) % WINDOW == 0:  # before the next forgetting
            most = max(most, len(table.state()["candidates"]["keys"]))
        bytes_at[step] = table.memory()["candidates"]
    assert 5 * most < 12 * WINDOW * NEW
    assert WINDOW * NEW < most <= (2 * WINDOW + 1) * (NEW + 20)
    assert bytes_at[12 * WINDOW - 1] == bytes_at[6 * WINDOW]
    assert table.counters.inserted > 0


def test_a_key_is_forgotten_at_the_first_multiple_more_than_a_window_after_its_last_request():
    for last in range(2 * WINDOW + 1):
        table = make(TablePolicy(admission=2, admission_window=WINDOW))
        table.lookup(torch.tensor([7]), last)
        waits = []
        for step in range(last + 1, last + 3 * WINDOW):
            table.lookup(torch.empty(0, dtype=torch.int64), step)
            waits.append(len(table.state()["candidates"]["keys"]) == 1)
        gone = last + 1 + waits.index(False)
        assert gone % WINDOW == 0 and gone - last > WINDOW >= gone - WINDOW - last
        assert not any(waits[waits.index(False) :])


def test_an_admitted_key_is_no_candidate_any_more():
    table, keys = make(TablePolicy(admission=2, admission_window=WINDOW)), torch.tensor([7, 8])
    table.lookup(keys, 0)
    assert table.state()["candidates"]["keys"].tolist() == [7, 8]
    assert int(table.lookup(keys[:1], 1).handles) >= 0
    assert table.state()["candidates"]["keys"].tolist() == [8]


def test_a_forgotten_key_starts_at_one_again():
    key = torch.tensor([-(2**63)])
    table = make(TablePolicy(admission=3, admission_window=2))
    rows = [int(table.lookup(key, step).handles) for step in (0, 1, 4, 5)]
    assert rows == [-1] * 4
    assert int(table.lookup(key, 6).handles) >= 0


def test_a_window_longer_than_the_run_changes_nothing():
    tables = [make(TablePolicy(admission=2, admission_window=window)) for window in (1000, 2**31 - 1)]
    for table in tables:
        for step in range(3 * WINDOW):
            table.lookup(keys_at(step), step)
    first, second = (table.state() for table in tables)
    assert all(
        torch.equal(first[group][name], second[group][name]) for group in first for name in first[group]
    )


@pytest.mark.parametrize("step", [-1, 2**31])
def test_a_step_out_of_range_is_refused(step):
    with pytest.raises(ValueError, match=rf"step must be in \[0, 2\*\*31\) with admission, got {step}"):
        make(TablePolicy(admission=2)).lookup(torch.tensor([1]), step)


def test_a_state_of_other_tables_is_refused_with_all_that_differs():
    waiting = TablePolicy(admission=2)
    tables = HashTableCollection([FeatureConfig("a", 4, policy=waiting), FeatureConfig("b", 4)])
    state = tables.state()
    del state["a.candidates"]["last"]
    state["b"]["rows"] = torch.zeros(0, 9)
    state["c"] = state["b"]
    with pytest.raises(ValueError) as caught:
        tables.load_state(state)
    assert str(caught.value).partition("tables: ")[2].split("; ")[:-1] == [
        "column 'last' of table 'a.candidates' is not there in the state, torch.int32 ('n',) here",
        "column 'rows' of table 'b' is torch.float32 ('n', 9) in the state, torch.float32 ('n', 12) here",
        "column 'keys' of table 'c' is torch.int64 ('n',) in the state, not there here",
        "column 'rows' of table 'c' is torch.float32 ('n', 9) in the state, not there here",
    ]


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_candidate_is_forgotten_after_the_window_and_not_at_its_end(device):
    candidates = Candidates(3, WINDOW, 8, device)
    candidates.count(torch.tensor([5]), WINDOW)
    candidates.count(torch.tensor([7]), WINDOW - 1)
    candidates.forget(2 * WINDOW)
    assert len(candidates) == 1
    candidates.forget(3 * WINDOW)
    assert len(candidates) == 0


def test_rows_found_new_and_refused_are_counted():
    table = make()
    for step in range(5):
        table.lookup(torch.tensor([1, 2]), step)
    table.lookup(torch.tensor([1, 3]), 5)
    counted = table.counters
    assert (counted.found, counted.inserted, counted.rejected) == (5, 2, 5)


def test_a_key_that_is_a_candidate_again_is_not_among_the_erased_ones():
    found = Candidates(3, 100, 8)
    key, other = torch.tensor([5]), torch.tensor([6])
    for each in key, other:
        found.count(each, 0)
    found.track_changes()
    found.erase(other)
    found.erase(key)
    found.count(key, 1)
    changed, erased = found.take_changes()
    assert changed["keys"].tolist() == [5] and erased.tolist() == [6]
    assert found._index.find(key).tolist() == [0]
