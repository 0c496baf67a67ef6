"""Dedup beside torch, numpy and pandas: ``pytest ci/benchmarks/bench_unique.py``, ratios from its JSON.

One thread, identical inputs; every round has other keys, and its output is checked (`honest`). numpy and
torch sort and return the distinct keys ascending; pandas hashes and keeps the order of occurrence, and counts
in a second call, which is timed with it because a sparse update needs the counts.
"""

import numpy as np
import pandas as pd
import pytest
import torch
from honest import flipped, honest

from tritonrec.kernels.unique import unique

pytestmark = pytest.mark.usefixtures("one_thread")

# name: keys, Zipf exponent (None: uniform, all distinct), catalogue
WORKLOADS = {
    "zipf_1m": (1_000_000, 1.05, 10_000_000),
    "distinct_1m": (1_000_000, None, 1_000_000),
    "micro_batch_50k": (50_000, 1.05, 10_000_000),
}


@pytest.fixture(scope="module", params=WORKLOADS)
def workload(request):
    count, exponent, catalogue = WORKLOADS[request.param]
    rng = np.random.default_rng(0)
    if exponent is None:
        ranks = rng.permutation(catalogue)[:count]
    else:
        cumulative = np.cumsum(np.arange(1, catalogue + 1, dtype=np.float64) ** -exponent)
        ranks = np.searchsorted(cumulative, rng.random(count) * cumulative[-1])
    # ids are hashes of names, so neither their size nor their bits follow their popularity
    keys = ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return request.param, torch.from_numpy(keys.view(np.int64))


def tritonrec(keys):
    return unique(keys)


def torch_unique(keys):
    return torch.unique(keys, return_inverse=True, return_counts=True)


def numpy_unique(keys):
    return tuple(map(torch.from_numpy, np.unique(keys.numpy(), return_inverse=True, return_counts=True)))


def pandas_factorize(keys):
    inverse, distinct = pd.factorize(keys.numpy())
    counts = np.bincount(inverse, minlength=len(distinct))
    return tuple(map(torch.from_numpy, (distinct, inverse, counts)))


@pytest.mark.parametrize(
    "contender", [tritonrec, torch_unique, numpy_unique, pandas_factorize], ids=lambda f: f.__name__
)
def test_unique(benchmark, workload, contender):
    name, keys = workload
    expected_keys, expected_counts = np.unique(keys.numpy(), return_counts=True)

    def check(output, keys):
        distinct, inverse, counts = output
        order = torch.argsort(distinct)
        assert torch.equal(distinct[inverse], keys)
        assert len(distinct) == len(expected_keys)
        assert bool((distinct[order].diff() > 0).all())
        assert torch.equal(counts.sort().values, torch.from_numpy(np.sort(expected_counts)))
        assert torch.equal(counts, torch.bincount(inverse))

    benchmark.group = f"unique {name}"
    benchmark.extra_info.update(
        ours=contender is tritonrec,
        workload=f"{len(keys):,} keys, {len(expected_keys):,} distinct",
        zipf=WORKLOADS[name][1],
        catalogue=WORKLOADS[name][2],
        threads=1,
        versions={"torch": torch.__version__, "numpy": np.__version__, "pandas": pd.__version__},
    )
    # keys in, the inverse and the distinct keys with their counts out
    least_bytes = 16 * len(keys) + 16 * len(expected_keys)
    honest(benchmark, contender, keys, fresh=flipped, check=check, least_bytes=least_bytes)
