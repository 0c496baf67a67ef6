"""Promise: whoever reads cached rows while a lookup moves them gets their values."""

import random
import threading

import pytest
import torch
from pretended import GPU, pretended, without_kernels

from tritonrec.embedding import (
    DynamicTable,
    Eviction,
    FeatureConfig,
    HashTableCollection,
    Placement,
    RowOptimizer,
    TablePolicy,
    cached_storage,
    row_storage,
)
from tritonrec.embedding.cached_storage import CachedStorage, HostCachedStorage, HostStorage
from tritonrec.embedding.row_storage import RowStorage, TieredStorage
from tritonrec.embedding.shared_state import RowColumn

CACHES = {
    "ring": lambda rows, width=2: CachedStorage(RowStorage(2, width, 4), rows),
    "clock": lambda rows, width=2: HostCachedStorage(
        HostStorage(RowStorage(2, width, 4), torch.device("cpu")), rows
    ),
}


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


def test_the_cache_takes_the_memory_of_its_rows_alone():
    home = RowStorage(2, 2, 8)
    found = CachedStorage(home, 1000).memory()["fp32_values"] - home.memory()["fp32_values"]
    assert found == 1000 * 2 * 4


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

    for module in (cached_storage, row_storage):
        monkeypatch.setattr(module, "RowColumn", Column)
    CachedStorage(home, 2)
    assert devices == [home.device] * 4 and home.device is not None


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
    table = DynamicTable(2, placement=Placement("cached"))
    table.update(table.lookup(handles(0, 1), 0).handles, torch.ones(2, 2), torch.tensor([True, True]))
    assert (table.counters.promoted, table.counters.demoted) == (0, 0)


def test_a_row_that_is_released_is_free_in_host_memory_too():
    home = TieredStorage(2, 2, 8)
    found = CachedStorage(home, 2)
    for _ in range(9):
        found.add(handles(0, 1), 2)
        found.release(handles(0, 1))
    assert home._pools[0].end == 2


def test_rows_in_16_bits_lie_in_the_places_of_rows_in_float32(monkeypatch):
    home = TieredStorage(2, 3, 4)
    every, draw = handles(*range(40)), torch.Generator().manual_seed(4)
    home.add(every, 40)
    values = torch.randint(-99, 99, (40, 3), generator=draw).float()
    for step in range(60):
        low = torch.rand(40, generator=draw) < step / 60
        home.update(every, values, low)
        assert torch.equal(home.gather(every), values) and torch.equal(home.in_low_precision(every), low)
    halved, rows = home.memory()["fp16_values"], 40 * 12
    assert halved % 12 == 0 and home.memory()["saved_by_fp16"] == 6 * int(low.sum())
    assert home.memory()["fp32_values"] + halved == home._full.nbytes <= 2 * rows
    assert home._pools[0].end <= 40 + 20  # these came before any place was free
    home.update(every, values, torch.ones(40, dtype=torch.bool))
    monkeypatch.setattr(row_storage, "MAX_ROWS", 2 * home._pools[0].end - 1)
    home.update(every, values, torch.zeros(40, dtype=torch.bool))
    home.update(every, values, torch.ones(40, dtype=torch.bool))  # finds halves that are free
    fresh = TieredStorage(2, 3, 4)
    fresh.add(every, 40)
    with pytest.raises(MemoryError, match=r"in 16 bits has room for \d+ in float32 on one rank: use more"):
        fresh.update(every, values, torch.ones(40, dtype=torch.bool))


@pytest.mark.parametrize(("lookups", "left"), [((0, 1, 2), [3, 2]), ((0, 1, 0, 2), [1, 3])])
def test_a_row_that_neither_this_lookup_nor_the_last_one_used_may_leave(lookups, left):
    found = CachedStorage(RowStorage(2, 2, 8), 2)
    every = handles(*range(3))
    found.add(every, 3)
    found.update(every, every[:, None].expand(3, 2).float().contiguous())
    for number in lookups:  # the hand is at row 0 then
        found.prefetch(handles(number))
    assert found._handles[handles(0, 1)].tolist() == left


@pytest.mark.parametrize("kind", CACHES)
def test_a_row_that_is_updated_at_home_does_not_enter_the_cache_meanwhile(kind):
    found = CACHES[kind](2)
    every = handles(*range(3))
    found.add(every, 3)
    found.update(every, torch.zeros(3, 2))
    found.prefetch(handles(0))
    found.prefetch(handles(1, 2))  # of the last lookup one or both stay at home
    left, update = int((found._place(every) < 0).nonzero()[-1]), found._home.update

    def looked_up_meanwhile(*values):
        """The update knows that the row is not cached, and has not written it."""
        found._home.update = update
        found.prefetch(handles(left))
        update(*values)

    found._home.update = looked_up_meanwhile
    found.update(handles(1, 2), torch.ones(2, 2))
    assert left > 0 and found.gather(every)[:, 0].tolist() == [0, 1, 1]
    found.prefetch(handles())  # a lookup without it
    found.prefetch(handles(left))
    assert int(found._place(handles(left))) >= 0


@pytest.mark.parametrize("kind", [*CACHES, "tiers"])
@pytest.mark.parametrize("cache_rows", [1, 3, 9])
def test_any_order_of_lookups_updates_and_erasures_keeps_every_row(kind, cache_rows):
    """As in the pipeline, batch t + 1 is looked up before batch t is updated; then rows are erased."""
    draw = random.Random(cache_rows)
    tiers = kind == "tiers"
    found = CachedStorage(TieredStorage(2, 3, 4), cache_rows, True) if tiers else CACHES[kind](cache_rows, 3)
    rows, low = {}, {}
    buffers = [[], []]  # handles of the last two lookups

    def write(batch):
        values = torch.tensor([[draw.randrange(100) for _ in range(3)] for _ in batch]).view(-1, 3).float()
        flags = torch.tensor([draw.random() < 0.4 for _ in batch], dtype=torch.bool)
        found.update(handles(*batch), values, flags)
        rows.update(zip(batch, values.tolist(), strict=True))
        low.update(zip(batch, (flags & tiers).tolist(), strict=True))

    for _ in range(120):
        free = [number for number in range(14) if number not in rows]
        new = draw.sample(free, min(len(free), draw.randrange(3)))
        found.add(handles(*new), 14)
        write(new)
        batch = draw.sample(sorted(rows), draw.randrange(min(len(rows), 6) + 1))
        found.prefetch(handles(*batch))
        buffers = [buffers[1], batch]
        write([number for number in buffers[0] if number in rows])
        every = sorted(rows)
        assert found.gather(handles(*every, -1))[:-1].tolist() == [rows[number] for number in every]
        marked, left = found.in_low_precision(handles(*every)), found._place(handles(*every)) < 0
        assert marked.tolist() == [low[number] for number in every]  # and so is what went home
        assert not tiers or torch.equal(found._home.in_low_precision(handles(*every))[left], marked[left])
        idle = [number for number in every if number not in buffers[0] + buffers[1]]
        gone = draw.sample(idle, draw.randrange(len(idle) // 2 + 1))
        found.release(handles(*gone))
        for number in gone:
            del rows[number], low[number]
    assert found.found > 0


ROW_OF_FOUR = 4 * 4 + 48
"""Bytes of four values under SGD, which has no state, with keys and metadata."""


@pytest.mark.parametrize(
    "free, storages",
    [
        (0, ["cached"] * 3),
        (2 * 100 * ROW_OF_FOUR - 2, ["cached", "device", "cached"]),
        (2 * 100 * ROW_OF_FOUR, ["device", "cached", "cached"]),
        (2 * 150 * ROW_OF_FOUR, ["device", "device", "cached"]),
    ],
)
def test_tables_that_an_eviction_bounds_are_on_a_gpu_while_half_of_its_memory_holds_them(
    monkeypatch, free, storages
):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (free, 1 << 40))
    bounds = [TablePolicy(eviction=Eviction("lru", capacity=rows)) for rows in (100, 50)]
    features = [
        FeatureConfig(name, 4, policy=each, merge=False)
        for name, each in zip("abc", [*bounds, TablePolicy()], strict=True)
    ]
    with pretended() as gpu, without_kernels(gpu):
        found = {}
        sized = Placement(device="cuda", cache_rows=64)
        for placement in (Placement(device="cuda"), Placement("cached", device="cuda"), sized, None):
            made = HashTableCollection(features, RowOptimizer("sgd"), chunk_rows=8, placement=placement)
            found[placement] = [group.table.placement.chosen().storage for group in made.groups]
    assert list(found.values()) == [storages, ["cached"] * 3, ["cached"] * 3, ["host"] * 3]


def test_merged_tables_are_on_a_gpu_together(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (4 * 30 * ROW_OF_FOUR, 0))
    features = [
        FeatureConfig(name, 4, policy=TablePolicy(eviction=Eviction("lru", capacity=rows)))
        for rows, names in ((30, "ab"), (31, "cd"))
        for name in names
    ]
    with pretended() as gpu, without_kernels(gpu):
        made = HashTableCollection(
            features, RowOptimizer("sgd"), chunk_rows=8, placement=Placement(device="cuda")
        )
        said = {str(group.layout): str(group.table.placement) for group in made.groups}
    assert said["table a, b"] == "keys and rows on cuda, looked up there"
    assert said["table c, d"].startswith("keys on cuda, looked up there; rows in host memory")
