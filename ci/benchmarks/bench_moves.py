"""Ops that take the rows of another matrix, beside the same work in two calls, and beside torch.

    pytest ci/benchmarks/bench_moves.py -s

One thread. Contenders take turns and are measured in CPU time, so that other work on the machine disturbs all
alike; a ratio is the median of all turns.
"""

import statistics
import time

import pytest
import torch

from tritonrec import ops

pytestmark = pytest.mark.usefixtures("one_thread")

HEIGHT = 60_000
TABLE, IDS, BAG, DIM = 200_000, 65_536, 8, 64
SEED = 0


def by_turns(benchmark, group, workload, ours, peers, turns):
    """Record and print each peer's time over that of `ours`."""
    calls = {"ours": ours, **peers}
    seconds = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            start = time.process_time()
            call()
            seconds[name].append(time.process_time() - start)
    ratios = {
        f"{name}_over_one_pass": statistics.median(
            theirs / mine for theirs, mine in zip(seconds[name], seconds["ours"], strict=True)
        )
        for name in peers
    }
    benchmark.group = group
    benchmark.extra_info.update(
        workload=workload, threads=1, seed=SEED, versions={"torch": torch.__version__}, **ratios
    )
    benchmark(ours)
    print(f"\n{workload}: {', '.join(f'{name} {ratio:.2f}' for name, ratio in ratios.items())}")


@pytest.mark.parametrize("dim", [64, 192])
@pytest.mark.parametrize("number", [5_000, 50_000])
def test_scatter_from_rows(benchmark, number, dim):
    """As the dual buffers are synchronised."""
    generator = torch.Generator().manual_seed(SEED)
    values, destination = (torch.randn(HEIGHT, dim, generator=generator) for _ in range(2))
    source = torch.randperm(HEIGHT, generator=generator)[:number].sort().values  # as `intersect` gives them
    rows = torch.randperm(HEIGHT, generator=generator)[:number]
    expected = destination.clone()
    expected[rows] = values[source]
    peers = {
        "gather_then_scatter": lambda: ops.scatter_rows(destination, rows, ops.gather_rows(values, source)),
        "torch_copies": lambda: destination.index_copy_(0, rows, values.index_select(0, source)),
    }
    workload = f"{number:,} rows of {dim} out of {HEIGHT:,}"
    by_turns(
        benchmark, "moves from rows to rows", workload,
        lambda: ops.scatter_rows(destination, rows, values, source=source), peers, 5 + 1_000_000 // number,
    )  # fmt: skip
    assert torch.equal(destination, expected)


@pytest.fixture
def bags():
    """(weight, Zipf ids, the bag of each, the offsets of all bags)."""
    generator = torch.Generator().manual_seed(SEED)
    weight = torch.randn(TABLE, DIM, generator=generator)
    ranks = torch.rand(IDS, generator=generator).pow(-4.0).clamp(max=2.0**40)
    places = torch.randperm(TABLE, generator=generator)
    ids = places[ranks.long() % TABLE]
    return weight, ids, torch.arange(IDS) // BAG, torch.arange(0, IDS, BAG)


WORKLOAD = f"{IDS:,} Zipf rows of {DIM} out of {TABLE:,}, bags of {BAG}"


def test_pooled_lookup(benchmark, bags):
    weight, ids, numbers, offsets = bags
    count = len(offsets)

    def ours():
        return ops.segment_sum(weight, numbers, count, source=ids)

    def two_calls():
        return ops.segment_sum(ops.gather_rows(weight, ids), numbers, count)

    def embedding_bag():
        return torch.nn.functional.embedding_bag(ids, weight, offsets, mode="sum")

    assert torch.equal(ours(), two_calls())
    torch.testing.assert_close(ours(), embedding_bag())
    peers = {"two_calls": two_calls, "embedding_bag": embedding_bag}
    by_turns(benchmark, "pooled lookup", WORKLOAD, ours, peers, 40)


def test_exact_gradient_of_a_pooled_lookup(benchmark, bags):
    _, ids, numbers, offsets = bags
    keys, rows, _ = ops.unique(ids)
    gradient = torch.randn(len(offsets), DIM, generator=torch.Generator().manual_seed(1))

    def ours():
        return ops.segment_sum(gradient, rows, len(keys), source=numbers, consistency="batch")

    def two_calls():
        return ops.segment_sum(ops.gather_rows(gradient, numbers), rows, len(keys), consistency="batch")

    assert torch.equal(ours(), two_calls())
    by_turns(benchmark, "gradient of a pooled lookup", WORKLOAD, ours, {"two_calls": two_calls}, 40)
