"""Dedup in order of first occurrence: the same integers from every implementation, for any 64-bit keys."""

import numpy as np
import pytest
import torch
from impls import IMPLS, on
from murmur_inverse import key_with_hash

from tritonrec.kernels.unique.numba_unique import FIRST_KEYS
from tritonrec.kernels.unique.op import unique

SMALLEST, LARGEST = -(2**63), 2**63 - 1


def oracle(keys):
    """What a reader would write with a list: distinct keys, where each went, how often."""
    distinct = list(dict.fromkeys(keys))
    place = {key: position for position, key in enumerate(distinct)}
    return distinct, [place[key] for key in keys], [keys.count(key) for key in distinct]


def check(keys, impl):
    got = [part.cpu() for part in unique(on(impl, keys), impl=impl)]
    for part, expected in zip(got, oracle(keys.tolist()), strict=True):
        assert torch.equal(part, torch.tensor(expected, dtype=torch.int64))


def colliding(count, high):
    """Keys whose highest 20 and lowest 20 hash bits are all 1 if `high`, else all 0."""
    edge = 2**20 - 1 if high else 0
    return torch.tensor([key_with_hash(edge << 44 | i * 977 << 20 | edge) for i in range(count)])


RNG = np.random.default_rng(3)
KEYS = {
    "empty": [],
    "one": [SMALLEST],
    "extremes": [LARGEST, SMALLEST, 0, -1, LARGEST, SMALLEST, SMALLEST, 1, 0],
    "all_equal": [-7] * 300,
    "all_distinct": RNG.permutation(400) - 200,
    "skewed": RNG.zipf(1.2, 500) % 40 - 20,
    "repeat_at_end": [*range(260), 259],
}
KEYS = {name: torch.tensor(np.asarray(keys, dtype=np.int64)) for name, keys in KEYS.items()}


@pytest.mark.smoke
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_a_dict(impl, keys):
    check(keys, impl)


@pytest.mark.parametrize("count", [127, 128, 129, 255, 256, 257])
@pytest.mark.parametrize("impl", IMPLS)
def test_counts_around_a_block(impl, count):
    check(torch.from_numpy(np.random.default_rng(count).integers(-50, 50, count)), impl)


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_keys_that_share_a_home_and_wrap_around_the_end(impl, high):
    distinct = colliding(70, high)
    order = torch.randint(70, (300,), generator=torch.Generator().manual_seed(1))
    check(distinct[order], impl)


@pytest.mark.parametrize("distinct", [FIRST_KEYS - 1, FIRST_KEYS, FIRST_KEYS + 1, 60_000])
def test_tables_grow(distinct):
    rng = np.random.default_rng(distinct)
    keys = torch.from_numpy(rng.permutation(np.concatenate([np.arange(distinct), np.arange(distinct)[::3]])))
    for got, expected in zip(unique(keys * -977), unique(keys * -977, impl="reference"), strict=True):
        assert torch.equal(got, expected)


def test_colliding_keys_survive_growth():
    keys = torch.cat([colliding(300, True), torch.arange(2 * FIRST_KEYS), colliding(300, True)])
    for got, expected in zip(unique(keys), unique(keys, impl="reference"), strict=True):
        assert torch.equal(got, expected)


def test_a_burst_of_new_keys_after_few():
    """Growth sizes the table by the rate of new keys; results hold when that rate jumps."""
    keys = torch.cat([torch.zeros(50_000, dtype=torch.int64), torch.arange(40_000)])
    for got, expected in zip(unique(keys), unique(keys, impl="reference"), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("size", [2**31, 2**31 - 1])
def test_more_keys_than_positions_have_numbers_for_are_refused(size):
    keys = torch.empty(size, dtype=torch.int64, device="meta")
    if size < 2**31:
        assert unique(keys, padded=True)[1].shape == (size,)
    else:
        with pytest.raises(ValueError, match=r"unique takes fewer than 2\*\*31 keys, got 2147483648"):
            unique(keys, padded=True)
