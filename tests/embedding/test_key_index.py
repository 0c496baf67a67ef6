"""A key index is a dict from key to handle, while it grows and rehashes bit by bit as well."""

import os
from pathlib import Path
from tempfile import gettempdir
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from murmur_inverse import key_with_hash
from speeds import examples

from tritonrec.embedding import key_index, pools
from tritonrec.embedding.device_index import DeviceIndex
from tritonrec.embedding.index_file import IndexFile
from tritonrec.embedding.key_index import KeyIndex
from tritonrec.kernels import murmur
from tritonrec.kernels.hash_table import op

EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, -2, -3]
# forty keys whose searches begin at two groups, whatever the size, and go on with two different steps
COLLIDING = [key_with_hash(i << 40 | (1 + i % 2 * 4) << 32 | i % 3 // 2) for i in range(40)]
KEYS = st.lists(
    st.one_of(st.sampled_from(EXTREMES), st.sampled_from(COLLIDING), st.integers(-60, 60)),
    unique=True,
    max_size=40,
)


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tensor(values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """A call works for its own keys, so that a handful of keys sees many states; colliding keys collide."""
    monkeypatch.setattr(key_index, "MIN_KEYS_PER_CALL", 1)
    monkeypatch.setattr(murmur, "SECRET", 0)


def test_no_slot_of_a_new_index_has_a_tombstone():
    """A search ends at a slot that was never taken, and goes on behind one whose key was erased."""
    assert (DeviceIndex(16, torch.device("cpu"))._rows == op.EMPTY).all()


def filled(size, slots=1024, seed=3):
    """An index of `size` random keys with handles 0, 1, ... and the keys."""
    keys = torch.randint(-(2**63), 2**63 - 1, (size,), generator=torch.Generator().manual_seed(seed))
    index = KeyIndex(slots)
    index.find_or_insert(keys)
    return index, keys


class IndexMachine(RuleBasedStateMachine):
    """Random calls on an index and on a dict."""

    seen: ClassVar[set[str]] = set()

    @initialize(
        slots=st.sampled_from([8, 16, 128]),
        count=st.sampled_from([0, 40]),
        file=st.sampled_from([(), (gettempdir(), 0), (gettempdir(), 300)]),
    )
    def start(self, slots, count, file=()):
        """Empty, or with so many keys, one after the other, that the slots grow."""
        self.index, self.handle_of, self.end, self.free, self.reserved = KeyIndex(slots, *file), {}, 0, [], []
        self.fresh = 1000
        for key in range(count):
            self.insert([3 * key])
            self.record_state()

    @rule(keys=KEYS)
    def insert(self, keys):
        new = [key for key in keys if key not in self.handle_of]
        handles, inserted = self.index.find_or_insert(tensor(keys))
        for key in new:
            self.end += not self.free
            self.handle_of[key] = self.free.pop() if self.free else self.end - 1
        assert inserted.tolist() == [key in new for key in keys]
        assert handles.tolist() == [self.handle_of[key] for key in keys]

    @rule()
    def release(self):
        self.index.release(tensor(self.reserved))
        self.free, self.reserved = self.free + self.reserved, []

    @precondition(lambda self: self.index.slots < 128)
    @rule()
    def begin_to_move(self):
        """Few calls beside a growth are random: new keys come one by one until one moves keys."""
        while self.index._old is None:
            self.fresh += 1
            self.insert([self.fresh])

    @rule(keys=st.integers(0, 300))
    def grow(self, keys):
        """The next so many keys clear and move nothing."""
        self.index.grow(keys)
        assert self.index._next is None and self.index._old is None
        assert len(self.index) + keys <= 0.75 * self.index.slots

    @rule(data=st.data())
    def insert_present_keys(self, data):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.handle_of) or [0]), unique=True))
        keys = [key for key in keys if key in self.handle_of]
        handles, inserted = self.index.find_or_insert(tensor(keys))
        assert handles.tolist() == [self.handle_of[key] for key in keys] and not inserted.any()

    @rule(keys=KEYS)
    def erase_keys(self, keys):
        self.erase(keys)

    def erase(self, keys):
        handles = [self.handle_of.pop(key, -1) for key in keys]
        assert self.index.erase(tensor(keys)).tolist() == handles
        self.reserved += [handle for handle in handles if handle != -1]

    @rule(data=st.data(), every=st.integers(2, 9))
    def erase_present_keys(self, data, every):
        self.erase(data.draw(st.permutations(sorted(self.handle_of)))[::every])

    @rule(keys=KEYS)
    def find(self, keys):
        keys_to_find = keys + keys[:3]
        assert self.index.find(tensor(keys_to_find)).tolist() == [
            self.handle_of.get(key, -1) for key in keys_to_find
        ]

    @invariant()
    def holds_the_same(self):
        keys, handles = self.index.items()
        assert len(keys) == len(self.index) == len(self.handle_of), "a key is lost, or in both structures"
        assert dict(zip(keys.tolist(), handles.tolist(), strict=True)) == self.handle_of
        assert self.index.find(keys).tolist() == handles.tolist()
        assert self.index.end == self.end
        now = self.index._now
        if isinstance(now, IndexFile):
            counted = int((now._read(np.arange(now.slots // 8))[:, 1] == -1).sum())
        else:
            counted = int((now.rows[: now.done] == -2).sum())
        assert self.index._now.tombstones == counted
        assert self.index.load_factor <= key_index.HARD_MAX_OCCUPANCY
        self.record_state()

    def record_state(self):
        if self.index._next is not None:
            self.seen.add("clearing")
        if self.index._old is not None:
            self.seen.add("growing" if self.index._old.slots < self.index.slots else "rehashing")
        if self.index._now.tombstones:
            self.seen.add("tombstones")
        self.seen.add(f"{type(self.index._old).__name__} to {type(self.index._now).__name__}")


@pytest.fixture
def slow_growth(monkeypatch):
    """Growth lasts for several calls also where few slots grow."""
    monkeypatch.setattr(key_index, "SLOTS_CLEARED_PER_KEY", 16)
    monkeypatch.setattr(key_index, "SLOTS_MOVED_PER_KEY", 4)


def test_a_key_index_behaves_as_a_dict(slow_growth):
    steps = settings(max_examples=examples(30), stateful_step_count=120, deadline=None)
    run_state_machine_as_test(IndexMachine, settings=steps)


def test_keys_go_from_memory_to_a_file_and_on_to_a_larger_one(slow_growth):
    IndexMachine.seen.clear()
    machine = IndexMachine()
    machine.start(8, 40, (gettempdir(), 300))
    for key in range(100):
        machine.insert([-key, *COLLIDING[key : key + 1]])
        machine.erase_keys([3 * key, -key + 30])
        machine.holds_the_same()
    assert IndexMachine.seen >= {"_Structure to IndexFile", "IndexFile to IndexFile", "tombstones"}
    assert machine.index.nbytes == 0 < machine.index.disk_nbytes


def test_keys_one_by_one_reach_every_state(slow_growth):
    IndexMachine.seen.clear()
    machine = IndexMachine()
    machine.start(8, 40)
    for key in range(200):
        machine.insert([-key])
        machine.erase_keys([3 * key, -key + 30])
        machine.holds_the_same()
    assert IndexMachine.seen >= {"clearing", "growing", "tombstones"}


def test_a_moved_key_may_take_a_tombstone():
    """A slot of a full group is freed, and the next stretch that moves fills it again."""
    crowd = [key_with_hash(i << 40 | 1 << 32) for i in range(48)]  # all walk from group 0 to the next
    index = KeyIndex(64)
    index.find_or_insert(tensor(crowd))
    filler = 0
    while index._old is None or index._old.done < 16:
        index.find_or_insert(tensor([filler]))
        filler += 1
    assert index.erase(tensor(crowd[:3])).tolist() == [0, 1, 2]
    assert index._now.tombstones == 3
    index.find_or_insert(tensor([filler]))
    assert index._now.tombstones == int((index._now.rows == -2).sum()) < 3
    assert index.find(tensor(crowd)).tolist() == [-1, -1, -1, *range(3, 48)]


def test_the_work_of_a_call_is_bounded(monkeypatch):
    """Thousands of keys wait, and a call with four keys clears 128 slots or moves four groups."""
    index, _ = filled(6144, slots=8192)
    cleared, moved = [0], [0]
    for i in range(900):
        index.find_or_insert(torch.arange(4 * i, 4 * i + 4))
        if index._next is not None:
            cleared.append(index._next.done)
        if index._old is not None:
            moved.append(index._old.done)
    assert index.slots == 16384 and index._old is None
    assert cleared == list(range(0, 16384, 128))
    assert moved == [0, *range(0, 8192, 32)]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_allocating_touches_nothing():
    """The new structure of a growth is as it came from the allocator, but for the stretch that is cleared."""
    index, _ = filled(3 << 20, slots=1 << 22)
    before = resident_bytes()
    index.find_or_insert(torch.arange(512))
    assert index._next is not None and index._next.slots == 1 << 23 and index._next.done == 32 * 512
    assert resident_bytes() - before < 24 << 20 < index._next.keys.nbytes


def test_tombstones_are_dropped_in_the_same_size():
    index, keys = filled(700)
    rehashed, end = False, 700
    for seed in range(60):
        erased, keys = keys[:100], keys[100:]
        index.erase(erased)
        fresh = torch.randint(
            -(2**63), 2**63 - 1, (100,), generator=torch.Generator().manual_seed(100 + seed)
        )
        index.find_or_insert(fresh)
        keys, end = torch.cat([keys, fresh]), end + 100
        rehashed |= index._old is not None
        assert (index.find(erased) == -1).all()
        assert index.find(keys).tolist() == list(range(end - 700, end))
    assert rehashed and index.slots == 1024


@pytest.mark.parametrize("slots", [8, 64, 1 << 16])
def test_groups_are_cache_lines(slots):
    index = KeyIndex(slots)
    assert index._now.keys.ctypes.data % 64 == 0 and index._now.rows.ctypes.data % 64 == 0
    assert len(index._now.keys) == len(index._now.rows) == slots


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 5000])
def test_many_keys_in_one_call(size):
    """A call with more keys than slots makes room for all of them at once."""
    index, keys = filled(size, slots=8)
    assert index.find(keys).tolist() == list(range(size))
    assert len(index) == size and index.load_factor <= 0.75
    assert sorted(index.items()[0].tolist()) == sorted(keys.tolist())


def test_present_keys_do_not_grow_it():
    index, keys = filled(768)
    for _ in range(3):
        handles, inserted = index.find_or_insert(keys)
        assert handles.tolist() == list(range(768)) and not inserted.any()
    assert index.slots == 1024 and index._next is None
    assert index.nbytes == 12 * 1024


def visits(index):
    """Groups that a search for each key of an idle index visits, on average."""
    assert index._idle()
    taken = [(int(key), slot) for slot, key in enumerate(index._now.keys) if index._now.rows[slot] >= 0]
    walks = [[slot in group for group in op.probe(key, index.slots)] for key, slot in taken]
    return sum(walk.index(True) + 1 for walk in walks) / len(walks)


@pytest.mark.parametrize("secret", [1 << 62 | 1, (1 << 63) - 1, 0x5DEECE66D1B2A3C5])
def test_keys_chosen_to_collide_take_no_longer_than_others(monkeypatch, secret):
    """Keys of one first group and one stride: with a known hash a search visits the groups of all others."""
    hostile = tensor([key_with_hash((i & 255) << 24 | (i >> 8) << 56 | 1 << 32 | 5) for i in range(1500)])
    found = {}
    for name, keys, bits in (
        ("known", hostile, 0), ("hidden", hostile, secret), ("random", filled(1500)[1], secret),
    ):  # fmt: skip
        monkeypatch.setattr(murmur, "SECRET", bits)
        index = KeyIndex(2048)
        rows = torch.cat([index.find_or_insert(keys[at : at + 100])[0] for at in range(0, 1500, 100)])
        assert torch.equal(rows, torch.arange(1500)) and torch.equal(index.find(keys), rows)
        assert set(index.items()[0].tolist()) == set(keys.tolist())
        found[name] = visits(index)
    assert found["known"] > 90 and found["hidden"] < 1.1 * found["random"] < 2


def test_more_keys_than_handles_are_refused_and_change_nothing(monkeypatch):
    monkeypatch.setattr(key_index, "MAX_ROWS", 22)
    monkeypatch.setattr(pools, "MAX_ROWS", 22)
    index, keys = filled(20)
    index.find_or_insert(keys)  # nothing is new
    with pytest.raises(MemoryError, match="at most 22 rows on one rank; it has 20, and 3 are new"):
        index.find_or_insert(torch.cat([keys[:4], tensor([1, 2, 3])]))
    assert len(index) == 20 and index.find(tensor([1, 2, 3])).tolist() == [-1] * 3
    erased = index.erase(keys[:1])
    with pytest.raises(MemoryError, match="it has 20"):  # the erased one is reserved
        index.find_or_insert(tensor([1, 2, 3]))
    index.release(erased)
    assert index.find_or_insert(tensor([1, 2, 3]))[0].tolist() == [0, 20, 21]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="power of two and at least 8, got 12"):
        KeyIndex(12)
    with pytest.raises(ValueError, match=r"keys must be \(K,\) int64"):
        KeyIndex().find(torch.zeros(3))


def test_keys_beyond_the_most_rows_of_a_device_are_refused_before_any_is_taken(monkeypatch):
    monkeypatch.setattr(pools, "MAX_ROWS", 10)
    index = DeviceIndex(8, torch.device("cpu"))
    index.find_or_insert(torch.arange(8))
    with pytest.raises(MemoryError, match="at most 10 rows on one rank; it has 8, and up to 3 are new"):
        index.find_or_insert(torch.arange(8, 11))
    assert len(index) == 8 and index.find(torch.arange(8, 11)).tolist() == [-1] * 3
    index.find_or_insert(torch.arange(8, 10))
    assert len(index) == 10


def test_a_large_call_finishes_a_growth_and_the_next_one():
    index, keys = KeyIndex(64), torch.arange(12_000)
    first = 0
    while index._idle():
        index.find_or_insert(keys[first : first + 1])
        first += 1
    handles, inserted = index.find_or_insert(keys[first:])
    assert bool(inserted.all()) and len(index) == len(keys)
    assert torch.equal(index.find(keys).sort().values, keys) and torch.equal(
        index.find(keys[first:]), handles
    )
