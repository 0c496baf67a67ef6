"""Cases of `bench_kernels` on rows: moves, sums in order and exact, draws, optimizers."""

from __future__ import annotations

from functools import cache, partial

import fbgemm
import numpy as np
import pandas as pd
import torch
from fbgemm import fbgemm_table
from kernel_cases import Case, case, close, moved, randn, randperm, rows_moved, same, zipf
from torch.nn import functional

from tritonrec import ops


def by_fbgemm(device, pooling, weight, offsets):
    """FBGEMM's lookup of rows in a table of these weights, on a CPU where it is installed."""
    table = cache(lambda: fbgemm_table(pooling, weight))

    def lookup(_weight, rows):
        with torch.no_grad():
            return table()(rows, offsets)

    return {"fbgemm": lookup} if device.type == "cpu" and fbgemm.installed() else {}


@case("torch_index_select", "torch_embedding", "fbgemm")
def gather_rows(device, seed):
    source, rows = randn(200_000, 64, seed=seed).to(device), zipf(65_536, 200_000, seed=seed).to(device)
    calls = {
        "tritonrec": ops.gather_rows,
        **by_fbgemm(device, "NONE", source, torch.arange(65_537)),
        "torch_index_select": lambda source, rows: source.index_select(0, rows),
        "torch_embedding": lambda source, rows: functional.embedding(rows, source),
    }
    exact = source[rows]
    least_bytes = rows_moved(source, rows) + moved(exact)
    return Case("65,536 Zipf rows of 200,000, dim 64", (source, rows), calls, same(exact), least_bytes)


@case("torch_index_copy")
def scatter_rows(device, seed):
    target, values = randn(200_000, 64, seed=seed).to(device), randn(65_536, 64, seed=seed).to(device)
    rows = randperm(200_000, seed)[:65_536].to(device)
    exact = target.clone()
    exact[rows] = values

    def ours(target, rows, values):
        ops.scatter_rows(target, rows, values)
        return target

    calls = {
        "tritonrec": ours,
        "torch_index_copy": lambda target, rows, values: target.index_copy_(0, rows, values),
    }
    arguments = target, rows, values
    return Case(
        "65,536 of 200,000 rows, dim 64",
        arguments,
        calls,
        same(exact),
        moved(values, values, rows),
        writes=(0,),
    )


@case(
    "gather_then_scatter", "torch_copies",
    workloads={f"{count}x{dim}": (count, dim) for count in (5_000, 50_000) for dim in (64, 192)},
)  # fmt: skip
def scatter_from_rows(device, seed, count, dim):
    """As the dual buffers are synchronised: rows of one matrix into another, in one pass."""
    height = 60_000
    values, destination = (randn(height, dim, seed=2 * seed + n).to(device) for n in range(2))
    source = randperm(height, seed)[:count].sort().values.to(device)  # as `intersect` has them
    rows = randperm(height, seed + 1)[:count].to(device)
    exact = destination.clone()
    exact[rows] = values[source]

    def one_pass(destination, rows, values, source):
        ops.scatter_rows(destination, rows, values, source=source)
        return destination

    def two_calls(destination, rows, values, source):
        ops.scatter_rows(destination, rows, ops.gather_rows(values, source))
        return destination

    def copies(destination, rows, values, source):
        return destination.index_copy_(0, rows, values.index_select(0, source))

    calls = {"tritonrec": one_pass, "gather_then_scatter": two_calls, "torch_copies": copies}
    workload = f"{count:,} rows of {dim} out of {height:,}"
    least_bytes = moved(rows, source, values[:count], values[:count])
    arguments = destination, rows, values, source
    return Case(workload, arguments, calls, same(exact), least_bytes, writes=(0,))


BAG = 8
POOLED = f"65,536 Zipf rows of 64 out of 200,000, bags of {BAG}"


@case("two_calls", "torch_embedding_bag", "fbgemm")
def pooled_lookup(device, seed):
    weight, ids = randn(200_000, 64, seed=seed).to(device), zipf(65_536, 200_000, seed=seed).to(device)
    bags, offsets = torch.arange(65_536, device=device) // BAG, torch.arange(0, 65_536, BAG, device=device)
    exact = weight.double()[ids].view(-1, BAG, 64).sum(1)

    def one_pass(weight, ids):
        return ops.segment_sum(weight, bags, len(offsets), source=ids)

    def two_calls(weight, ids):
        return ops.segment_sum(ops.gather_rows(weight, ids), bags, len(offsets))

    def embedding_bag(weight, ids):
        return functional.embedding_bag(ids, weight, offsets, mode="sum")

    calls = {"tritonrec": one_pass, "two_calls": two_calls, "torch_embedding_bag": embedding_bag}
    calls |= by_fbgemm(device, "SUM", weight, torch.arange(0, 65_537, BAG))
    least_bytes = rows_moved(weight, ids) + 4 * exact.numel()
    return Case(POOLED, (weight, ids), calls, close(exact), least_bytes)


@case("two_calls")
def pooled_gradient(device, seed):
    """The exact sums of a pooled lookup's gradient by row."""
    keys, rows, _ = ops.unique(zipf(65_536, 200_000, seed=seed).to(device))
    bags = torch.arange(65_536, device=device) // BAG
    gradient = randn(65_536 // BAG, 64, seed=seed).to(device)
    terms = (gradient.double() * 2.0**36).round().long()[bags]
    exact = torch.zeros(len(keys), 64, dtype=torch.int64, device=device).index_add_(0, rows, terms)

    def one_pass(gradient, rows):
        return ops.segment_sum(gradient, rows, len(keys), source=bags, consistency="batch")

    def two_calls(gradient, rows):
        return ops.segment_sum(ops.gather_rows(gradient, bags), rows, len(keys), consistency="batch")

    calls = {"tritonrec": one_pass, "two_calls": two_calls}
    return Case(POOLED, (gradient, rows), calls, same(exact), moved(gradient, rows, bags, exact))


SUMMED = {
    "micro_batch": (8_192, 1_682, 64, 1.05), "wide_rows": (8_192, 4_096, 256, 1.05),
    "large_batch": (262_144, 131_072, 64, 1.05), "hot_keys": (65_536, 16_384, 64, 1.5),
}  # fmt: skip
"""Occurrences, segments, dim, Zipf exponent of the keys."""


def summed(device, seed, occurrences, segments, dim, exponent):
    """Values, the segment of each, and the workload in words."""
    values = randn(occurrences, dim, seed=seed).to(device)
    of = zipf(occurrences, segments, exponent, seed).to(device)
    return values, of, f"{occurrences:,} rows of {dim} into {segments:,}, Zipf exponent {exponent}"


@case(
    "torch_index_add", "torch_index_add_all_threads", "numpy_add_at", "pandas_groupby", workloads=SUMMED
)  # fmt: skip
def segment_sum_window(device, seed, *sizes):
    """Sums in a fixed order; the sums of torch on a GPU have none."""
    values, of, workload = summed(device, seed, *sizes)
    segments, dim = sizes[1:3]

    def by_torch(values, of):
        return torch.zeros(segments, dim, device=device, dtype=values.dtype).index_add_(0, of, values)

    def by_numpy(values, of):
        out = np.zeros((segments, dim), np.float32)
        np.add.at(out, of.numpy(), values.numpy())
        return torch.from_numpy(out)

    def by_pandas(values, of):
        sums = pd.DataFrame(values.numpy()).groupby(of.numpy(), sort=False).sum()
        out = torch.zeros(segments, dim)
        out[torch.tensor(sums.index.to_numpy())] = torch.tensor(sums.to_numpy())
        return out

    calls = {
        "tritonrec": lambda values, of: ops.segment_sum(values, of, segments),
        "torch_index_add": by_torch,
    }
    if device.type == "cpu":
        calls |= {"torch_index_add_all_threads": by_torch, "numpy_add_at": by_numpy}
        calls["pandas_groupby"] = by_pandas
    check = close(by_torch(values.double(), of), atol=1e-1)
    return Case(workload, (values, of), calls, check, moved(values, of) + 4 * segments * dim)


@case("torch_int64_index_add", workloads=SUMMED)
def segment_sum_batch(device, seed, *sizes):
    """Exact sums, and what torch needs for the same integers."""
    values, of, workload = summed(device, seed, *sizes)
    segments, dim = sizes[1:3]

    def by_torch(values, of):
        terms = values.double().mul_(2.0**36).round_().long()
        return torch.zeros(segments, dim, dtype=torch.int64, device=device).index_add_(0, of, terms)

    calls = {
        "tritonrec": lambda values, of: ops.segment_sum(values, of, segments, consistency="batch"),
        "torch_int64_index_add": by_torch,
    }
    check = same(by_torch(values, of))
    return Case(workload, (values, of), calls, check, moved(values, of) + 8 * segments * dim)


@case()
def to_fixed_point(device, seed):
    values = randn(1 << 20, seed=seed).to(device)
    calls = {
        "tritonrec": ops.to_fixed_point,
        "torch": lambda values: values.double().mul_(2.0**36).round_().long(),
    }
    exact = (values.double() * 2.0**36).round().long()
    return Case("1,048,576 float32", (values,), calls, same(exact), moved(values, exact))


@case()
def from_fixed_point(device, seed):
    sums = (randn(1 << 20, seed=seed).double() * 2.0**40).long().to(device)
    calls = {
        "tritonrec": lambda sums: ops.from_fixed_point(sums, 3.0),
        "torch": lambda sums: sums.double().mul_(2.0**-36).div_(3.0).float(),
    }
    exact = (sums.double() * 2.0**-36 / 3.0).float()
    return Case("1,048,576 sums", (sums,), calls, same(exact), moved(sums, exact))


@case("int64_rows", "torch_int64")
def packed_rows(device, seed):
    """Sums of a batch's gradients, from the rank that made them into those of their owner."""
    distinct, inverse, _ = ops.unique(zipf(50_000, 1_000_000, seed=seed))
    gradients = randn(50_000, 64, scale=0.1, offset=0.01, seed=seed)
    sums = ops.segment_sum(gradients, inverse, len(distinct), consistency="batch").to(device)
    order = randperm(len(distinct), seed).to(device)
    poisoned = torch.full_like(sums, torch.iinfo(torch.int64).min)

    def ours(out, sums, order):
        return ops.add_packed_rows(out.zero_(), order, *ops.pack_rows(sums, order))

    def unpacked(out, sums, order):
        rows = ops.gather_rows(sums, order)
        return ops.segment_sum(rows, order, len(out), consistency="batch", out=out.zero_())

    def plain(out, sums, order):  # a sum that leaves int64 wraps around
        return out.zero_().index_add_(0, order, sums.index_select(0, order))

    calls = {"tritonrec": ours, "int64_rows": unpacked, "torch_int64": plain}
    share = len(ops.pack_rows(sums, order)[1]) / (4 * sums.numel())
    workload = (
        f"{len(distinct):,} sums of 64 rows of 50,000 Zipf ids, packed {share:.3f} x the bytes of float32"
    )
    least_bytes = moved(sums, sums, order)
    return Case(workload, (poisoned, sums, order), calls, same(sums), least_bytes, writes=(0,))


def by_reference(exact: torch.Tensor, keys: torch.Tensor, reference) -> torch.Tensor:
    """`exact`, of which every 128th row is compared with the reference, a loop in Python."""
    assert torch.equal(exact[::128], reference(keys[::128])), "not what the reference draws"
    return exact


@case("torch_uniform", "numpy_philox")
def initial_rows(device, seed):
    keys = torch.arange(16_384 * seed, 16_384 * (seed + 1))
    exact = by_reference(
        ops.initial_rows(7, 1, keys.flip(0), 64, 0.05).flip(0), keys,
        lambda some: ops.initial_rows(7, 1, some, 64, 0.05, impl="reference"),
    ).to(device)  # fmt: skip
    keys = keys.to(device)

    def check(got, keys):
        got = torch.as_tensor(got)
        assert got.shape == (16_384, 64) and got.abs().max() <= torch.tensor(0.05), "rows out of their range"
        assert abs(float(got.mean())) < 1e-3 and abs(float(got.std()) - 0.05 / 3**0.5) < 1e-3

    calls = {
        "tritonrec": lambda keys: ops.initial_rows(7, 1, keys, 64, 0.05),
        "torch_uniform": lambda keys: torch.empty(16_384, 64, device=device).uniform_(-0.05, 0.05),
    }
    if device.type == "cpu":
        philox = np.random.Generator(np.random.Philox(7))
        calls["numpy_philox"] = lambda keys: (philox.random((16_384, 64), np.float32) - 0.5) * 0.1
    workload = "16,384 rows of 64; peers draw as many numbers, not a function of the key"
    return Case(workload, (keys,), calls, check, moved(exact), checks={"tritonrec": same(exact)})


@case("torch_randint")
def random_indices(device, seed):
    ids = torch.arange(6_400 * seed, 6_400 * (seed + 1))
    exact = by_reference(
        ops.random_indices(7, 1, 3, ids.flip(0), ids.flip(0), 32, 100_000).flip(0), ids,
        lambda some: ops.random_indices(7, 1, 3, some, some, 32, 100_000, impl="reference"),
    ).to(device)  # fmt: skip
    ids = ids.to(device)

    def check(got, ids):
        assert got.shape == (6_400, 32) and int(got.min()) >= 0 and int(got.max()) < 100_000
        assert abs(float(got.double().mean()) / 50_000 - 1) < 0.01

    calls = {
        "tritonrec": lambda ids: ops.random_indices(7, 1, 3, ids, ids, 32, 100_000),
        "torch_randint": lambda ids: torch.randint(100_000, (6_400, 32), device=device),
    }
    workload = "6,400 tokens, 32 of 100,000 items; the peer's are no function of the token"
    return Case(workload, (ids,), calls, check, moved(exact), checks={"tritonrec": same(exact)})


def optimizer(device, seed, ours, theirs, states):
    """A sparse update of 8,192 of 100,000 rows; the exact one is the peer's in float64."""
    rows = randperm(100_000, seed)[:8_192].to(device)
    grad = randn(8_192, 64, seed=seed).to(device)
    tables = [randn(100_000, 64, seed=seed).to(device)]
    tables += [torch.full((100_000, width), 0.5 + seed / 8, device=device) for width in states]
    exact = [table.double() for table in tables]
    theirs(*exact, rows, grad.double())
    exact = [table[rows] for table in exact]

    def check(got, *_):
        for table, meant, before in zip(got, exact, tables, strict=True):
            torch.testing.assert_close(table[rows].double(), meant, rtol=1e-5, atol=1e-6)
            table.index_copy_(0, rows, before.index_select(0, rows))
            assert torch.equal(table, before), "a row that has no gradient changed"

    def updated(update, *arguments):
        update(*arguments)
        return arguments[: len(tables)]

    calls = {"tritonrec": partial(updated, ours), "torch": partial(updated, theirs)}
    least_bytes = moved(grad, rows) + sum(moved(each.float(), times=2) for each in exact)
    return Case(
        "8,192 of 100,000 rows of 64", (*tables, rows, grad), calls, check, least_bytes,
        writes=tuple(range(len(tables))),
    )  # fmt: skip


@case("exact_sums", "fbgemm")
def update_of_gradients(device, seed):
    """The gradient of each looked-up row, summed by id, then one row-wise Adagrad update of each row."""
    weight, ids = randn(200_000, 64, seed=seed).to(device), zipf(65_536, 200_000, seed=seed).to(device)
    gradient = randn(65_536, 64, scale=0.1, offset=0.0, seed=seed).to(device)
    state = torch.zeros(len(weight), 1, device=device)
    sums = torch.zeros_like(weight, dtype=torch.float64).index_add_(0, ids, gradient.double())
    exact = weight - 0.1 * sums / (sums.square().mean(1, keepdim=True).sqrt() + 1e-8)

    def ours(weight, state, gradient, ids, consistency="window"):
        distinct, inverse, _ = ops.unique(ids)
        sums = ops.segment_sum(gradient, inverse, len(distinct), consistency=consistency)
        if consistency == "batch":
            sums = ops.from_fixed_point(sums)
        ops.sparse_rowwise_adagrad(weight, state, distinct, sums, 0.1)
        return weight

    table = cache(lambda: fbgemm_table("NONE", weight))

    def looked_up(*_):
        """What comes before the clock starts, in a table as it was."""
        table().split_embedding_weights()[0].copy_(weight)
        table().split_optimizer_states()[0][0].zero_()
        return table()(ids, torch.arange(65_537)), gradient.clone()

    def backward(rows, gradient):
        rows.backward(gradient)
        return table().split_embedding_weights()[0]

    calls = {"tritonrec": ours, "exact_sums": partial(ours, consistency="batch")}
    if device.type == "cpu" and fbgemm.installed():
        calls["fbgemm"] = backward

    def check(got, *_):
        torch.testing.assert_close(got.double(), exact, rtol=1e-3, atol=1e-4)

    return Case(
        "65,536 gradients of Zipf rows of 200,000, dim 64", (weight, state, gradient, ids), calls, check,
        moved(gradient) + 2 * rows_moved(weight, ids), writes=(0, 1), prepare={"fbgemm": looked_up},
    )  # fmt: skip


@case()
def sparse_sgd(device, seed):
    def theirs(weight, rows, grad):
        weight.index_add_(0, rows, grad, alpha=-0.1)

    return optimizer(device, seed, lambda w, rows, grad: ops.sparse_sgd(w, rows, grad, 0.1), theirs, ())


@case()
def sparse_rowwise_adagrad(device, seed):
    def ours(weight, state, rows, grad):
        ops.sparse_rowwise_adagrad(weight, state, rows, grad, 0.1)

    def theirs(weight, state, rows, grad):
        total = state.index_select(0, rows) + grad.square().mean(1, keepdim=True)
        state.index_copy_(0, rows, total)
        weight.index_add_(0, rows, grad / (total.sqrt() + 1e-8), alpha=-0.1)

    return optimizer(device, seed, ours, theirs, (1,))


@case()
def sparse_adam(device, seed):
    def ours(weight, mean, square, rows, grad):
        ops.sparse_adam(weight, mean, square, rows, grad, 0.1, step=3)

    def theirs(weight, mean, square, rows, grad):
        m = mean.index_select(0, rows).mul_(0.9).add_(grad, alpha=0.1)
        s = square.index_select(0, rows).mul_(0.999).addcmul_(grad, grad, value=0.001)
        mean.index_copy_(0, rows, m)
        square.index_copy_(0, rows, s)
        rate = 0.1 / (1 - 0.9**3)
        weight.index_add_(0, rows, m / ((s / (1 - 0.999**3)).sqrt() + 1e-8), alpha=-rate)

    return optimizer(device, seed, ours, theirs, (64, 64))


@case()
def sparse_ftrl(device, seed):
    def ours(weight, linear, state, rows, grad):
        ops.sparse_ftrl(weight, linear, state, rows, grad, 0.1, 0.3, 0.1)

    def theirs(weight, linear, state, rows, grad):
        before = state.index_select(0, rows)
        total = before.addcmul(grad, grad)
        change = (total.sqrt() - before.sqrt()).div_(0.1).mul_(weight.index_select(0, rows))
        z = linear.index_select(0, rows).add_(grad).sub_(change)
        state.index_copy_(0, rows, total)
        linear.index_copy_(0, rows, z)
        weight.index_copy_(0, rows, (z.clamp(-0.3, 0.3) - z) / ((total.sqrt() + 0.1) / 0.1))

    return optimizer(device, seed, ours, theirs, (64, 64))
