"""Common keys of two buffers, by position: exactly the matches, in order of the left buffer."""

import numpy as np
import pytest
import torch
from conformance.guarded_memory import guarded_memory
from impls import IMPLS, on
from murmur_inverse import key_with_hash

from tritonrec.kernels.intersect.op import intersect

SMALLEST, LARGEST = -(2**63), 2**63 - 1


def oracle(left, right):
    """Every pair compared."""
    return [
        [i for i, key in enumerate(left) if key in right],
        [right.index(key) for key in left if key in right],
    ]


def check(left, right, impl):
    got = intersect(on(impl, left), on(impl, right), impl=impl)
    for part, expected in zip(got, oracle(left.tolist(), right.tolist()), strict=True):
        assert torch.equal(part.cpu(), torch.tensor(expected, dtype=torch.int64))


RNG = np.random.default_rng(2)
PAIRS = {
    "empty": ([], []),
    "left_empty": ([], [4, 5]),
    "right_empty": ([4, 5], []),
    "one_and_the_same": ([SMALLEST], [SMALLEST]),
    "one_and_another": ([0], [-1]),
    "extremes": ([LARGEST, 3, SMALLEST, 0, -1], [-1, SMALLEST, 7, LARGEST]),
    "disjoint": (range(100), range(100, 230)),
    "identical": (range(140), range(140)),
    "reversed": (range(140), range(139, -1, -1)),
    "left_longer": (RNG.permutation(300) - 150, RNG.permutation(90) - 45),
    "right_longer": (RNG.permutation(90) - 45, RNG.permutation(300) - 150),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("impl", IMPLS)
def test_equals_all_pairs(impl, pair):
    check(*(torch.tensor(np.asarray(keys, dtype=np.int64)) for keys in pair), impl)


@pytest.mark.parametrize("count", [127, 128, 129, 256, 257])
@pytest.mark.parametrize("impl", IMPLS)
def test_counts_around_a_block(impl, count):
    rng = np.random.default_rng(count)
    left, right = (torch.from_numpy(rng.choice(2 * count, count, replace=False)) for _ in range(2))
    check(left, right, impl)


@pytest.mark.parametrize("edge", [0, 2**20 - 1])
@pytest.mark.parametrize("impl", IMPLS)
def test_keys_that_share_a_home_and_wrap_around_the_end(impl, edge):
    keys = torch.tensor([key_with_hash(edge << 44 | i * 977 << 20 | edge) for i in range(90)])
    order = torch.randperm(60, generator=torch.Generator().manual_seed(6))
    check(keys[:60], keys[30:][order], impl)
    check(keys[:20], keys[10:][order], impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_lies_beyond_a_buffer_is_not_in_it(impl):
    """Lanes past the end of a block read as key 0; they must neither claim a slot nor match."""
    buffer = torch.zeros(600, dtype=torch.int64)
    buffer[:5] = torch.tensor([4, -1, 8, 9, 3])
    right = on(impl, buffer)[:5]
    left = on(impl, torch.tensor([0, 8]))
    assert [part.tolist() for part in intersect(left, right, impl=impl)] == [[1], [2]]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("left", "right"), [([5], [5, 5, 5, 9]), ([5, 5, 5, 9], [5]), ([3, 3, 5], [5, 3, 3, 5])]
)
def test_repeated_keys_give_positions_of_equal_keys_and_no_more_than_there_is_room_for(impl, left, right):
    left, right = on(impl, torch.tensor(left)), on(impl, torch.tensor(right))
    for padded in (False, True):
        with guarded_memory():
            in_left, in_right, *count = intersect(left, right, impl=impl, padded=padded)
        if padded:
            assert len(in_left) == len(in_right) == min(len(left), len(right)) >= int(count[0]) > 0
            in_left, in_right = in_left[: int(count[0])], in_right[: int(count[0])]
        assert len(in_left) and torch.equal(left[in_left], right[in_right])
