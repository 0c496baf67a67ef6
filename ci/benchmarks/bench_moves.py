"""`scatter_rows` with `source`, beside a gather and a scatter, as the dual buffers are synchronised.

    pytest ci/benchmarks/bench_moves.py -s

One thread. The two take turns and are measured in CPU time, so that other work on the machine disturbs both
alike; the ratio is the median of all turns.
"""

import statistics
import time

import pytest
import torch

from tritonrec import ops

HEIGHT = 60_000
SEED = 0


def gather_then_scatter(destination, rows, values, source):
    ops.scatter_rows(destination, rows, ops.gather_rows(values, source))


def torch_copies(destination, rows, values, source):
    destination.index_copy_(0, rows, values.index_select(0, source))


def one_pass(destination, rows, values, source):
    ops.scatter_rows(destination, rows, values, source=source)


@pytest.mark.parametrize("dim", [64, 192])
@pytest.mark.parametrize("number", [5_000, 50_000])
def test_scatter_from_rows(benchmark, number, dim):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    values, destination = (torch.randn(HEIGHT, dim, generator=generator) for _ in range(2))
    source = torch.randperm(HEIGHT, generator=generator)[:number].sort().values  # as `intersect` gives them
    rows = torch.randperm(HEIGHT, generator=generator)[:number]
    expected = destination.clone()
    expected[rows] = values[source]
    seconds = {contender: [] for contender in (gather_then_scatter, torch_copies, one_pass)}
    for _ in range(5 + 1_000_000 // number):
        for contender, times in seconds.items():
            start = time.process_time()
            contender(destination, rows, values, source)
            times.append(time.process_time() - start)
    assert torch.equal(destination, expected)
    ratios = {
        f"{peer.__name__}_over_one_pass": statistics.median(
            theirs / ours for theirs, ours in zip(seconds[peer], seconds[one_pass], strict=True)
        )
        for peer in (gather_then_scatter, torch_copies)
    }
    workload = f"{number:,} rows of {dim} out of {HEIGHT:,}"
    benchmark.group = "moves from rows to rows"
    benchmark.extra_info.update(
        workload=workload, threads=1, seed=SEED, versions={"torch": torch.__version__}, **ratios
    )
    benchmark(one_pass, destination, rows, values, source)
    print(f"\n{workload}: {', '.join(f'{name} {ratio:.2f}' for name, ratio in ratios.items())}")
    torch.set_num_threads(threads)
