"""`intersect` over the table that `unique` leaves finds what it finds over one of its own."""

import pytest
import torch
from impls import IMPLS, TRITON, on
from test_unique import KEYS, colliding

from tritonrec import ops


def check(left, keys, impl, count=None):
    """The chain of a step: keys received, their distinct ones, those that the last buffer `left` has too."""
    left, keys = on(impl, left), on(impl, keys)
    count = None if count is None else on(impl, torch.tensor(count))
    right, *rest, number, table = ops.unique(keys, padded=True, table=True, count=count, impl=impl)
    plain = ops.unique(keys, padded=True, count=count, impl=impl)
    for ours, expected in zip((right, *rest, number), plain, strict=True):
        assert torch.equal(ours, expected)
    expected = ops.intersect(left, right, padded=True, right_count=number, impl="reference")
    found = ops.intersect(left, right, padded=True, right_count=number, table=table, impl=impl)
    shorter = ops.intersect(left, right, right_count=number, table=table, impl=impl)
    common = int(expected[2])
    for ours, short, theirs in zip(found, shorter, expected, strict=False):
        assert torch.equal(ours, theirs) and torch.equal(short, theirs[:common])
    assert int(found[2]) == common
    return right, int(number), table


@pytest.mark.parametrize("name", ["empty", "one", "extremes", "all_equal", "skewed", "repeat_at_end"])
@pytest.mark.parametrize("impl", IMPLS)
def test_the_matches_are_the_same(impl, name):
    keys = KEYS[name]
    left = torch.cat([keys.unique().flip(0)[::2], torch.tensor([2**41, -(2**40)])])
    check(left, keys, impl)
    check(left[:0], keys, impl)
    check(left, keys, impl, count=len(keys) // 2)
    check(left, keys, impl, count=0)


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_keys_that_share_a_home(impl, high):
    distinct = colliding(70, high)
    order = torch.randint(10, 70, (300,), generator=torch.Generator().manual_seed(1))
    check(distinct[:40], distinct[order], impl)


@pytest.mark.parametrize("impl", [TRITON])
def test_a_table_has_the_position_of_every_distinct_key_once(impl):
    _right, number, table = check(torch.arange(-9, 9), KEYS["skewed"], impl)
    assert table.dtype == torch.int32 and len(table) == 1024  # a power of two for the keys, not the distinct
    assert torch.equal(table[table != -1].sort().values.cpu(), torch.arange(number, dtype=torch.int32))


@pytest.mark.parametrize("impl", [TRITON])
def test_a_table_of_other_keys_leads_to_no_other_memory(impl):
    left = on(impl, torch.arange(300))
    right = left[:20]  # what lies behind it would match
    none = on(impl, torch.full((32,), -1, dtype=torch.int32))
    assert [len(part) for part in ops.intersect(left, right, table=none, impl=impl)] == [0, 0]
    wild = on(impl, torch.tensor([20, 25, 299, 7], dtype=torch.int32))
    here, there = ops.intersect(left, right, table=wild, impl=impl)
    assert here.tolist() == there.tolist() and set(there.tolist()) <= {7}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": torch.zeros(4)}, r"^table must be \(S,\) int32, got shape \(4,\) torch.float32"),
        ({"table": torch.zeros(2, 2, dtype=torch.int32)}, r"^table must be \(S,\) int32"),
        (
            {"table": torch.zeros(6, dtype=torch.int32)},
            "^the slots of a table are a power of two, or none: got 6",
        ),
    ],
)
def test_a_bad_table_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        ops.intersect(torch.arange(3), torch.arange(4), **change)


def test_a_table_without_padding_is_refused():
    with pytest.raises(ValueError, match=r"^unique gives its table with padded=True"):
        ops.unique(torch.arange(3), table=True)
