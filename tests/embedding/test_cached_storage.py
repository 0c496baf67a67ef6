"""Promise: whoever reads cached rows while a lookup moves them gets their values."""

import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "ci" / "emulator")]
from pretended import GPU, pretended, without_kernels  # noqa: E402

from tritonrec.embedding import cached_storage  # noqa: E402
from tritonrec.embedding.cached_storage import CachedStorage  # noqa: E402
from tritonrec.embedding.row_column import RowColumn  # noqa: E402
from tritonrec.embedding.row_storage import RowStorage, TieredStorage  # noqa: E402


def handles(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.fixture
def storage():
    """Rows 0 to 5 with their number as value, of which the first lookup has brought 0 and 1 to the cache."""
    found = CachedStorage(RowStorage(2, 2, 8), 2)
    every = handles(*range(6))
    found.add(every, 6)
    found.update(every, every[:, None].expand(6, 2).float().contiguous())
    found.prefetch(handles(0, 1))
    for _ in range(2):  # now others may take their places
        found.prefetch(handles())
    return found


def test_a_row_that_leaves_the_cache_meanwhile_is_read_whole(storage, monkeypatch):
    read, lookup = storage._home.gather, threading.Thread(target=storage.prefetch, args=(handles(2, 3),))

    def moved_meanwhile(*args):
        """The places are known, and the cache is not read yet."""
        monkeypatch.setattr(storage._home, "gather", read)
        lookup.start()
        lookup.join(0.3)  # it waits for the reader, or has moved the rows
        return read(*args)

    monkeypatch.setattr(storage._home, "gather", moved_meanwhile)
    assert storage.gather(handles(0, 1, 2))[:, 0].tolist() == [0, 1, 2]
    lookup.join()
    assert storage.gather(handles(*range(6)))[:, 0].tolist() == [*range(6)]


def test_a_row_that_the_last_lookup_left_in_host_memory_stays_there_while_it_is_updated(storage):
    storage.prefetch(handles(0))  # whose place is kept in the next lookup, and free in the one after it
    storage.prefetch(handles(2, 3))
    assert (storage._place(handles(2, 3)) >= 0).tolist() == [True, False]
    storage.prefetch(handles(3))  # the update of the lookup before may be writing it now
    assert storage._place(handles(3)).tolist() == [-1]
    storage.prefetch(handles())
    storage.prefetch(handles(3))
    assert storage._place(handles(3)).tolist() != [-1]
    assert storage.gather(handles(*range(6)))[:, 0].tolist() == [*range(6)]


def test_a_row_of_16_bits_that_leaves_the_cache_is_one_of_16_bits_in_host_memory():
    home = TieredStorage(2, 2, 8)
    found = CachedStorage(home, 2)
    found.add(handles(0, 1, 2), 3)
    found.prefetch(handles(0, 1))
    values = torch.tensor([[0.5, 3.0], [0.25, 7.0]])
    found.update(handles(0, 1), values, torch.tensor([True, False]))
    for number in (None, 2, 2, 2, None, None):  # row 2 takes one place, and then the other
        found.prefetch(handles() if number is None else handles(number))
    found.prefetch(handles(2, 1))
    found.prefetch(handles(2, 1))
    assert found._place(handles(0)).tolist() == [-1]
    assert found.in_low_precision(handles(0, 1)).tolist() == [True, False]
    assert home.in_low_precision(handles(0)).tolist() == [True]
    assert torch.equal(found.gather(handles(0, 1)), values)


def test_every_column_is_in_the_memory_of_the_device(monkeypatch):
    devices, home = [], RowStorage(2, 2, 8)

    class Column(RowColumn):
        def __init__(self, *arguments, device=None, **rest):
            devices.append(device)
            super().__init__(*arguments, device=device, **rest)

    monkeypatch.setattr(cached_storage, "RowColumn", Column)
    CachedStorage(home, 2)
    assert devices == [home.device] * 5 and home.device is not None


def test_every_number_is_in_the_memory_of_the_device():
    with pretended() as gpu, without_kernels(gpu):
        made = CachedStorage(RowStorage(2, 2, 8, GPU), 2)
        numbers = [each.device for each in vars(made).values() if isinstance(each, torch.Tensor)]
    assert numbers == [GPU] * 3


def test_a_lookup_that_brings_no_row_leaves_the_cache_as_it_was():
    found = CachedStorage(RowStorage(2, 2, 8), 4)
    every = handles(*range(6))
    found.add(every, 6)
    found.update(every, every[:, None].expand(6, 2).float().contiguous())
    for number in (0, 0, None, None, 1):  # at last 0 may leave, and its place is behind those that are free
        found.prefetch(handles() if number is None else handles(number))
    assert found._handles[handles(0, 1, 2, 3)].tolist() == [1, 2, 0, 0]


def test_without_tiers_no_row_is_marked_for_16_bits():
    found = CachedStorage(RowStorage(2, 2, 8), 2)
    found.add(handles(0, 1), 2)
    found.update(handles(0, 1), torch.ones(2, 2), torch.tensor([True, True]))
    assert found.moved == (0, 0)


def test_a_row_that_is_released_is_free_in_host_memory_too():
    home = TieredStorage(2, 2, 8)
    found = CachedStorage(home, 2)
    for _ in range(9):
        found.add(handles(0, 1), 2)
        found.release(handles(0, 1))
    assert home._pools[0].end == 2


@pytest.mark.parametrize(("lookups", "left"), [((0, 1, 2), [3, 2]), ((0, 1, 0, 2), [1, 3])])
def test_a_row_that_neither_this_lookup_nor_the_last_one_used_may_leave(lookups, left):
    found = CachedStorage(RowStorage(2, 2, 8), 2)
    every = handles(*range(3))
    found.add(every, 3)
    found.update(every, every[:, None].expand(3, 2).float().contiguous())
    for number in lookups:  # the hand is at row 0 then
        found.prefetch(handles(number))
    assert found._handles[handles(0, 1)].tolist() == left
