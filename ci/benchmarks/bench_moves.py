"""Ops that take the rows of another matrix, beside the same work in two calls, and beside torch.

    pytest ci/benchmarks/bench_moves.py -s

One thread. Contenders take turns and are measured in CPU time, so that other work on the machine disturbs all
alike; a ratio is the median of all turns. Turns go through inputs of three seeds, and every output is checked
(`honest`).
"""

import statistics

import pytest
import torch
from honest import Given, by_turns, in_turn, time_rounds
from kernel_cases import close, moved, rows_moved, same

from tritonrec import ops

pytestmark = pytest.mark.usefixtures("one_thread")

HEIGHT = 60_000
TABLE, IDS, BAG, DIM = 200_000, 65_536, 8, 64
SEED = 0
SEEDS = range(SEED, SEED + 3)


def compare(benchmark, group, workload, contenders, variants, least_bytes, turns):
    """Record and print each peer's time over that of the first one, which is ours.

    A variant is the arguments of a seed, the positions that are written, and the check.
    """
    rounds = {
        call.__name__: in_turn(
            [Given(call, arguments, check, writes) for arguments, writes, check in variants]
        )
        for call in contenders
    }
    ours, *peers = rounds
    seconds = by_turns(rounds, turns, least_bytes)
    ratios = {
        f"{name}_over_one_pass": statistics.median(
            theirs / mine for theirs, mine in zip(seconds[name], seconds[ours], strict=True)
        )
        for name in peers
    }
    benchmark.group = group
    benchmark.extra_info.update(
        workload=workload, threads=1, seed=SEED, versions={"torch": torch.__version__}, **ratios
    )
    time_rounds(benchmark, rounds[ours], least_bytes)
    print(f"\n{workload}: {', '.join(f'{name} {ratio:.2f}' for name, ratio in ratios.items())}")


@pytest.mark.parametrize("dim", [64, 192])
@pytest.mark.parametrize("number", [5_000, 50_000])
def test_scatter_from_rows(benchmark, number, dim):
    """As the dual buffers are synchronised."""

    def one_pass(destination, rows, values, source):
        ops.scatter_rows(destination, rows, values, source=source)
        return destination

    def gather_then_scatter(destination, rows, values, source):
        ops.scatter_rows(destination, rows, ops.gather_rows(values, source))
        return destination

    def torch_copies(destination, rows, values, source):
        return destination.index_copy_(0, rows, values.index_select(0, source))

    variants = []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        values, destination = (torch.randn(HEIGHT, dim, generator=generator) for _ in range(2))
        source = torch.randperm(HEIGHT, generator=generator)[:number].sort().values  # as `intersect` has them
        rows = torch.randperm(HEIGHT, generator=generator)[:number]
        expected = destination.clone()
        expected[rows] = values[source]
        variants.append(((destination, rows, values, source), (0,), same(expected)))
    workload = f"{number:,} rows of {dim} out of {HEIGHT:,}"
    compare(
        benchmark, "moves from rows to rows", workload, (one_pass, gather_then_scatter, torch_copies),
        variants, moved(rows, source, values[:number], values[:number]), 5 + 1_000_000 // number,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bags():
    """Of each seed (weight, Zipf ids, the bag of each, the offsets of all bags)."""
    found = []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(TABLE, DIM, generator=generator)
        ranks = torch.rand(IDS, generator=generator).pow(-4.0).clamp(max=2.0**40)
        places = torch.randperm(TABLE, generator=generator)
        ids = places[ranks.long() % TABLE]
        found.append((weight, ids, torch.arange(IDS) // BAG, torch.arange(0, IDS, BAG)))
    return found


WORKLOAD = f"{IDS:,} Zipf rows of {DIM} out of {TABLE:,}, bags of {BAG}"


def test_pooled_lookup(benchmark, bags):
    def one_pass(weight, ids, numbers, offsets):
        return ops.segment_sum(weight, numbers, len(offsets), source=ids)

    def two_calls(weight, ids, numbers, offsets):
        return ops.segment_sum(ops.gather_rows(weight, ids), numbers, len(offsets))

    def embedding_bag(weight, ids, numbers, offsets):
        return torch.nn.functional.embedding_bag(ids, weight, offsets, mode="sum")

    variants, least_bytes = [], []
    for each in bags:
        weight, ids, *_ = each
        exact = weight.double()[ids].view(-1, BAG, DIM).sum(1)
        variants.append((each, (), close(exact, rtol=1e-5, atol=1e-5)))
        least_bytes.append(rows_moved(weight, ids) + 4 * exact.numel())
        assert torch.equal(one_pass(*each), two_calls(*each))
    contenders = one_pass, two_calls, embedding_bag
    compare(benchmark, "pooled lookup", WORKLOAD, contenders, variants, min(least_bytes), 40)


def test_exact_gradient_of_a_pooled_lookup(benchmark, bags):
    def one_pass(gradient, rows, numbers, keys):
        return ops.segment_sum(gradient, rows, len(keys), source=numbers, consistency="batch")

    def two_calls(gradient, rows, numbers, keys):
        return ops.segment_sum(ops.gather_rows(gradient, numbers), rows, len(keys), consistency="batch")

    variants, least_bytes = [], []
    for seed, (_, ids, numbers, offsets) in enumerate(bags):
        keys, rows, _ = ops.unique(ids)
        gradient = torch.randn(len(offsets), DIM, generator=torch.Generator().manual_seed(1 + seed))
        terms = (gradient.double() * 2.0**36).round().long()[numbers]
        exact = torch.zeros(len(keys), DIM, dtype=torch.int64).index_add_(0, rows, terms)
        variants.append(((gradient, rows, numbers, keys), (), same(exact)))
        least_bytes.append(moved(gradient, rows, numbers, exact))
    contenders = one_pass, two_calls
    compare(benchmark, "gradient of a pooled lookup", WORKLOAD, contenders, variants, min(least_bytes), 40)
