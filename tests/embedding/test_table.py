"""Promise: no row is lost, moved or shared, and initial values depend on nothing but the key."""

import math

import pytest
import torch

from tritonrec.embedding import (
    DynamicTable,
    Eviction,
    KeyLayout,
    Placement,
    PrecisionTiers,
    TablePolicy,
    stored_table,
)
from tritonrec.embedding.precision import AccessCounter
from tritonrec.embedding.shared_state import RowColumn
from tritonrec.kernels.deferred import first_bad

pytestmark = pytest.mark.smoke

HALF = TablePolicy(precision=PrecisionTiers(threshold=3, every=1000))


def table(**options):
    return DynamicTable(3, 5, **{"seed": 7, "scale": 0.5, "slots": 8, "chunk_rows": 4, **options})


def tensor(keys):
    return torch.tensor(keys, dtype=torch.int64)


@pytest.mark.parametrize("chunk_rows", [1, 3, 4, 64])
@pytest.mark.parametrize("policy", [None, HALF])
def test_updated_rows_are_read_back_across_chunks(chunk_rows, policy):
    store = table(chunk_rows=chunk_rows, policy=policy)
    keys = torch.randperm(100) - 50
    rows = store.lookup(keys, 0).handles
    values = torch.randn(100, 5)
    store.update(store.find(keys), values)
    order = torch.randint(100, (300,))
    assert torch.equal(store.gather(store.find(keys)[order], keys[order]), values[order])
    assert sorted(rows.tolist()) == list(range(100))


@pytest.mark.parametrize("policy", [None, HALF])
def test_the_next_chunk_is_allocated_ahead(policy):
    store = table(policy=policy)
    assert store.memory()["fp32_values"] == 2 * 4 * 5 * 4
    store.lookup(torch.arange(4), 0)
    assert store.memory()["fp32_values"] == 2 * 4 * 5 * 4
    store.lookup(torch.arange(5), 1)
    assert store.memory()["fp32_values"] == 3 * 4 * 5 * 4


def test_memory_for_rows_is_reserved_before_they_come():
    store = table()
    store._rows.grow(21)
    before = store.memory()["fp32_values"]
    assert before >= 21 * 5 * 4
    store.lookup(torch.arange(17), 0)
    assert store.memory()["fp32_values"] == before


@pytest.mark.parametrize("policy", [None, HALF])
def test_new_rows_take_the_memory_of_erased_ones(policy):
    store, taken = table(policy=policy), []
    for step in range(10):
        keys = torch.arange(8) + 8 * step
        store.update(store.lookup(keys, step).handles, torch.ones(8, 5))
        taken.append((store.memory()["fp32_values"], store.memory()["fp16_values"]))
        store.erase(keys)
    assert taken[3:] == taken[3:4] * 7
    assert store.memory()["saved_by_fp16"] == 0


def test_access_counts_that_were_halved_are_among_the_changes():
    store = table(policy=TablePolicy(precision=PrecisionTiers(threshold=1, every=4)))
    store.track_changes()
    for step, keys in enumerate([[3, 5], [3, 5], [3]], 1):
        store.lookup(tensor(keys), step)
    store.take_changes()
    store.lookup(tensor([7]), 4)
    rows = store.take_changes()[0]["rows"]
    assert rows["keys"].tolist() == [3, 5, 7] and rows["heat"].tolist() == [1, 1, 1]


def test_access_counts_stop_at_255():
    store = table(policy=TablePolicy(precision=PrecisionTiers(threshold=255, every=10**6)))
    low = [bool(store.lookup(tensor([-1]), step).low_precision) for step in range(1, 301)]
    assert low == [True] * 254 + [False] * 46


@pytest.mark.every_case
@pytest.mark.parametrize("storage", ["host", "device", "cached", "disk"])
def test_by_a_size_the_rows_of_fewest_uses_are_in_16_bits_until_they_are_used(storage, tmp_path):
    """Of six rows of 68 bytes, or 58 in 16 bits, four of each kind are the size."""
    placement = Placement(storage, cache_rows=4, path=str(tmp_path) if storage == "disk" else "")
    policy = TablePolicy(precision=PrecisionTiers(str(4 * 68 + 2 * 58), every=8))
    store, every = table(policy=policy, placement=placement), tensor([3, 5, 7, 9, 11, 13])
    used = [[3, 5, 7, 9, 11, 13], [3, 5, 7, 9, 11], [3, 5, 7, 11], [3, 5, 7, 11], [], [], [], [], [13], []]
    for step, keys in enumerate(used, 1):
        found = store.lookup(tensor(keys), step)
        store.update(found.handles, torch.rand(len(keys), 5) + 0.1, found.low_precision)
        low = every[store._rows.in_low_precision(store.find(every))].tolist()
        assert low == ([] if step < 8 else [9, 13] if step == 8 else [9]), step
    rows = store.gather(store.find(every), every)
    assert torch.equal(rows[3, :3], rows[3, :3].half().float()) and store.counters.demoted == 2


@pytest.mark.parametrize("storage", ["host", "cached", "disk", "cached before a disk"])
def test_a_second_moment_too_small_for_float16_survives_in_16_bits(storage, tmp_path):
    kind, path = storage.partition(" ")[0], str(tmp_path) if "disk" in storage else ""
    store = table(policy=HALF, placement=Placement(kind, cache_rows=8, path=path))
    keys = tensor([3])
    found = store.lookup(keys, 0)
    values = torch.tensor([[0.5, 0.25, -2.0, 1e-12, 3e38]])
    store.round_low_precision(values, found.low_precision)
    assert bool((values[0, 3:] > torch.tensor([0.99e-12, 2.9e38])).all())
    store.update(store.find(keys), values)
    assert torch.equal(store.gather(store.find(keys), keys), values)
    assert bool(store._rows.in_low_precision(store.find(keys))) and store.counters.demoted == 1
    assert store.memory()["saved_by_fp16"] == (2 * 5 if storage == "host" else 0)


@pytest.mark.parametrize("scale", [-0.1, math.nan])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(ValueError, match=r"scale must lie in \[0, inf\), got"):
        DynamicTable(3, scale=(0.1, scale), layout=KeyLayout(("action", "item")))


def test_a_weight_that_does_not_fit_is_named():
    store = table(policy=HALF, layout=KeyLayout(("action", "item")))
    values = torch.zeros(3, 5)
    values[2, 1] = -70000.0
    values[0, 0], values[0, 3], values[1, 1] = math.nan, -math.inf, math.inf  # as 16 bits hold them
    store.round_low_precision(values.clone(), tensor([1, 1, 0]).bool())
    with pytest.raises(ValueError, match=r"action, item: row 2 .* -70000.0 in its column 1 does not fit"):
        store.round_low_precision(values, tensor([1, 1, 1]).bool())


def test_a_row_that_cannot_be_demoted_is_named():
    layout = KeyLayout(("action", "item"))
    store = table(policy=TablePolicy(precision=PrecisionTiers(threshold=2, every=4)), layout=layout)
    keys = layout.pack(1, tensor([8, 9]), "item")
    for step in range(1, 3):
        store.lookup(keys, step)
    store.update(store.find(keys), torch.tensor([[1.0] * 5, [1.0, 1e6, 1.0, 1.0, 1.0]]))
    store.lookup(keys[:0], 3)
    with pytest.raises(ValueError, match=r"id 9 of table item is due .* 1000000.0 in its column 1"):
        store.lookup(keys[:0], 4)


def test_metadata_takes_25_bytes_per_key():
    """12 bytes a slot are 16 a key at load factor 0.75; score and location take 4 each, a count 1; and a byte
    is there for marks of an eviction pass."""
    policy = TablePolicy(Eviction("lru", capacity=10**6), precision=PrecisionTiers(2, 8))
    store = DynamicTable(2, slots=1024, chunk_rows=256, policy=policy)
    store.lookup(torch.randperm(768), 0)
    assert (store.memory()["key_structure"], store.memory()["metadata"]) == (16 * 768, 9 * (768 + 1) + 1)


@pytest.mark.parametrize(
    ("policy", "last", "steps"),
    [
        (TablePolicy(Eviction("lru", capacity=5)), 5, (4, 5, -1, 2**31)),
        (TablePolicy(admission=2), 2**31 - 1, (2**31, -1)),
    ],
)
def test_steps_of_a_policy_ascend_and_have_31_bits(policy, last, steps):
    store = table(policy=policy)
    store.lookup(tensor([1]), last)
    for step in steps:
        with pytest.raises(ValueError, match=rf"ascending|in \[0, 2\*\*31\) with admission, got {step}"):
            store.lookup(tensor([1]), step)


WRONG = {
    "fifo": lambda: Eviction("fifo", capacity=1), "no capacity": lambda: Eviction("lru"),
    "capacity 0": lambda: Eviction("lru", capacity=0), "two": lambda: Eviction("lfu", capacity=5, ttl=5),
    "ttl with capacity": lambda: Eviction("ttl", capacity=5), "ttl 0": lambda: Eviction("ttl", ttl=0),
    "every 0": lambda: Eviction("ttl", ttl=1, every=0), "threshold 0": lambda: PrecisionTiers(0, 1),
    "threshold 256": lambda: PrecisionTiers(256, 1), "tiers every 0": lambda: PrecisionTiers(2, 0),
    "admission 0": lambda: TablePolicy(admission=0), "dim 4 of 3": lambda: DynamicTable(4, 3),
    "window 0": lambda: TablePolicy(admission=2, admission_window=0),
    "window 2**31": lambda: TablePolicy(admission=2, admission_window=2**31),
    "chunks of 0": lambda: DynamicTable(4, chunk_rows=0), "0 slots": lambda: DynamicTable(2, slots=0),
    "4 slots": lambda: DynamicTable(2, slots=4), "12 slots": lambda: DynamicTable(2, slots=12),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="power of two" if "slots" in wrong else ""):
        WRONG[wrong]()


def test_take_changes_needs_track_changes():
    with pytest.raises(ValueError, match="track_changes"):
        table().take_changes()


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match="another optimizer or dimension"):
        table().load(torch.arange(2), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="float64"):
        table().update(torch.arange(2), torch.zeros(2, 5, dtype=torch.float64))


def test_a_state_of_another_policy_is_refused():
    state = table(policy=TablePolicy(Eviction("lru", capacity=5))).state()
    with pytest.raises(ValueError, match=r"'score'.*another policy"):
        table().load_state(state)
    with pytest.raises(ValueError, match=r"'heat'.*another policy"):
        table(policy=HALF).load_state(state)
    with pytest.raises(ValueError, match=r"candidates.*another policy"):
        table(policy=TablePolicy(admission=2)).load_state(table().state())


@pytest.mark.parametrize("keys", [[3, 3], [7, -2, 5, -2], [1, 2, 2]])
@pytest.mark.parametrize("group", ["rows", "candidates"])
def test_a_key_given_twice_is_refused_and_nothing_is_loaded(group, keys):
    made = table(policy=TablePolicy(Eviction("lru", capacity=5), admission=2, precision=PrecisionTiers(2, 2)))
    state = made.empty_state()
    state[group] = {name: each.new_zeros(len(keys), *each.shape[1:]) for name, each in state[group].items()}
    state[group]["keys"] = torch.tensor(keys)
    twice = next(key for key in keys if keys.count(key) == 2)
    with pytest.raises(ValueError, match=f"key {twice} is given twice in the state of table '{group}'"):
        made.load_state(state)
    with pytest.raises(ValueError, match=f"key {twice} is given twice in the rows to load"):
        made.load(torch.tensor(keys), torch.zeros(len(keys), made.row_width))
    assert all(len(each["keys"]) == 0 for each in made.state().values())


def test_columns_of_other_lengths_are_refused_and_nothing_is_loaded():
    made = table()
    state = made.empty_state()
    state["rows"] = {name: each.new_zeros(3, *each.shape[1:]) for name, each in state["rows"].items()}
    state["rows"]["keys"] = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"table 'rows' have different numbers of rows: \{'keys': 2, "):
        made.load_state(state)
    assert len(made) == 0


@pytest.mark.parametrize("here", [True, False])
def test_a_row_of_any_handle_that_has_changed_is_found(here, monkeypatch):
    monkeypatch.setattr(stored_table, "on_host", lambda tensor: here)
    sums, handles, rows = stored_table.RowChecksums(torch.device("cpu")), torch.arange(4), torch.randn(4, 3)
    sums.write(handles, rows, 4)
    none = torch.empty(0, dtype=torch.int64)
    for changed in range(4):
        now = rows.clone()
        now[changed, 2] += 1
        for skipped, there in ((none, True), (torch.tensor([changed, -1]), False)):
            found = sums.first_changed(handles, now, skipped)
            found = (found if here else int(first_bad(found))) - 1
            assert found == (changed if there else -1), (changed, skipped)


def test_only_rows_that_were_used_count_as_used():
    counter = AccessCounter(PrecisionTiers(2, 1))
    counter.values.grow(4)
    assert set(counter.used().tolist()) == {-1}
    counter.record(torch.tensor([9]), torch.tensor([3]), 0)
    assert sorted(counter.used().tolist())[-2:] == [-1, 3]


def test_a_column_begins_with_the_value_of_no_row_alone():
    assert RowColumn(torch.int32).nbytes == 4


def test_a_lookup_brings_rows_to_the_cache():
    found = DynamicTable(2, placement=Placement("cached", cache_rows=4))
    for _ in range(2):
        found.lookup(torch.tensor([1, 2, 3]), 0)
    assert found.counters.cached == 3
