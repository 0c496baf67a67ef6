"""Common keys of two buffers beside numpy, torch and a dict: ``pytest ci/benchmarks/bench_intersect.py``.

One thread, identical inputs, distinct keys, half of each buffer in the other; every round has other keys,
and its output is checked (`honest`). All return the positions in both buffers; numpy and torch in their own
order.
"""

import numpy as np
import pytest
import torch
from honest import flipped, honest

from tritonrec.kernels.intersect import intersect

pytestmark = pytest.mark.usefixtures("one_thread")

# name: keys of either buffer, share of them in the other one
WORKLOADS = {"100k_half": (100_000, 0.5), "10k_half": (10_000, 0.5)}


@pytest.fixture(scope="module", params=WORKLOADS)
def workload(request):
    count, share = WORKLOADS[request.param]
    rng = np.random.default_rng(0)
    common = int(count * share)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, 3 * count))
    keys = rng.permutation(keys)
    left, right = keys[:count], keys[count - common : 2 * count - common]
    return request.param, torch.from_numpy(rng.permutation(left)), torch.from_numpy(rng.permutation(right))


def tritonrec(left, right):
    return intersect(left, right)


def numpy_intersect1d(left, right):
    _, *positions = np.intersect1d(left.numpy(), right.numpy(), assume_unique=True, return_indices=True)
    return tuple(map(torch.from_numpy, positions))


def torch_isin(left, right):
    """isin on either side, then the matches of both sides brought together by sorting them."""
    left_positions = torch.isin(left, right, assume_unique=True).nonzero().flatten()
    right_positions = torch.isin(right, left, assume_unique=True).nonzero().flatten()
    left_order = torch.argsort(left[left_positions])
    right_order = torch.argsort(right[right_positions])
    return left_positions[left_order], right_positions[right_order]


def torch_searchsorted(left, right):
    """Both sides' matches from one sort of the right buffer."""
    ascending, order = torch.sort(right)
    place = torch.searchsorted(ascending, left).clamp_(max=len(right) - 1)
    left_positions = (ascending[place] == left).nonzero().flatten()
    return left_positions, order[place[left_positions]]


def python_dict(left, right):
    position_of = {key: position for position, key in enumerate(right.tolist())}
    found = [position_of.get(key, -1) for key in left.tolist()]
    matched = torch.tensor(found)
    left_positions = (matched >= 0).nonzero().flatten()
    return left_positions, matched[left_positions]


@pytest.mark.parametrize(
    "contender",
    [tritonrec, numpy_intersect1d, torch_isin, torch_searchsorted, python_dict],
    ids=lambda f: f.__name__,
)
def test_intersect(benchmark, workload, contender):
    name, left, right = workload
    expected = np.flatnonzero(np.isin(left.numpy(), right.numpy()))

    def check(output, left, right):
        left_positions, right_positions = output
        assert torch.equal(left[left_positions], right[right_positions])
        assert torch.equal(left_positions.sort().values, torch.from_numpy(expected))

    benchmark.group = f"intersect {name}"
    benchmark.extra_info.update(
        ours=contender is tritonrec,
        workload=f"{len(left):,} and {len(right):,} keys, {len(expected):,} common",
        threads=1,
        versions={"torch": torch.__version__, "numpy": np.__version__},
    )
    least_bytes = 8 * (len(left) + len(right)) + 16 * len(expected)
    honest(benchmark, contender, left, right, fresh=flipped, check=check, least_bytes=least_bytes)
