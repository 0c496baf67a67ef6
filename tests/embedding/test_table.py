"""Promise: no row is lost, moved or shared, and initial values depend on nothing but the key."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tritonrec import ops
from tritonrec.embedding import DynamicTable, Eviction, Heat, KeyLayout, TablePolicy

EXTREMES = [-(2**63), -(2**63) + 1, -2, -1, 0, 1, 2**63 - 2, 2**63 - 1]
keys_strategy = st.lists(
    st.one_of(st.sampled_from(EXTREMES), st.integers(-(2**63), 2**63 - 1), st.integers(-20, 20)),
    unique=True,
    max_size=12,
)
HALF = TablePolicy(heat=Heat(threshold=3, every=1000))


def table(**options):
    return DynamicTable(3, 5, **{"seed": 7, "scale": 0.5, "slots": 8, "chunk_rows": 4, **options})


def tensor(keys):
    return torch.tensor(keys, dtype=torch.int64)


class TableAgainstDict(RuleBasedStateMachine):
    """The table and a dict see the same operations."""

    def __init__(self):
        super().__init__()
        self.table, self.model = table(), {}
        self.version = 0.0

    @rule(keys=keys_strategy)
    def add(self, keys):
        rows = self.table.lookup(tensor(keys), 0).rows
        assert len(set(rows.tolist())) == len(keys)
        initial = ops.initial_rows(7, 0, tensor(keys), 3, 0.5, impl="reference")
        for key, values in zip(keys, initial.tolist(), strict=True):
            self.model.setdefault(key, [*values, 0.0, 0.0])
        assert self.table.read(rows, tensor(keys)).tolist() == [self.model[key] for key in keys]

    @rule(keys=keys_strategy)
    def write(self, keys):
        """Keys that are not in the table are skipped."""
        self.version += 1
        values = torch.arange(len(keys) * 5, dtype=torch.float32).reshape(-1, 5) + 100 * self.version
        self.table.write(tensor(keys), values)
        for key, row in zip(keys, values.tolist(), strict=True):
            if key in self.model:
                self.model[key] = row

    @rule(keys=keys_strategy)
    def erase(self, keys):
        gone = self.table.erase(tensor(keys)).tolist()
        assert gone == [self.model.pop(key, None) is not None for key in keys]

    @rule(keys=keys_strategy)
    def find(self, keys):
        rows = self.table.find(tensor(keys))
        assert [row >= 0 for row in rows.tolist()] == [key in self.model for key in keys]

    @invariant()
    def same_content(self):
        keys, rows = self.table.export()
        assert keys.tolist() == sorted(self.model)
        assert rows.tolist() == [self.model[key] for key in sorted(self.model)]
        assert self.table.load_factor <= 0.75


TestTableAgainstDict = TableAgainstDict.TestCase
TestTableAgainstDict.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@settings(max_examples=20, deadline=None)
@given(keys_strategy, st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_change_rows(keys, random):
    first, second = table(), table()
    first.lookup(tensor(keys), 0)
    for key in random.sample(keys, len(keys)):
        second.lookup(tensor([key]), 0)
    for a, b in zip(first.export(), second.export(), strict=True):
        assert torch.equal(a, b)


def test_growth_keeps_row_numbers():
    grown = table()
    early = torch.arange(6)
    rows = grown.lookup(early, 0).rows
    grown.lookup(torch.arange(1000, 3000), 1)
    assert torch.equal(grown.find(early), rows)
    assert len(grown) == 2006


@pytest.mark.parametrize("chunk_rows", [1, 3, 4, 64])
@pytest.mark.parametrize("policy", [None, HALF])
def test_rows_come_home_across_chunks(chunk_rows, policy):
    store = table(chunk_rows=chunk_rows, policy=policy)
    keys = torch.randperm(100) - 50
    rows = store.lookup(keys, 0).rows
    values = torch.randn(100, 5)
    store.write(keys, values)
    order = torch.randint(100, (300,))
    assert torch.equal(store.read(store.find(keys)[order], keys[order]), values[order])
    assert sorted(rows.tolist()) == list(range(100))


@pytest.mark.parametrize("policy", [None, HALF])
def test_the_next_chunk_is_there_before_it_is_needed(policy):
    store = table(policy=policy)
    assert store.memory()["fp32_values"] == 2 * 4 * 5 * 4
    assert store.memory()["fp16_values"] == (0 if policy is None else 2 * 4 * 5 * 2)
    store.lookup(torch.arange(4), 0)
    assert store.memory()["fp32_values"] == 2 * 4 * 5 * 4
    store.lookup(torch.arange(5), 1)
    assert store.memory()["fp32_values"] == 3 * 4 * 5 * 4


def test_another_table_name_gives_other_initial_values():
    keys = torch.arange(4)
    a, b = (table(layout=KeyLayout((name,))) for name in ("item", "user"))
    assert not torch.equal(a.read(a.lookup(keys, 0).rows, keys), b.read(b.lookup(keys, 0).rows, keys))


def test_export_and_load_round_trip():
    source, target = table(), table()
    source.lookup(tensor(EXTREMES), 0)
    source.write(tensor(EXTREMES), torch.randn(len(EXTREMES), 5))
    target.load(*source.export())
    for a, b in zip(source.export(), target.export(), strict=True):
        assert torch.equal(a, b)


def test_loaded_rows_are_not_evicted_as_if_they_were_old():
    store = table(policy=TablePolicy(Eviction("ttl", ttl=2)))
    store.load(torch.arange(4), torch.randn(4, 5))
    for step in range(1000, 1003):
        store.lookup(tensor([9]), step)
        assert len(store) == 5
    store.lookup(tensor([9]), 1003)
    assert store.export()[0].tolist() == [9]


def test_cold_rows_take_half_the_bytes_and_hot_ones_keep_every_bit():
    store = table(policy=HALF)
    keys = tensor([-1, 5, 2**63 - 1])
    for step in range(4):
        asked = keys if step == 0 else keys[:1]
        found = store.lookup(asked, step)
        values = store.read(found.rows, asked) + torch.rand(len(asked), 5) / 3
        store.round_cold(values, found.cold)
        store.write(asked, values)
        assert found.cold.tolist() == [step < 2] * len(asked)
        assert torch.equal(store.read(store.find(asked), asked), values)
    assert store.memory()["saved_by_fp16"] == 2 * 5 * 2
    assert (store.counters.promoted, store.counters.demoted) == (1, 3)
    assert not torch.equal(values[0].half().float(), values[0])


def test_heat_stops_at_255():
    store = table(policy=TablePolicy(heat=Heat(threshold=255, every=10**6)))
    cold = [bool(store.lookup(tensor([-1]), step).cold) for step in range(1, 301)]
    assert cold == [True] * 254 + [False] * 46


def test_a_second_moment_too_small_for_float16_survives_in_a_cold_row():
    store = table(policy=HALF)
    keys = tensor([3])
    found = store.lookup(keys, 0)
    values = torch.tensor([[0.5, 0.25, -2.0, 1e-12, 3e38]])
    store.round_cold(values, found.cold)
    assert bool((values[0, 3:] > torch.tensor([0.99e-12, 2.9e38])).all())
    store.write(keys, values)
    assert torch.equal(store.read(store.find(keys), keys), values)
    assert store.memory()["saved_by_fp16"] == 2 * 5


def test_a_weight_that_does_not_fit_is_named():
    store = table(policy=HALF, layout=KeyLayout(("action", "item")))
    values = torch.zeros(3, 5)
    values[2, 1] = -70000.0
    store.round_cold(values.clone(), tensor([1, 1, 0]).bool())
    with pytest.raises(ValueError, match=r"action, item: row 2 .* -70000.0 in its column 1 does not fit"):
        store.round_cold(values, tensor([1, 1, 1]).bool())


def test_a_row_that_cannot_be_demoted_is_named():
    layout = KeyLayout(("action", "item"))
    store = table(policy=TablePolicy(heat=Heat(threshold=2, every=4)), layout=layout)
    keys = layout.pack(1, tensor([8, 9]), "item")
    for step in range(1, 3):
        store.lookup(keys, step)
    store.write(keys, torch.tensor([[1.0] * 5, [1.0, 1e6, 1.0, 1.0, 1.0]]))
    store.lookup(keys[:0], 3)
    with pytest.raises(ValueError, match=r"id 9 of table item is cold, and 1000000.0 in its column 1"):
        store.lookup(keys[:0], 4)


def test_a_row_of_its_own_after_eviction_starts_afresh():
    store = table(policy=TablePolicy(Eviction("ttl", ttl=1, keep=True)))
    key = tensor([-1])
    store.lookup(key, 0)
    fresh = store.read(store.find(key), key)
    trained = torch.randn(1, 5)
    store.write(key, trained)
    store.lookup(tensor([]), 1)
    store.lookup(tensor([4]), 2)
    assert store.find(key).tolist() == [-1]
    keys, rows = store.take_evicted()
    assert keys.tolist() == [-1] and torch.equal(rows, trained)
    assert torch.equal(store.read(store.lookup(key, 3).rows, key), fresh)
    assert len(store.take_evicted()[0]) == 0
    # its old number went to key 4, and it got a new one
    assert store.find(tensor([-1, 4])).tolist() == [1, 0]


def test_metadata_takes_21_bytes_per_key():
    """12 bytes a slot are 16 a key at load factor 0.75, and 4 of score and 1 of heat."""
    policy = TablePolicy(Eviction("lru", capacity=10**6), heat=Heat(2, 8))
    store = DynamicTable(2, slots=1024, chunk_rows=256, policy=policy)
    store.lookup(torch.randperm(768), 0)
    assert store.metadata_bytes_per_key == 21
    assert store.memory()["metadata"] == 5 * 768


@pytest.mark.parametrize("step", [4, 5, -1, 2**31])
def test_time_goes_forward(step):
    store = table(policy=TablePolicy(Eviction("lru", capacity=5)))
    store.lookup(tensor([1]), 5)
    with pytest.raises(ValueError, match="ascending"):
        store.lookup(tensor([1]), step)


def test_changes_must_be_asked_for():
    with pytest.raises(ValueError, match="track_changes"):
        table().take_changes()


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match="another optimizer or dimension"):
        table().load(torch.arange(2), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="float64"):
        table().write(torch.arange(2), torch.zeros(2, 5, dtype=torch.float64))


def test_a_state_of_another_policy_is_refused():
    state = table(policy=TablePolicy(Eviction("lru", capacity=5))).state()
    with pytest.raises(ValueError, match=r"'score'.*another policy"):
        table().load_state(state)
    with pytest.raises(ValueError, match=r"'heat'.*another policy"):
        table(policy=HALF).load_state(state)
    with pytest.raises(ValueError, match=r"candidates.*another policy"):
        table(policy=TablePolicy(admission=2)).load_state(table().state())


@pytest.mark.parametrize("slots", [0, 4, 12])
def test_slots_must_be_a_power_of_two(slots):
    with pytest.raises(ValueError, match="power of two"):
        DynamicTable(2, slots=slots)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Eviction("fifo", capacity=1),
        lambda: Eviction("lru"),
        lambda: Eviction("lru", capacity=0),
        lambda: Eviction("lfu", capacity=5, ttl=5),
        lambda: Eviction("ttl", capacity=5),
        lambda: Eviction("ttl", ttl=0),
        lambda: Eviction("ttl", ttl=1, every=0),
        lambda: Heat(0, 1),
        lambda: Heat(256, 1),
        lambda: Heat(2, 0),
        lambda: TablePolicy(admission=0),
        lambda: TablePolicy(admission=2, admission_window=0),
        lambda: TablePolicy(admission=2, admission_window=2**31),
        lambda: DynamicTable(4, 3),
        lambda: DynamicTable(4, chunk_rows=0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError):
        make()
