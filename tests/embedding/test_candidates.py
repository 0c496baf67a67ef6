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


def test_candidates_stay_bounded_however_long_the_run():
    """Far more keys come once than candidates may stay; keys, slots and counts stop growing."""
    table = DynamicTable(2, slots=8, chunk_rows=64, policy=POLICY)
    most, bytes_at = 0, {}
    for step in range(12 * WINDOW):
        table.lookup(keys_at(step), step)
        if (step + 1) % WINDOW == 0:  # before the next forgetting
            most = max(most, len(table.state()["candidates"]["keys"]))
        bytes_at[step] = table.memory()["candidates"]
    assert 5 * most < 12 * WINDOW * NEW
    assert WINDOW * NEW < most <= (2 * WINDOW + 1) * (NEW + 20)
    assert bytes_at[12 * WINDOW - 1] == bytes_at[6 * WINDOW]
    assert table.counters.inserted > 0


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_key_is_forgotten_more_than_a_window_after_its_last_lookup(device):
    candidates = Candidates(5, WINDOW, 8, device)
    for key, step in ((7, WINDOW - 1), (8, WINDOW), (9, WINDOW + 1)):
        candidates.count(torch.tensor([key]), step, None if device is None else torch.tensor(1))
    candidates.forget(2 * WINDOW - 1)
    assert candidates.state()["keys"].tolist() == [7, 8, 9]
    candidates.forget(2 * WINDOW)
    assert candidates.state()["keys"].tolist() == [8, 9]


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
