"""Results do not depend on the schedule: programs in any order, and interleaved at every access to memory."""

import contextlib
import importlib
import sys
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from murmur_inverse import key_with_hash
from schedules import scheduled

from tritonrec import ops
from tritonrec.kernels import dispatch

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU draws its own schedules"),
    pytest.mark.skipif(dispatch.emulated is not None, reason="the emulator draws its own schedules"),
]
EXTREMES = [-(2**63), 2**63 - 1, -1, 0]
# keys that meet: one home and step in the hash table, neighbouring homes in the scratch table
CLASHING = [key_with_hash(i << 40 | 3 << 32) for i in range(30)]
REPEATED = [5, *CLASHING[:4], 5, -1, 5, *CLASHING[:4], -1]
schedule = st.tuples(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([1, 2, 4, 8]))
any_key = st.one_of(st.sampled_from(EXTREMES + CLASHING), st.integers(-3, 3))


MODULES = [
    "tritonrec.kernels." + name
    for name in (
        "triton_scratch", "unique.triton_unique", "intersect.triton_intersect",
        "hash_table.triton_hash_table", "bucketize.triton_bucketize",
    )
]  # fmt: skip


@contextlib.contextmanager
def small_blocks():
    """Many programs of few lanes: as many as `set_block` says."""
    with contextlib.ExitStack() as stack:
        for name in MODULES:
            stack.enter_context(mock.patch.object(importlib.import_module(name), "BLOCK", 4))
        yield


def set_block(size):
    for name in MODULES:
        sys.modules[name].BLOCK = size


@pytest.fixture(autouse=True)
def _small_blocks():
    with small_blocks():
        yield


def contents(slot_keys, slot_rows):
    pairs = [(k, r) for k, r in zip(slot_keys.tolist(), slot_rows.tolist(), strict=True) if r >= 0]
    assert len(dict(pairs)) == len(pairs), "a key sits in two slots"
    return dict(pairs)


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@example(keys=REPEATED, drawn=(1, True, 2))
@example(keys=REPEATED, drawn=(3, True, 2))
@settings(max_examples=30)
@given(keys=st.lists(any_key, max_size=24), drawn=schedule)
def test_unique(keys, drawn):
    seed, interleave, block = drawn
    set_block(block)
    keys = torch.tensor(keys, dtype=torch.int64)
    with scheduled(seed, interleave):
        got = ops.unique(keys, impl="triton")
    assert_equal(got, ops.unique(keys, impl="reference"))


@settings(max_examples=15)
@given(
    left=st.lists(any_key, unique=True, max_size=30),
    right=st.lists(any_key, unique=True, max_size=30),
    drawn=schedule,
)
def test_intersect(left, right, drawn):
    seed, interleave, block = drawn
    set_block(block)
    left, right = (torch.tensor(keys, dtype=torch.int64) for keys in (left, right))
    with scheduled(seed, interleave):
        got = ops.intersect(left, right, impl="triton")
    assert_equal(got, ops.intersect(left, right, impl="reference"))


@pytest.mark.slow
@settings(max_examples=6)
@given(
    batches=st.lists(st.lists(any_key, unique=True, min_size=1, max_size=20), min_size=1, max_size=2),
    erased=st.lists(any_key, unique=True, max_size=20),
    drawn=schedule,
)
def test_hash_table(batches, erased, drawn):
    """Rows and contents are those of the reference; only the order inside the slots may differ."""
    seed, interleave, block = drawn
    set_block(block)
    tables = [
        (torch.zeros(64, dtype=torch.int64), torch.full((64,), -1, dtype=torch.int32)) for _ in range(2)
    ]
    next_row = 0
    for batch in [*batches, *batches[:1]]:
        keys, gone = (torch.tensor(one, dtype=torch.int64) for one in (batch, erased))
        found = []
        for table, impl in zip(tables, ("triton", "reference"), strict=True):
            with scheduled(seed, interleave):
                inserted = ops.hash_insert(*table, keys, next_row, impl=impl)
                here = ops.hash_find(*table, gone, impl=impl)
                found.append([*inserted, here, ops.hash_erase(*table, gone, impl=impl)])
                found[-1].append(ops.hash_find(*table, keys, impl=impl))
        assert_equal(*found)
        assert contents(*tables[0]) == contents(*tables[1])
        next_row += int(found[0][1].sum())
    with scheduled(seed, interleave):
        grown = ops.hash_grow(*tables[0], impl="triton")
    assert contents(*grown) == contents(*tables[1])


@pytest.mark.parametrize("interleave", [False, True])
def test_the_order_inside_the_slots_is_seen_to_differ(interleave):
    """The schedules are schedules: who takes the nearer slot depends on them, as the hash table says."""
    set_block(1)
    keys = torch.tensor(CLASHING[:12])
    orders = set()
    for seed in range(3):
        table = torch.zeros(64, dtype=torch.int64), torch.full((64,), -1, dtype=torch.int32)
        with scheduled(seed, interleave):
            ops.hash_insert(*table, keys, 0, impl="triton")
        orders.add(tuple(table[1].tolist()))
    assert len(orders) > 1
