"""Segment sums beside torch, numpy and pandas; ratios come from the JSON report.

    pytest ci/benchmarks/bench_segment_sum.py

Every row is one thread, except those that say so, under identical inputs; every round has other values, and
its output is checked (`honest`). "batch" is compared with what torch needs for the same integers (scale,
round, convert, index_add_), and `test_cost_of_exactness` measures batch over window with alternating calls.
"""

import os
import statistics
import time

import numpy as np
import pandas as pd
import pytest
import torch
from honest import Given, by_turns, clocked, honest, scaled, time_rounds

from tritonrec.kernels.rows import segment_sum

# name: occurrences, segments, dim, Zipf exponent of the keys
WORKLOADS = {
    "micro_batch": (8_192, 1_682, 64, 1.05),
    "wide_rows": (8_192, 4_096, 256, 1.05),
    "large_batch": (262_144, 131_072, 64, 1.05),
    "hot_keys": (65_536, 16_384, 64, 1.5),
}
SCALE = 2.0**36


@pytest.fixture(scope="module", params=WORKLOADS)
def workload(request):
    occurrences, segments, dim, exponent = WORKLOADS[request.param]
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, segments + 1) ** exponent
    drawn = rng.choice(segments, occurrences, p=weights / weights.sum())
    values = rng.standard_normal((occurrences, dim), dtype=np.float32)
    return (
        request.param,
        torch.from_numpy(values),
        torch.from_numpy(rng.permutation(segments)[drawn]),
        segments,
    )


def window(values, segments, count):
    return segment_sum(values, segments, count)


def batch(values, segments, count):
    return segment_sum(values, segments, count, consistency="batch")


def torch_index_add(values, segments, count):
    return torch.zeros(count, values.shape[1]).index_add_(0, segments, values)


def torch_index_add_all_threads(values, segments, count):
    return torch_index_add(values, segments, count)


def torch_int64_index_add(values, segments, count):
    terms = values.double().mul_(SCALE).round_().long()
    return torch.zeros(count, values.shape[1], dtype=torch.int64).index_add_(0, segments, terms)


def numpy_add_at(values, segments, count):
    out = np.zeros((count, values.shape[1]), np.float32)
    np.add.at(out, segments.numpy(), values.numpy())
    return torch.from_numpy(out)


def pandas_groupby(values, segments, count):
    sums = pd.DataFrame(values.numpy()).groupby(segments.numpy(), sort=False).sum()
    out = torch.zeros(count, values.shape[1])
    out[torch.tensor(sums.index.to_numpy())] = torch.tensor(sums.to_numpy())
    return out


def describe(workload):
    name, values, segments, count = workload
    occurrences, dim = values.shape
    return {
        "workload": name,
        "occurrences": occurrences,
        "distinct": int(segments.unique().numel()),
        "segments": count,
        "dim": dim,
        "zipf": WORKLOADS[name][3],
        "least_bytes": 4 * occurrences * dim + 8 * occurrences,
        "versions": {"torch": torch.__version__, "numpy": np.__version__, "pandas": pd.__version__},
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def least_bytes(workload):
    """The terms in, float32 sums out; exact sums are twice as large."""
    _name, values, _segments, count = workload
    return describe(workload)["least_bytes"] + 4 * count * values.shape[1]


def timed(benchmark, contender, workload, check):
    _name, values, segments, count = workload
    honest(
        benchmark, contender, values, segments, count, fresh=scaled, check=check,
        least_bytes=least_bytes(workload),
    )  # fmt: skip


def check_window(got, values, segments, count, *_):
    exact = torch.zeros(count, values.shape[1], dtype=torch.float64)
    exact.index_add_(0, segments, values.double())
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=4e-2)


def check_batch(got, values, segments, count, *_):
    terms = (values.double() * SCALE).round().long()
    exact = torch.zeros(count, values.shape[1], dtype=torch.int64).index_add_(0, segments, terms)
    assert torch.equal(got, exact), "not the exact sums"


@pytest.mark.parametrize(
    "contender",
    [window, torch_index_add, torch_index_add_all_threads, numpy_add_at, pandas_groupby],
    ids=lambda f: f.__name__,
)
def test_window(benchmark, one_thread, workload, contender):
    name = workload[0]
    if contender is torch_index_add_all_threads:
        torch.set_num_threads(os.cpu_count() or 1)
    benchmark.group = f"segment_sum:window {name}"
    benchmark.extra_info.update(describe(workload), threads=torch.get_num_threads(), ours=contender is window)

    timed(benchmark, contender, workload, check_window)


@pytest.mark.parametrize("contender", [batch, torch_int64_index_add], ids=lambda f: f.__name__)
def test_batch(benchmark, one_thread, workload, contender):
    name = workload[0]
    benchmark.group = f"segment_sum:batch {name}"
    benchmark.extra_info.update(describe(workload), threads=1, ours=contender is batch)
    timed(benchmark, contender, workload, check_batch)


def test_cost_of_exactness(benchmark, one_thread, workload):
    """Batch over window into an accumulator that stands, as a micro-batch adds to its window."""
    name, values, segments, count = workload

    def into(values, segments, count, out):
        consistency = "batch" if out.dtype == torch.int64 else "window"
        segment_sum(values, segments, count, consistency=consistency, out=out)
        return out

    def rounds_of(dtype, check):
        def rounds(number):
            out = torch.zeros(count, values.shape[1], dtype=dtype)
            return Given(into, (*scaled(number, values, segments, count), out), check, writes=(3,))

        return rounds

    exact = rounds_of(torch.int64, check_batch)
    contenders = {"window": rounds_of(torch.float32, check_window), "batch": exact}
    seconds = by_turns(contenders, 21, least_bytes(workload), clocked(time.perf_counter))
    ratio = statistics.median(b / w for b, w in zip(seconds["batch"], seconds["window"], strict=True))
    benchmark.group = "cost of exactness"
    benchmark.extra_info.update(describe(workload), threads=1, batch_over_window=ratio)
    time_rounds(benchmark, exact, least_bytes(workload))
    print(f"\n{name}: batch over window {ratio:.2f}")
