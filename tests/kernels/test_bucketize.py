"""A key's owner is a pure function of the key; buckets keep the order their keys came in."""

import numpy as np
import pytest
import torch
from impls import HOST_TRITON, IMPLS, TRITON, on
from murmur_inverse import key_with_hash

from tritonrec.kernels import row_layout
from tritonrec.kernels.bucketize.op import bucketize, counting_sort, owner_of

SMALLEST, LARGEST = -(2**63), 2**63 - 1
MASK = 2**64 - 1
EDGES = torch.tensor([0, 1, -1, SMALLEST, LARGEST, 2**32, -(2**32), 0, -1])


def owner(key, world_size):
    """High half of the hash times the world, shifted back: unbounded integers, written out once more."""
    h = key & MASK
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
        h = (h ^ (h >> 33)) * multiplier & MASK
    return ((h >> 32) * world_size) >> 32


def check(keys, world_size, impl):
    owners = [owner(key, world_size) for key in keys.tolist()]
    order = sorted(range(len(owners)), key=owners.__getitem__)
    assert owner_of(on(impl, keys), world_size, impl=impl).tolist() == owners
    permutation, counts = (part.cpu() for part in bucketize(on(impl, keys), world_size, impl=impl))
    assert torch.equal(permutation, torch.tensor(order, dtype=torch.int64))
    assert torch.equal(counts, torch.tensor([owners.count(rank) for rank in range(world_size)]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 97])
@pytest.mark.parametrize("count", [0, 1, 60])
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_python_integers(impl, count, world_size):
    random = torch.randint(SMALLEST, LARGEST, (count,), generator=torch.Generator().manual_seed(count))
    check(torch.cat([random, EDGES])[:count] if count < 2 else torch.cat([random, EDGES]), world_size, impl)


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2049])
@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_counts_around_a_block(impl, count):
    check(torch.from_numpy(np.random.default_rng(count).zipf(1.3, count) % 99 - 50), 3, impl)


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_one_owner_takes_all_and_equal_keys_stay_in_order(impl):
    check(torch.full((300,), -5), 4, impl)


def check_sort(buckets, num_buckets, impl, count=None):
    valid = len(buckets) if count is None else min(max(count, 0), len(buckets))
    order = [*sorted(range(valid), key=buckets.tolist().__getitem__), *range(valid, len(buckets))]
    number = None if count is None else on(impl, torch.tensor(count))
    got = counting_sort(on(impl, buckets), num_buckets, count=number, impl=impl)
    permutation, counts = (part.cpu() for part in got)
    assert torch.equal(permutation, torch.tensor(order, dtype=torch.int64))
    assert torch.equal(counts, torch.bincount(buckets[:valid], minlength=num_buckets))


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 2049])
@pytest.mark.parametrize("impl", IMPLS)
def test_known_buckets_are_sorted(impl, count):
    """On an accelerator in passes over all buckets, or where they are many by `torch.sort`."""
    buckets = torch.from_numpy(np.random.default_rng(count).zipf(1.3, count))
    for num_buckets in (1, 5, 64, 65, 3000):
        check_sort(buckets % num_buckets, num_buckets, impl)


@pytest.mark.parametrize("num_buckets", [4, 100])
@pytest.mark.parametrize("impl", [HOST_TRITON])
def test_a_bucket_outside_leaves_a_device_its_memory(impl, num_buckets, monkeypatch):
    """There the error comes later, after kernels that must not follow the number."""
    failed = []
    monkeypatch.setattr(row_layout, "on_host", lambda tensor: False)
    monkeypatch.setattr(torch, "_assert_async", lambda passed, message: failed.append(not passed))
    buckets = torch.tensor([3, -1, 0, num_buckets, 3, 2**62, -(2**63), 1])
    permutation, counts = counting_sort(buckets, num_buckets, impl=impl)
    assert failed == [True] and counts[:4].tolist() == [1, 1, 0, 2] and int(counts.sum()) == 4
    assert permutation[:4].tolist() == [2, 7, 0, 4]


@pytest.mark.parametrize("impl", IMPLS)
def test_buckets_end_exactly_at_their_bounds(impl):
    """The hashes next to each boundary, and the largest and smallest of all."""
    halves = [0, 2**32 - 1] + [(rank * 2**32 + 4) // 5 + side for rank in range(1, 5) for side in (-1, 0)]
    keys = torch.tensor([key_with_hash(half << 32 | low) for half in halves for low in (0, 2**32 - 1)])
    owners = owner_of(on(impl, keys), 5, impl=impl).tolist()
    assert owners == [rank for rank in (0, 4, 0, 1, 1, 2, 2, 3, 3, 4) for _ in range(2)]


@pytest.mark.parametrize("impl", IMPLS)
def test_the_largest_world_does_not_wrap(impl):
    world_size = 2**31 - 1
    keys = torch.cat([EDGES, torch.tensor([key_with_hash(MASK), key_with_hash(2**63)])])
    expected = [owner(key, world_size) for key in keys.tolist()]
    assert owner_of(on(impl, keys), world_size, impl=impl).tolist() == expected
    assert expected[-2:] == [world_size - 1, world_size // 2]


@pytest.mark.parametrize("keys", [torch.arange(80_000), torch.arange(80_000) * 2**20 - 2**30])
def test_owners_are_balanced(keys):
    """Sequential and strided ids spread like random ones: chi-squared with 7 degrees, 1e-6 of the tail."""
    _, counts = bucketize(keys, 8)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 40.6
