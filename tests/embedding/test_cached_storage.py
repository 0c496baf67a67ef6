"""Promise: whoever reads cached rows while a lookup moves them gets their values."""

import threading

import pytest
import torch

from tritonrec.embedding import cached_storage
from tritonrec.embedding.cached_storage import CachedStorage
from tritonrec.embedding.row_column import RowColumn
from tritonrec.embedding.row_storage import RowStorage


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


def test_every_column_is_in_the_memory_of_the_device(monkeypatch):
    devices, home = [], RowStorage(2, 2, 8)

    class Column(RowColumn):
        def __init__(self, *arguments, device=None, **rest):
            devices.append(device)
            super().__init__(*arguments, device=device, **rest)

    monkeypatch.setattr(cached_storage, "RowColumn", Column)
    CachedStorage(home, 2)
    assert devices == [home.device] * 5 and home.device is not None
