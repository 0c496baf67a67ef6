"""Promise: a handle stands for its row from the lookup to the update, through growth, moves and evictions."""

import pytest
import torch

from tritonrec.embedding import DynamicTable, PrecisionTiers, TablePolicy
from tritonrec.embedding.row_storage import RowStorage, TieredStorage

pytestmark = pytest.mark.smoke

POLICIES = {"none": TablePolicy(), "tiers": TablePolicy(precision=PrecisionTiers(2, every=2))}
DIM, WIDTH = 3, 5
STORAGES = {"float32": RowStorage, "tiers": TieredStorage}


def table(policy=None):
    return DynamicTable(DIM, WIDTH, seed=7, slots=8, chunk_rows=4, policy=policy)


def tensor(keys):
    return torch.tensor(keys, dtype=torch.int64)


def rows(count, seed):
    """Every other row fits 16 bits, so that rows move between the tiers."""
    values = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    values[::2] = values[::2].round()
    return values


@pytest.mark.parametrize("moment", ["_locate", "_kernel_chunks"])
def test_rows_that_move_during_a_gather_change_no_result(monkeypatch, moment):
    """An update on another thread comes in between the two looks that a gather takes."""
    store = table(TablePolicy(precision=PrecisionTiers(200, every=1000)))
    keys = torch.arange(40)
    handles = store.lookup(keys, 0).handles
    values = torch.randn(40, WIDTH)
    store.update(handles, values)
    look = getattr(TieredStorage, moment)

    def after_an_update(storage, *arguments):
        monkeypatch.setattr(TieredStorage, moment, look)
        store.update(handles[:30], values[:30].round())  # from float32 to 16 bits, in new chunks
        return look(storage, *arguments)

    monkeypatch.setattr(TieredStorage, moment, after_an_update)
    assert torch.equal(store.gather(handles, keys)[30:], values[30:])
    assert store.counters.demoted == 30


def test_the_handle_of_an_erased_row_is_used_again_once_no_lookup_holds_it():
    store = table()
    handles = store.lookup(tensor([1, 2, 3]), 0).handles
    store.erase(tensor([2]))
    taken = [int(store.lookup(tensor([10 + step]), step).handles) for step in range(1, 5)]
    assert taken.index(int(handles[1])) == 2
    store.lookup(tensor([1]), 5)
    store.lookup(tensor([1]), 6)
    store.erase(tensor([11]))  # in neither of the last two lookups: free at once
    assert int(store.lookup(tensor([20]), 7).handles) == taken[0]


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_are_in_low_precision_only_in_tiers(storage):
    store, handles = STORAGES[storage](DIM, WIDTH, chunk_rows=4), torch.arange(3)
    store.add(handles, 3)
    store.update(handles, torch.ones(3, WIDTH), torch.tensor([True, False, True]))
    assert store.in_low_precision(tensor([2, 1, -1])).tolist() == [storage == "tiers", False, False]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("handles", [[0, 5], [-1, 2**40], [-2, 1]])
def test_a_handle_that_was_never_given_is_an_error(storage, handles):
    store = table(POLICIES["tiers" if storage == "tiers" else "none"])
    store.lookup(tensor([1, 2]), 0)
    for call in (
        lambda: store.gather(tensor(handles), tensor([1, 2])),
        lambda: store.update(tensor(handles), rows(2, 0)),
    ):
        with pytest.raises(IndexError):
            call()


@pytest.mark.parametrize("storage", STORAGES)
def test_an_insert_that_finds_no_memory_changes_nothing(monkeypatch, storage):
    store = table(POLICIES["tiers" if storage == "tiers" else "none"])
    store.lookup(tensor([1, 2]), 0)
    before = store.export()

    def fail(self, handles, end):
        raise RuntimeError("cannot allocate")

    with monkeypatch.context() as patch:
        patch.setattr(STORAGES[storage], "add", fail)
        with pytest.raises(RuntimeError, match="cannot allocate"):
            store.load(torch.arange(50), rows(50, 0))
    assert all(map(torch.equal, before, store.export())) and len(store) == 2
    store.load(torch.arange(50), rows(50, 0))
    assert torch.equal(store.export()[1], rows(50, 0))


def test_memory_of_rows_that_change_tiers_is_reserved_whole():
    storage = TieredStorage(2, 2, 8)
    storage.grow(100)
    reserved = storage._locations.nbytes
    storage.add(torch.arange(100), 100)
    assert storage._locations.nbytes == reserved >= 4 * 100


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_are_in_the_memory_of_their_table_whatever_the_default_device_is(storage):
    numbers, values = torch.arange(20), torch.randn(20, 2)
    with torch.device("meta"):
        made = STORAGES[storage](2, 2, 8)
        made.add(numbers, 20)
        made.update(numbers, values)
    assert torch.equal(made.gather(numbers), values)
