"""Promise: a handle stands for its row from the lookup to the update, through growth, moves and evictions."""

import pytest
import torch

from tritonrec.embedding import DynamicTable, Eviction, PrecisionTiers, TablePolicy
from tritonrec.embedding.precision import round_low
from tritonrec.embedding.row_storage import RowStorage, TieredStorage

pytestmark = pytest.mark.smoke

POLICIES = {
    "none": TablePolicy(),
    "lru": TablePolicy(Eviction("lru", capacity=9)),
    "ttl": TablePolicy(Eviction("ttl", ttl=1)),
    "tiers": TablePolicy(precision=PrecisionTiers(2, every=2)),
    "all": TablePolicy(Eviction("lru", capacity=9), admission=2, precision=PrecisionTiers(2, every=2)),
}
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


@pytest.mark.parametrize("name", POLICIES)
def test_an_update_after_the_next_lookup_reaches_its_keys_and_no_other(name):
    """The pipeline's order: lookup t+1, then update t. In between rows come, go, move and tables grow."""
    store, expected, pending = table(POLICIES[name]), {}, None
    for step in range(30):
        keys = torch.randint(-12, 12 + 2 * step, (8,), generator=torch.Generator().manual_seed(step)).unique()
        found = store.lookup(keys, step)
        if pending is not None:
            store.update(*pending)
        present, values = found.handles >= 0, rows(len(keys), step)
        expected |= zip(keys[present].tolist(), values[present], strict=True)
        pending = found.handles, values
    store.update(*pending)
    left, values = store.export()
    written = torch.stack([expected[key] for key in left.tolist()])
    demoted = round_low(written, torch.ones(len(written), dtype=torch.bool), DIM, str)
    assert bool(((values == written).all(1) | (values == demoted).all(1)).all())
    if name != "none":
        counters = store.counters
        assert counters.evicted + counters.promoted * counters.demoted > 0


def test_a_row_keeps_its_handle_while_it_moves_between_the_tiers():
    store = table(TablePolicy(precision=PrecisionTiers(200, every=1000)))
    keys = torch.arange(40)
    handles = store.lookup(keys, 0).handles
    for step, seed in enumerate(range(1, 12), 1):
        values = rows(40, seed)[torch.randperm(40)]
        store.update(handles, values)
        assert torch.equal(store.lookup(keys, step).handles, handles)
        assert torch.equal(store.gather(handles, keys), values)
    assert store.counters.promoted > 20 and store.counters.demoted > 20


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


def test_a_handle_outlives_growth():
    store = table()
    keys = torch.arange(6)
    handles = store.lookup(keys, 0).handles
    store.lookup(torch.arange(1000, 3000), 1)
    values = rows(6, 0)
    store.update(handles, values)
    assert torch.equal(store.find(keys), handles) and torch.equal(store.gather(handles, keys), values)


@pytest.mark.parametrize("name", ["none", "tiers"])
@pytest.mark.parametrize("late", [False, True])
def test_the_update_of_a_row_erased_meanwhile_changes_no_other_row(name, late):
    store, keys = table(POLICIES[name]), tensor([-5, 2**63 - 1, 3])
    handles = store.lookup(keys, 0).handles
    more = torch.arange(100, 130)
    for lookup in (late, not late):  # new rows come with the next lookup, and after it or before
        if lookup:
            store.lookup(more + 100, 1)
        else:
            assert store.erase(keys[:2]).tolist() == [True, True]
    store.load(more, rows(30, 1))
    before = store.gather(store.find(more), more), store.gather(store.find(more + 100), more + 100)
    store.update(handles, rows(3, 2))
    assert store.find(keys).tolist() == [-1, -1, int(handles[2])]
    after = store.gather(store.find(more), more), store.gather(store.find(more + 100), more + 100)
    assert all(map(torch.equal, before, after))
    assert torch.equal(store.gather(handles[2:], keys[2:]), rows(3, 2)[2:])


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


def test_a_key_that_is_not_admitted_has_no_handle_and_its_update_is_dropped():
    store, keys = table(TablePolicy(admission=2)), tensor([4, -9])
    store.lookup(keys[:1], 0)
    handles = store.lookup(keys, 1).handles
    assert (handles >= 0).tolist() == [True, False]
    store.lookup(keys[1:], 2)  # admitted now, and starts afresh
    values = rows(2, 0)
    store.update(handles, values)
    kept = store.gather(store.find(keys), keys)
    assert torch.equal(kept, torch.cat([values[:1], store.initial_rows(keys[1:])]))


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
