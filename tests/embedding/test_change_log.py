"""Promise: a log has what changed since its start, and nothing from before."""

import pytest
import torch

from tritonrec.embedding import DynamicTable
from tritonrec.embedding.change_log import ChangeLog


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def test_erased_keys_are_ascending_and_distinct():
    log = ChangeLog()
    log.erase(ids(1))  # before the start
    log.start(4)
    log.erase(ids(9, -5, 2))
    log.erase(ids(2, 7, 0), torch.tensor(2))  # the first two of them
    assert log.erased().tolist() == [-5, 2, 7, 9]


def test_a_start_forgets_what_was_logged():
    log = ChangeLog()
    assert not log.active
    with pytest.raises(ValueError, match="call track_changes"):
        log.changed(ids(0))
    log.start(4)
    log.mark(ids(3, -1, 1))
    log.erase(ids(8))
    assert log.active and log.changed(ids(0, 1, 3, -1)).tolist() == [False, True, True, False]
    log.start(6)
    assert log.changed(ids(*range(6))).tolist() == [False] * 6 and log.erased().tolist() == []


def test_a_mark_stays_where_the_log_grows():
    log = ChangeLog()
    log.start(2)
    log.mark(ids(1))
    log.add(ids(), 50)
    log.mark(ids(49))
    assert log.changed(ids(*range(50))).nonzero().flatten().tolist() == [1, 49]


def test_each_reader_takes_every_change_once():
    table = DynamicTable(2, slots=8)
    table.track_changes("checkpoint")
    table.track_changes("deltas")
    table.load(ids(1, 2, 3), torch.randn(3, 2, dtype=torch.float32))
    assert taken(table, "deltas") == ([1, 2, 3], [])
    table.load(ids(2, 4), torch.randn(2, 2, dtype=torch.float32))
    table.erase(ids(3))
    assert taken(table, "checkpoint") == ([1, 2, 4], [3])
    assert taken(table, "checkpoint") == ([], [])
    table.load(ids(3), torch.randn(1, 2, dtype=torch.float32))
    assert taken(table, "deltas") == ([2, 3, 4], [])
    table.erase(ids(1))
    table.track_changes("checkpoint")  # which forgets for itself alone
    assert taken(table, "checkpoint") == ([], [])
    assert taken(table, "deltas") == ([], [1])


def test_readers_of_a_table_that_adopts_rows_take_what_they_had_not():
    table = DynamicTable(2, slots=8)
    table.load(ids(1, 2), torch.randn(2, 2, dtype=torch.float32))
    for reader in ("checkpoint", "deltas"):
        table.track_changes(reader)
    table.erase(ids(1))
    assert taken(table, "checkpoint") == ([], [1])
    other = table.successor()
    other.load(ids(5), torch.randn(1, 2, dtype=torch.float32))
    table.adopt(other)
    assert taken(table, "checkpoint") == ([5], [2])
    assert taken(table, "deltas") == ([5], [1, 2])


def taken(table, reader):
    state, erased = table.take_changes(reader)
    return state["rows"]["keys"].tolist(), erased["rows"].tolist()
