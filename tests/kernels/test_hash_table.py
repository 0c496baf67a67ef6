"""The hash table is a dict from key to row: rows numbered by occurrence, no key lost, none confused."""

import pytest
import torch
from hypothesis import given, settings
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

from tritonrec.kernels.hash_table import (
    HashTableFullError,
    hash_assign,
    hash_erase,
    hash_find,
    hash_grow,
    hash_insert,
)
from tritonrec.kernels.hash_table.reference import probe
from tritonrec.kernels.murmur import mix64

GPU = torch.cuda.is_available()
TRITON = pytest.param("triton", marks=pytest.mark.gpu if GPU else pytest.mark.interpreter)
IMPLS = ["reference", "cpu", TRITON]
EXTREMES = [-(2**63), 2**63 - 1, -1, 0, 1, -2]


def on(impl, tensor):
    return tensor.cuda() if impl == "triton" and GPU else tensor


def empty(num_slots, impl="cpu", leftover=0):
    """An empty table whose unused slots hold `leftover`: no key may be taken for present because of it."""
    slot_keys = torch.full((num_slots,), leftover, dtype=torch.int64)
    return on(impl, slot_keys), on(impl, torch.full((num_slots,), -1, dtype=torch.int32))


def keys_of(values, impl="cpu"):
    return on(impl, torch.tensor(values, dtype=torch.int64))


def contents(slot_keys, slot_rows):
    """The table as a dict."""
    pairs = [(k, r) for k, r in zip(slot_keys.tolist(), slot_rows.tolist(), strict=True) if r >= 0]
    assert len(dict(pairs)) == len(pairs), "a key sits in two slots"
    return dict(pairs)


def same_home(count, num_slots=4096):
    """Distinct keys that all start at one group of any table of up to `num_slots` slots."""
    return [key for key in range(-60_000, 60_000) if mix64(key) % (num_slots // 8) == 3][:count]


@pytest.mark.parametrize("log_groups", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("key", [*EXTREMES, 12345])
def test_a_probe_visits_every_slot_once(key, log_groups):
    """Theorem 1 of MTGRBoost, for the sequence that is used."""
    num_slots = 8 << log_groups
    assert sorted(slot for group in probe(key, num_slots) for slot in group) == list(range(num_slots))


@pytest.mark.parametrize("leftover", EXTREMES)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_key_is_legal(impl, leftover):
    table = empty(8, impl, leftover)
    keys = keys_of(EXTREMES, impl)
    assert hash_find(*table, keys, impl).tolist() == [-1] * 6
    rows, inserted = hash_insert(*table, keys, 40, impl=impl)
    assert rows.tolist() == [40, 41, 42, 43, 44, 45]
    assert inserted.tolist() == [True] * 6
    assert hash_find(*table, keys.flip(0), impl).tolist() == [45, 44, 43, 42, 41, 40]
    assert hash_find(*table, keys_of([2, -3], impl), impl).tolist() == [-1, -1]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_leftover_of_the_key_itself_does_not_attract_it(impl):
    """A key takes the first empty slot, so that a search may end at one."""
    table = on(impl, torch.arange(8)), on(impl, torch.full((8,), -1, dtype=torch.int32))
    rows, inserted = hash_insert(*table, keys_of([5, 2], impl), 0, impl=impl)
    assert rows.tolist() == [0, 1] and inserted.all()
    assert sorted(table[1].tolist()[:2]) == [0, 1]
    assert hash_find(*table, keys_of([2, 5, 0, 7], impl), "reference").tolist() == [1, 0, -1, -1]


@pytest.mark.parametrize("impl", IMPLS)
def test_old_keys_keep_their_rows_and_new_ones_follow_in_order(impl):
    table = empty(64, impl)
    hash_insert(*table, keys_of([5, -9, 7], impl), 0, impl=impl)
    rows, inserted = hash_insert(*table, keys_of([11, 7, 2, 5, 30], impl), 3, impl=impl)
    assert rows.tolist() == [3, 2, 4, 0, 5]
    assert inserted.tolist() == [True, False, True, False, True]
    assert contents(*table) == {5: 0, -9: 1, 7: 2, 11: 3, 2: 4, 30: 5}


@pytest.mark.parametrize("impl", IMPLS)
def test_collisions_fill_a_table_to_its_last_slot(impl):
    keys = same_home(64)
    table = empty(64, impl)
    rows, _ = hash_insert(*table, keys_of(keys, impl), 0, impl=impl)
    assert rows.tolist() == list(range(64))
    assert contents(*table) == dict(zip(keys, range(64), strict=True))
    assert hash_find(*table, keys_of([*keys, 10**9], impl), impl).tolist() == [*range(64), -1]


@pytest.mark.parametrize("home", [0, 7])
@pytest.mark.parametrize("step", [1, 3, 7])
@pytest.mark.parametrize("impl", IMPLS)
def test_probes_walk_their_step_and_wrap_around_the_end(impl, step, home):
    """Twenty keys with one home among eight groups and one step fill it and the next two groups, in order."""
    keys = [key_with_hash(i << 40 | step << 32 | home) for i in range(20)]
    table = empty(64, impl)
    hash_insert(*table, keys_of(keys, impl), 0, impl=impl)
    groups = table[1].view(8, 8).tolist()
    walk = [home, (home + step) % 8, (home + 2 * step) % 8]
    assert [sorted(groups[group]) for group in walk] == [
        list(range(8)),
        list(range(8, 16)),
        [-1, -1, -1, -1, 16, 17, 18, 19],
    ]
    assert int((table[1] >= 0).sum()) == 20
    absent = key_with_hash(99 << 40 | step << 32 | home)
    assert hash_find(*table, keys_of([*keys[::-1], absent], impl), impl).tolist() == [*range(19, -1, -1), -1]


@pytest.mark.parametrize("impl", IMPLS)
def test_three_quarters_full_and_grown(impl):
    """The load at which tables grow, reached exactly: every key found, absent keys absent, rows kept."""
    keys = torch.randint(-(2**62), 2**62, (384,), generator=torch.Generator().manual_seed(9)).unique()[:192]
    table = empty(256, impl, leftover=int(keys[0]))
    half = keys_of(keys[:90].tolist(), impl)
    hash_insert(*table, half, 0, impl=impl)
    rows, inserted = hash_insert(*table, keys_of(keys.flip(0).tolist(), impl), 90, impl=impl)
    assert int((table[1] >= 0).sum()) == 192
    assert rows.tolist() == [*range(90, 192), *range(89, -1, -1)]
    assert inserted.tolist() == [True] * 102 + [False] * 90
    for one in (table, hash_grow(*table, impl)):
        assert torch.equal(hash_find(*one, keys_of(keys.flip(0).tolist(), impl), impl), rows)
        assert hash_find(*one, keys_of((keys + 1).tolist(), impl), impl).tolist() == [-1] * 192


@pytest.mark.parametrize("impl", IMPLS)
def test_a_full_table_refuses_and_is_left_as_it_was(impl):
    table = empty(16, impl, leftover=77)
    hash_insert(*table, keys_of(range(10), impl), 0, impl=impl)
    before = [part.clone() for part in table]
    with pytest.raises(HashTableFullError, match=r"8 keys do not fit into a table of 16 slots with 10 occ"):
        hash_insert(*table, keys_of(range(9, 17), impl), 10, impl=impl)
    assert all(torch.equal(now, then) for now, then in zip(table, before, strict=True))
    rows, _ = hash_insert(*table, keys_of(range(4, 16), impl), 10, impl=impl)
    assert rows.tolist() == list(range(4, 16))
    assert hash_insert(*table, keys_of(range(16), impl), 16, impl=impl)[1].sum() == 0


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 129, 500])
@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_equals_the_reference(impl, size):
    generator = torch.Generator().manual_seed(size)
    keys = torch.randint(-(2**62), 2**62, (size,), generator=generator)
    first, second = keys[: size // 2], keys.flip(0)
    ours, theirs = empty(1024, impl), empty(1024)
    for batch, next_row in ((first, 0), (second, len(first))):
        got = hash_insert(*ours, on(impl, batch), next_row, impl=impl)
        expected = hash_insert(*theirs, batch, next_row, impl="reference")
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
    assert contents(*ours) == contents(*theirs)
    query = torch.cat([keys, keys + 1])
    assert torch.equal(hash_find(*ours, on(impl, query), impl).cpu(), hash_find(*theirs, query, "reference"))
    assert torch.equal(hash_find(*ours, on(impl, query), impl).cpu()[:size] >= 0, torch.ones(size).bool())


@pytest.mark.parametrize("impl", IMPLS)
def test_growth_keeps_rows_and_leaves_the_old_table_alone(impl):
    keys = [*same_home(60), *EXTREMES[2:]]  # every slot is taken, the first and the last too
    table = empty(64, impl)
    hash_insert(*table, keys_of(keys, impl), 5, impl=impl)
    before = [part.clone() for part in table]
    grown = hash_grow(*table, impl)
    assert [part.numel() for part in grown] == [128, 128]
    assert contents(*grown) == dict(zip(keys, range(5, 5 + len(keys)), strict=True))
    assert hash_find(*grown, keys_of(keys, impl), impl).tolist() == list(range(5, 5 + len(keys)))
    assert all(torch.equal(now, then) for now, then in zip(table, before, strict=True))


def in_walk(count, home=0, step=1, start=0):
    """Keys that visit the groups ``home, home + step, ...`` of any table, whatever its size."""
    return [key_with_hash(i << 40 | step << 32 | home) for i in range(start, start + count)]


@pytest.mark.parametrize("impl", IMPLS)
def test_erasing_empties_a_slot_where_searches_end_and_leaves_a_tombstone_where_they_go_on(impl):
    keys = in_walk(12)
    table = empty(64, impl)
    hash_insert(*table, keys_of(keys, impl), 0, impl=impl)
    gone = keys_of([keys[9], keys[2], 777, keys[6]], impl)
    assert hash_erase(*table, gone, impl).tolist() == [9, 2, -1, 6]
    groups = table[1].view(8, 8).tolist()
    assert sorted(groups[0]) == [-2, -2, 0, 1, 3, 4, 5, 7]
    assert sorted(groups[1]) == [-1, -1, -1, -1, -1, 8, 10, 11]
    rows = [0, 1, -1, 3, 4, 5, -1, 7, 8, -1, 10, 11]
    assert hash_find(*table, keys_of(keys, impl), impl).tolist() == rows
    assert hash_erase(*table, gone, impl).tolist() == [-1, -1, -1, -1]


@pytest.mark.parametrize("impl", IMPLS)
def test_the_leftover_of_a_key_beside_it_is_not_taken_for_it(impl):
    one, other = in_walk(2)
    table = empty(64, impl)
    hash_insert(*table, keys_of([one, other], impl), 0, impl=impl)
    hash_erase(*table, keys_of([one, other], impl), impl)
    hash_insert(*table, keys_of([other], impl), 5, impl=impl)  # in the first slot, its leftover in the second
    assert hash_assign(*table, keys_of([other], impl), keys_of([6], impl), impl).tolist() == [5]
    assert hash_find(*table, keys_of([other], impl), impl).tolist() == [6]
    assert hash_erase(*table, keys_of([other], impl), impl).tolist() == [6]
    assert contents(*table) == {}


@pytest.mark.parametrize("impl", IMPLS)
def test_an_insert_reuses_a_tombstone_but_only_for_a_key_that_is_not_further_down(impl):
    keys = in_walk(20)
    table = empty(64, impl)
    hash_insert(*table, keys_of(keys, impl), 0, impl=impl)
    hash_erase(*table, keys_of([keys[3], keys[12]], impl), impl)
    further, new, newer = keys[17], *in_walk(2, start=20)
    rows, inserted = hash_insert(*table, keys_of([further, new, newer], impl), 20, impl=impl)
    assert rows.tolist() == [17, 20, 21] and inserted.tolist() == [False, True, True]
    groups = table[1].view(8, 8).tolist()
    assert sorted(groups[0] + groups[1]) == sorted({*range(16), 20, 21} - {3, 12})
    contents(*table)
    assert hash_erase(*table, keys_of([further], impl), impl).tolist() == [17]
    assert hash_find(*table, keys_of([further, new], impl), impl).tolist() == [-1, 20]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_table_of_tombstones_is_empty_and_fills_again(impl):
    keys, others = in_walk(16), in_walk(16, start=50)
    table = empty(16, impl)
    for batch, start in ((keys, 0), (others, 16), (EXTREMES, 32)):
        assert hash_find(*table, keys_of(others, impl), impl).tolist() == [-1] * 16
        rows, _ = hash_insert(*table, keys_of(batch, impl), start, impl=impl)
        assert rows.tolist() == list(range(start, start + len(batch)))
        assert hash_erase(*table, keys_of(batch[::-1], impl), impl).tolist() == rows.tolist()[::-1]
        assert contents(*table) == {}
    grown = hash_grow(*table, impl)
    assert grown[1].tolist() == [-1] * 32


@pytest.mark.parametrize("impl", IMPLS)
def test_growth_drops_tombstones(impl):
    keys = in_walk(30)
    table = empty(64, impl)
    hash_insert(*table, keys_of(keys, impl), 0, impl=impl)
    hash_erase(*table, keys_of(keys[::2], impl), impl)
    assert (table[1] == -2).any()
    grown = hash_grow(*table, impl)
    assert not (grown[1] == -2).any()
    assert contents(*grown) == dict(zip(keys[1::2], range(1, 30, 2), strict=True))
    assert hash_find(*grown, keys_of(keys, impl), impl).tolist() == [
        row if row % 2 else -1 for row in range(30)
    ]


@pytest.mark.parametrize("leftover", EXTREMES)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_key_can_be_erased(impl, leftover):
    table = empty(8, impl, leftover)
    assert hash_erase(*table, keys_of(EXTREMES, impl), impl).tolist() == [-1] * 6
    hash_insert(*table, keys_of(EXTREMES, impl), 0, impl=impl)
    hash_insert(*table, keys_of([50, 51], impl), 6, impl=impl)  # a full group: tombstones from here on
    assert hash_erase(*table, keys_of(EXTREMES[::-1], impl), impl).tolist() == [5, 4, 3, 2, 1, 0]
    assert contents(*table) == {50: 6, 51: 7}
    assert hash_find(*table, keys_of(EXTREMES, impl), impl).tolist() == [-1] * 6
    rows, inserted = hash_insert(*table, keys_of(EXTREMES, impl), 8, impl=impl)
    assert rows.tolist() == list(range(8, 14)) and inserted.all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("impl", IMPLS)
def test_new_keys_take_free_rows_first(impl, dtype):
    table = empty(64, impl)
    hash_insert(*table, keys_of([5, -9, 7], impl), 0, impl=impl)
    free = on(impl, torch.tensor([40, 9, 2**31 - 1], dtype=dtype))
    rows, inserted = hash_insert(*table, keys_of([11, 7, 2], impl), 3, free, impl)
    assert rows.tolist() == [40, 2, 9]
    assert inserted.tolist() == [True, False, True]
    rows, _ = hash_insert(*table, keys_of([30, 5, 31, 32], impl), 3, free[2:], impl)
    assert rows.tolist() == [2**31 - 1, 0, 3, 4]
    assert contents(*table) == {5: 0, -9: 1, 7: 2, 11: 40, 2: 9, 30: 2**31 - 1, 31: 3, 32: 4}
    assert hash_insert(*table, keys_of([5], impl), 2**31 - 1, free, impl)[0].tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("impl", IMPLS)
def test_assigning_changes_the_rows_of_present_keys(impl, dtype):
    table = empty(64, impl)
    hash_insert(*table, keys_of(in_walk(20), impl), 0, impl=impl)
    keys = keys_of([*in_walk(3, start=15), -1, 0], impl)
    rows = on(impl, torch.tensor([2**31 - 1, 15, 0, 77, 78], dtype=dtype))
    assert hash_assign(*table, keys, rows, impl).tolist() == [15, 16, 17, -1, -1]
    assert hash_find(*table, keys, impl).tolist() == [2**31 - 1, 15, 0, -1, -1]
    assert hash_find(*table, keys_of(in_walk(15), impl), impl).tolist() == list(range(15))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_refused_insert_leaves_tombstones_as_they_were(impl):
    table = empty(16, impl)
    hash_insert(*table, keys_of(in_walk(16), impl), 0, impl=impl)
    hash_erase(*table, keys_of(in_walk(16)[3:14:5], impl), impl)
    before = [part.clone() for part in table]
    with pytest.raises(HashTableFullError, match="4 keys do not fit"):
        hash_insert(*table, keys_of(in_walk(4, start=30), impl), 50, impl=impl)
    assert all(torch.equal(now, then) for now, then in zip(table, before, strict=True))
    assert hash_insert(*table, keys_of(in_walk(3, start=30), impl), 50, impl=impl)[1].all()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 129, 500])
@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_erase_and_assign_equal_the_reference(impl, size):
    generator = torch.Generator().manual_seed(size)
    keys = torch.randint(-(2**62), 2**62, (size,), generator=generator)
    query = torch.cat([keys[::2], keys[::3] + 1])[torch.randperm(len(keys[::2]) + len(keys[::3]))]
    rows = torch.randint(0, 2**31, (len(query),), generator=generator)
    slots = 8 << (size // 6).bit_length()
    ours, theirs = empty(slots, impl), empty(slots)
    for table, name in ((ours, impl), (theirs, "reference")):
        hash_insert(*table, on(name, keys), 0, impl=name)
    got, expected = (
        [
            hash_assign(*table, on(name, query), on(name, rows), name).cpu(),
            hash_erase(*table, on(name, query.flip(0)), name).cpu(),
            hash_insert(*table, on(name, query), 1000, on(name, rows), name)[0].cpu(),
        ]
        for table, name in ((ours, impl), (theirs, "reference"))
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert contents(*ours) == contents(*theirs)


class TableMachine(RuleBasedStateMachine):
    """Random calls on a table of tensors and on a dict."""

    impl = "reference"
    keys = st.lists(
        st.one_of(
            st.sampled_from(EXTREMES),
            st.sampled_from([*in_walk(24), *in_walk(8, home=1, step=3)]),
            st.integers(-30, 30),
        ),
        unique=True,
        max_size=24,
    )

    @initialize(slots=st.sampled_from([8, 32, 64]), leftover=st.sampled_from(EXTREMES))
    def start(self, slots, leftover):
        self.table, self.rows_of = empty(slots, self.impl, leftover), {}
        self.next_row, self.free_rows = 0, []

    @rule(keys=keys, reuse=st.integers(0, 30))
    def insert(self, keys, reuse):
        new = [key for key in keys if key not in self.rows_of]
        free = self.free_rows[:reuse]
        arguments = (keys_of(keys, self.impl), self.next_row, keys_of(free, self.impl), self.impl)
        if len(self.rows_of) + len(new) > self.table[0].numel():
            with pytest.raises(HashTableFullError):
                hash_insert(*self.table, *arguments)
            return
        rows, inserted = hash_insert(*self.table, *arguments)
        fresh = range(self.next_row, self.next_row + len(keys))
        self.rows_of.update(zip(new, [*free, *fresh], strict=False))
        assert inserted.tolist() == [key in new for key in keys]
        assert rows.tolist() == [self.rows_of[key] for key in keys]
        self.free_rows = self.free_rows[min(len(free), len(new)) :]
        self.next_row += max(len(new) - len(free), 0)

    @rule(keys=keys)
    def erase(self, keys):
        expected = [self.rows_of.pop(key, -1) for key in keys]
        assert hash_erase(*self.table, keys_of(keys, self.impl), self.impl).tolist() == expected
        self.free_rows += [row for row in expected if row != -1]

    @rule(keys=keys)
    def find(self, keys):
        rows = hash_find(*self.table, keys_of(keys + keys[:2], self.impl), self.impl).tolist()
        assert rows == [self.rows_of.get(key, -1) for key in keys + keys[:2]]

    @rule(keys=keys)
    def assign(self, keys):
        rows = range(self.next_row, self.next_row + len(keys))
        before = hash_assign(*self.table, keys_of(keys, self.impl), keys_of(rows, self.impl), self.impl)
        assert before.tolist() == [self.rows_of.get(key, -1) for key in keys]
        present = {key: row for key, row in zip(keys, rows, strict=True) if key in self.rows_of}
        self.free_rows += [self.rows_of[key] for key in present]
        self.rows_of.update(present)
        self.next_row += len(keys)

    @precondition(lambda self: self.table[0].numel() < 256)
    @rule()
    def grow(self):
        self.table = hash_grow(*self.table, self.impl)

    @invariant()
    def holds_the_same(self):
        assert contents(*self.table) == self.rows_of
        keys = list(self.rows_of)
        assert hash_find(*self.table, keys_of(keys), "cpu").tolist() == list(self.rows_of.values())


@pytest.mark.parametrize("impl", ["reference", "cpu"] if GPU else IMPLS)
def test_is_a_dict(impl):
    examples, steps = {"reference": (20, 60), "cpu": (30, 200), "triton": (4, 25)}[impl]
    machine = type("Machine", (TableMachine,), {"impl": impl})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None),
    )


def test_tables_of_different_implementations_are_one_format():
    keys = keys_of(same_home(30) + list(range(1000, 1015)))
    table = empty(64)
    hash_insert(*table, keys[:20], 0, impl="reference")
    hash_insert(*table, keys[:35], 20, impl="cpu")
    for impl in ["cpu"] if GPU else ["cpu", "triton"]:
        assert hash_insert(*(part.clone() for part in table), keys, 35, impl=impl)[0].tolist() == list(
            range(45)
        )
    if not GPU:
        hash_insert(*table, keys, 35, impl="triton")
        assert hash_find(*table, keys, "cpu").tolist() == list(range(45))
        assert hash_find(*hash_grow(*table, "cpu"), keys, "triton").tolist() == list(range(45))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.sampled_from(EXTREMES), st.integers(-30, 30)), unique=True, max_size=20)),
    st.sampled_from(["cpu"] if GPU else ["cpu", "triton"]),
)
def test_is_a_dict_that_grows(batches, impl):
    table, rows_of = empty(8), {}
    for batch in batches:
        while len(rows_of) + len(batch) > 0.75 * table[0].numel():
            table = hash_grow(*table, impl)
        rows, inserted = hash_insert(*table, keys_of(batch), len(rows_of), impl=impl)
        assert inserted.tolist() == [key not in rows_of for key in batch]
        for key in batch:
            rows_of.setdefault(key, len(rows_of))
        assert rows.tolist() == [rows_of[key] for key in batch]
        assert contents(*table) == rows_of


def test_refuses_what_is_no_table():
    keys, (slot_keys, slot_rows) = torch.arange(3), empty(16)
    with pytest.raises(ValueError, match=r"power of two and at least 8, got \(12,\) and \(12,\)"):
        hash_find(slot_keys[:12], slot_rows[:12], keys)
    with pytest.raises(ValueError, match=r"at least 8, got \(4,\)"):
        hash_find(slot_keys[:4], slot_rows[:4], keys)
    with pytest.raises(ValueError, match=r"got \(16,\) and \(8,\)"):
        hash_insert(slot_keys, slot_rows[:8], keys, 0)
    with pytest.raises(ValueError, match=r"slot_rows int32, got torch\.int64"):
        hash_grow(slot_keys, slot_rows.long())
    with pytest.raises(ValueError, match="contiguous"):
        hash_find(slot_keys[::2], slot_rows[::2], keys)
    with pytest.raises(ValueError, match=r"keys must be \(K,\) int64, got shape \(3,\) torch.float32"):
        hash_find(slot_keys, slot_rows, keys.float())
    with pytest.raises(ValueError, match=r"next_row must be in \[0, 2\*\*31\), got -1"):
        hash_insert(slot_keys, slot_rows, keys, -1)
    with pytest.raises(ValueError, match=r"free_rows must be in \[0, 2\*\*31\), got -1 to 4"):
        hash_insert(slot_keys, slot_rows, keys, 0, torch.tensor([4, -1]))
    with pytest.raises(ValueError, match=r"rows must be in \[0, 2\*\*31\), got 0 to 2147483648"):
        hash_assign(slot_keys, slot_rows, keys[:2], torch.tensor([0, 2**31]))
    with pytest.raises(
        ValueError, match=r"rows must be 1-dimensional int64 or int32, got \(3,\) torch.float32"
    ):
        hash_assign(slot_keys, slot_rows, keys, keys.float())
    with pytest.raises(ValueError, match=r"equally many, got \(3,\), \(2,\)"):
        hash_assign(slot_keys, slot_rows, keys, keys[:2])


@pytest.mark.parametrize("impl", ["reference", "cpu"] if GPU else IMPLS)
def test_refuses_to_pass_the_last_row(impl):
    table = empty(16)
    with pytest.raises(ValueError, match="2 new keys from row 2147483647 pass"):
        hash_insert(*table, keys_of([1, 2, 3]), 2**31 - 1, keys_of([4]), impl)
    assert contents(*table) == {}
    hash_insert(*table, keys_of([1]), 2**31 - 3, impl=impl)
    with pytest.raises(ValueError, match="3 new keys from row 2147483646 pass the last int32 row"):
        hash_insert(*table, keys_of([1, 2, 3, 4]), 2**31 - 2, impl=impl)
    rows, _ = hash_insert(*table, keys_of([1, 2, 3]), 2**31 - 2, impl=impl)
    assert rows.tolist() == [2**31 - 3, 2**31 - 2, 2**31 - 1]


def test_compiles_without_a_graph_break():
    def step(slot_keys, slot_rows, keys):
        rows, inserted = hash_insert(slot_keys, slot_rows, keys, 4)
        assigned = hash_assign(slot_keys, slot_rows, keys[:1], keys[:1])
        erased = hash_erase(slot_keys, slot_rows, keys[1:2])
        again, _ = hash_insert(slot_keys, slot_rows, keys, 7, erased)
        grown = hash_grow(slot_keys, slot_rows)
        return rows, inserted, assigned, erased, again, hash_find(*grown, keys.flip(0))

    keys = torch.tensor([9, -3, 5])
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    table = empty(16)
    for ours, expected in zip(compiled(*table, keys), step(*empty(16), keys), strict=True):
        assert torch.equal(ours, expected)
    assert contents(*table) == {9: 9, -3: 5, 5: 6}


def test_registration():
    table = empty(16)
    torch.library.opcheck(torch.ops.tritonrec.hash_insert, (*table, torch.arange(5), 0, None, "cpu"))
    hash_insert(*table, torch.arange(5), 0)
    torch.library.opcheck(torch.ops.tritonrec.hash_find, (*table, torch.arange(9), "cpu"))
    torch.library.opcheck(torch.ops.tritonrec.hash_grow, (*table, "cpu"))
    torch.library.opcheck(
        torch.ops.tritonrec.hash_insert, (*table, torch.arange(9), 7, torch.arange(5, 7), "cpu")
    )
    torch.library.opcheck(torch.ops.tritonrec.hash_assign, (*table, torch.arange(9), torch.arange(9), "cpu"))
    torch.library.opcheck(torch.ops.tritonrec.hash_erase, (*table, torch.arange(3), "cpu"))
