"""Erasing leaves what a search needs, free rows are taken first, and rows of present keys can change."""

import pytest
import torch
from hash_tables import EXTREMES, contents, empty, in_walk, insert_in_walk, keys_of
from impls import IMPLS, on

from tritonrec.kernels.hash_table.errors import HashTableFullError
from tritonrec.kernels.hash_table.op import hash_erase, hash_find, hash_grow, hash_insert


@pytest.mark.parametrize("impl", IMPLS)
def test_erasing_empties_a_slot_where_searches_end_and_leaves_a_tombstone_where_they_go_on(impl):
    keys = in_walk(12)
    table = empty(64, impl)
    insert_in_walk(table, keys, impl)
    gone = keys_of([keys[9], keys[2], 777, keys[6]], impl)
    assert hash_erase(*table, gone, impl=impl).tolist() == [9, 2, -1, 6]
    groups = table[1].view(8, 8).tolist()
    assert sorted(groups[0]) == [-2, -2, 0, 1, 3, 4, 5, 7]
    assert sorted(groups[1]) == [-1, -1, -1, -1, -1, 8, 10, 11]
    rows = [0, 1, -1, 3, 4, 5, -1, 7, 8, -1, 10, 11]
    assert hash_find(*table, keys_of(keys, impl), impl=impl).tolist() == rows
    assert hash_erase(*table, gone, impl=impl).tolist() == [-1, -1, -1, -1]


@pytest.mark.parametrize("impl", IMPLS)
def test_the_leftover_of_a_key_beside_it_is_not_taken_for_it(impl):
    one, other = in_walk(2)
    table = empty(64, impl)
    hash_insert(*table, keys_of([one], impl), 0, impl=impl)
    hash_insert(*table, keys_of([other], impl), 1, impl=impl)
    hash_erase(*table, keys_of([one, other], impl), impl=impl)
    hash_insert(*table, keys_of([other], impl), 5, impl=impl)  # in the first slot, its leftover in the second
    assert hash_find(*table, keys_of([other], impl), impl=impl).tolist() == [5]
    assert hash_erase(*table, keys_of([other], impl), impl=impl).tolist() == [5]
    assert contents(*table) == {}


@pytest.mark.parametrize("impl", IMPLS)
def test_an_insert_reuses_a_tombstone_but_only_for_a_key_that_is_not_further_down(impl):
    keys = in_walk(20)
    table = empty(64, impl)
    insert_in_walk(table, keys, impl)
    hash_erase(*table, keys_of([keys[3], keys[12]], impl), impl=impl)
    further, new, newer = keys[17], *in_walk(2, start=20)
    rows, inserted = hash_insert(*table, keys_of([further, new, newer], impl), 20, impl=impl)
    assert rows.tolist() == [17, 20, 21] and inserted.tolist() == [False, True, True]
    groups = table[1].view(8, 8).tolist()
    assert sorted(groups[0] + groups[1]) == sorted({*range(16), 20, 21} - {3, 12})
    contents(*table)
    assert hash_erase(*table, keys_of([further], impl), impl=impl).tolist() == [17]
    assert hash_find(*table, keys_of([further, new], impl), impl=impl).tolist() == [-1, 20]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_table_of_tombstones_is_empty_and_fills_again(impl):
    keys, others = in_walk(16), in_walk(16, start=50)
    table = empty(16, impl)
    for batch, start in ((keys, 0), (others, 16), (EXTREMES, 32)):
        assert hash_find(*table, keys_of(others, impl), impl=impl).tolist() == [-1] * 16
        rows, _ = hash_insert(*table, keys_of(batch, impl), start, impl=impl)
        assert rows.tolist() == list(range(start, start + len(batch)))
        assert hash_erase(*table, keys_of(batch[::-1], impl), impl=impl).tolist() == rows.tolist()[::-1]
        assert contents(*table) == {}
    grown = hash_grow(*table, impl=impl)
    assert grown[1].tolist() == [-1] * 32


@pytest.mark.parametrize("impl", IMPLS)
def test_growth_drops_tombstones(impl):
    keys = in_walk(30)
    table = empty(64, impl)
    insert_in_walk(table, keys, impl)
    hash_erase(*table, keys_of(keys[::2], impl), impl=impl)
    assert (table[1] == -2).any()
    grown = hash_grow(*table, impl=impl)
    assert not (grown[1] == -2).any()
    assert contents(*grown) == dict(zip(keys[1::2], range(1, 30, 2), strict=True))
    assert hash_find(*grown, keys_of(keys, impl), impl=impl).tolist() == [
        row if row % 2 else -1 for row in range(30)
    ]


@pytest.mark.parametrize("leftover", EXTREMES)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_key_can_be_erased(impl, leftover):
    table = empty(8, impl, leftover)
    assert hash_erase(*table, keys_of(EXTREMES, impl), impl=impl).tolist() == [-1] * 6
    hash_insert(*table, keys_of(EXTREMES, impl), 0, impl=impl)
    hash_insert(*table, keys_of([50, 51], impl), 6, impl=impl)  # a full group: tombstones from here on
    assert hash_erase(*table, keys_of(EXTREMES[::-1], impl), impl=impl).tolist() == [5, 4, 3, 2, 1, 0]
    assert contents(*table) == {50: 6, 51: 7}
    assert hash_find(*table, keys_of(EXTREMES, impl), impl=impl).tolist() == [-1] * 6
    rows, inserted = hash_insert(*table, keys_of(EXTREMES, impl), 8, impl=impl)
    assert rows.tolist() == list(range(8, 14)) and inserted.all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("impl", IMPLS)
def test_new_keys_take_free_rows_first(impl, dtype):
    table = empty(64, impl)
    hash_insert(*table, keys_of([5, -9, 7], impl), 0, impl=impl)
    free = on(impl, torch.tensor([40, 9, 2**31 - 1], dtype=dtype))
    rows, inserted = hash_insert(*table, keys_of([11, 7, 2], impl), 3, free, impl=impl)
    assert rows.tolist() == [40, 2, 9]
    assert inserted.tolist() == [True, False, True]
    rows, _ = hash_insert(*table, keys_of([30, 5, 31, 32], impl), 3, free[2:], impl=impl)
    assert rows.tolist() == [2**31 - 1, 0, 3, 4]
    assert contents(*table) == {5: 0, -9: 1, 7: 2, 11: 40, 2: 9, 30: 2**31 - 1, 31: 3, 32: 4}
    assert hash_insert(*table, keys_of([5], impl), 2**31 - 1, free, impl=impl)[0].tolist() == [0]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_refused_insert_leaves_tombstones_as_they_were(impl):
    table = empty(16, impl)
    hash_insert(*table, keys_of(in_walk(16), impl), 0, impl=impl)
    hash_erase(*table, keys_of(in_walk(16)[3:14:5], impl), impl=impl)
    before = [part.clone() for part in table]
    with pytest.raises(HashTableFullError, match="4 keys do not fit"):
        hash_insert(*table, keys_of(in_walk(4, start=30), impl), 50, impl=impl)
    assert all(torch.equal(now, then) for now, then in zip(table, before, strict=True))
    assert hash_insert(*table, keys_of(in_walk(3, start=30), impl), 50, impl=impl)[1].all()
