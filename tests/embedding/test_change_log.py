"""Promise: a log has what changed since its start, and nothing from before."""

import pytest
import torch

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
