"""The hash table is a dict from key to row: rows numbered by occurrence, no key lost, none confused."""

import pytest
import torch
from hash_tables import (
    EXTREMES,
    contents,
    empty,
    insert_in_walk,
    keys_of,
    same_home,
)
from impls import GPU, IMPLS, on
from murmur_inverse import key_with_hash

from tritonrec.kernels.hash_table.errors import HashTableFullError
from tritonrec.kernels.hash_table.op import hash_find, hash_grow, hash_insert, probe


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
    assert hash_find(*table, keys, impl=impl).tolist() == [-1] * 6
    rows, inserted = hash_insert(*table, keys, 40, impl=impl)
    assert rows.tolist() == [40, 41, 42, 43, 44, 45]
    assert inserted.tolist() == [True] * 6
    assert hash_find(*table, keys.flip(0), impl=impl).tolist() == [45, 44, 43, 42, 41, 40]
    assert hash_find(*table, keys_of([2, -3], impl), impl=impl).tolist() == [-1, -1]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_leftover_of_the_key_itself_does_not_attract_it(impl):
    """A key takes the first empty slot, so that a search may end at one."""
    table = on(impl, torch.arange(8)), on(impl, torch.full((8,), -1, dtype=torch.int32))
    rows, inserted = hash_insert(*table, keys_of([5, 2], impl), 0, impl=impl)
    assert rows.tolist() == [0, 1] and inserted.all()
    assert sorted(table[1].tolist()[:2]) == [0, 1]
    assert hash_find(*table, keys_of([2, 5, 0, 7], impl), impl="reference").tolist() == [1, 0, -1, -1]


@pytest.mark.smoke
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
    assert hash_find(*table, keys_of([*keys, 10**9], impl), impl=impl).tolist() == [*range(64), -1]


@pytest.mark.parametrize("home", [0, 7])
@pytest.mark.parametrize("step", [1, 3, 7])
@pytest.mark.parametrize("impl", IMPLS)
def test_probes_walk_their_step_and_wrap_around_the_end(impl, step, home):
    """Twenty keys with one home among eight groups and one step fill it and the next two groups, in order."""
    keys = [key_with_hash(i << 40 | step << 32 | home) for i in range(20)]
    table = empty(64, impl)
    insert_in_walk(table, keys, impl)
    groups = table[1].view(8, 8).tolist()
    walk = [home, (home + step) % 8, (home + 2 * step) % 8]
    assert [sorted(groups[group]) for group in walk] == [
        list(range(8)),
        list(range(8, 16)),
        [-1, -1, -1, -1, 16, 17, 18, 19],
    ]
    assert int((table[1] >= 0).sum()) == 20
    absent = key_with_hash(99 << 40 | step << 32 | home)
    assert hash_find(*table, keys_of([*keys[::-1], absent], impl), impl=impl).tolist() == [
        *range(19, -1, -1),
        -1,
    ]


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
    for one in (table, hash_grow(*table, impl=impl)):
        assert torch.equal(hash_find(*one, keys_of(keys.flip(0).tolist(), impl), impl=impl), rows)
        assert hash_find(*one, keys_of((keys + 1).tolist(), impl), impl=impl).tolist() == [-1] * 192


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


@pytest.mark.parametrize("impl", IMPLS)
def test_growth_keeps_rows_and_leaves_the_old_table_alone(impl):
    keys = [*same_home(60), *EXTREMES[2:]]  # every slot is taken, the first and the last too
    table = empty(64, impl)
    hash_insert(*table, keys_of(keys, impl), 5, impl=impl)
    before = [part.clone() for part in table]
    grown = hash_grow(*table, impl=impl)
    assert [part.numel() for part in grown] == [128, 128]
    assert contents(*grown) == dict(zip(keys, range(5, 5 + len(keys)), strict=True))
    assert hash_find(*grown, keys_of(keys, impl), impl=impl).tolist() == list(range(5, 5 + len(keys)))
    assert all(torch.equal(now, then) for now, then in zip(table, before, strict=True))


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
        assert hash_find(*table, keys, impl="cpu").tolist() == list(range(45))
        assert hash_find(*hash_grow(*table, impl="cpu"), keys, impl="triton").tolist() == list(range(45))


def test_refuses_what_is_no_table():
    keys, (slot_keys, slot_rows) = torch.arange(3), empty(16)
    with pytest.raises(ValueError, match=r"power of two and at least 8, got \(12,\) and \(12,\)"):
        hash_find(slot_keys[:12], slot_rows[:12], keys)
    with pytest.raises(ValueError, match=r"at least 8, got \(4,\)"):
        hash_find(slot_keys[:4], slot_rows[:4], keys)
    with pytest.raises(ValueError, match=r"got \(16,\) and \(8,\)"):
        hash_insert(slot_keys, slot_rows[:8], keys, 0)
    with pytest.raises(ValueError, match=r"next_row must be in \[0, 2\*\*31\), got -1"):
        hash_insert(slot_keys, slot_rows, keys, -1)
    with pytest.raises(ValueError, match=r"free_rows must be in \[0, 2\*\*31\), got -1 to 4"):
        hash_insert(slot_keys, slot_rows, keys, 0, torch.tensor([4, -1]))


@pytest.mark.parametrize("impl", ["reference", "cpu"] if GPU else IMPLS)
def test_refuses_to_pass_the_last_row(impl):
    table = empty(16)
    with pytest.raises(ValueError, match="2 new keys from row 2147483647 pass"):
        hash_insert(*table, keys_of([1, 2, 3]), 2**31 - 1, keys_of([4]), impl=impl)
    assert contents(*table) == {}
    hash_insert(*table, keys_of([1]), 2**31 - 3, impl=impl)
    with pytest.raises(ValueError, match="3 new keys from row 2147483646 pass the last int32 row"):
        hash_insert(*table, keys_of([1, 2, 3, 4]), 2**31 - 2, impl=impl)
    rows, _ = hash_insert(*table, keys_of([1, 2, 3]), 2**31 - 2, impl=impl)
    assert rows.tolist() == [2**31 - 3, 2**31 - 2, 2**31 - 1]
