"""Cases of `bench_kernels` on ids and rows: keys, tables, exact sums, optimizers."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from kernel_cases import Case, case, close, moved, randn, randperm, rows_moved, same, zipf
from torch.nn import functional

from tritonrec import ops


def murmur_torch(keys: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser in int64 arithmetic, whose products wrap as unsigned ones do."""
    h = keys
    for factor in (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64):
        h = (h ^ ((h >> 33) & 0x7FFFFFFF)) * factor
    return h ^ ((h >> 33) & 0x7FFFFFFF)


def owners_torch(keys: torch.Tensor, world_size: int) -> torch.Tensor:
    return (((murmur_torch(keys) >> 32) & 0xFFFFFFFF) * world_size) >> 32


@case
def bucketize(device, seed):
    keys = zipf(200_000, 1_000_000, seed=seed).to(device)
    owners = ops.owner_of(keys.cpu(), 8, impl="reference").to(device)
    order, counts = torch.sort(owners, stable=True).indices, torch.bincount(owners, minlength=8)

    def by_sort(keys):
        rank = owners_torch(keys, 8)
        return torch.sort(rank, stable=True).indices, torch.bincount(rank, minlength=8)

    def check(got, keys):
        assert torch.equal(got[0], order) and torch.equal(got[1], counts)

    calls = {"tritonrec": lambda keys: ops.bucketize(keys, 8), "torch_stable_sort": by_sort}
    return Case("200,000 Zipf keys to 8 ranks", (keys,), calls, check, moved(keys, order, counts))


@case
def murmur(device, seed):
    keys = zipf(200_000, 1_000_000, seed=seed).to(device)
    exact = ops.owner_of(keys.cpu(), 8, impl="reference").to(device)
    calls = {"tritonrec": lambda keys: ops.owner_of(keys, 8), "torch": lambda keys: owners_torch(keys, 8)}
    return Case("owners of 200,000 keys", (keys,), calls, same(exact), moved(keys, exact))


@case
def gather_rows(device, seed):
    source, rows = randn(200_000, 64, seed=seed).to(device), zipf(65_536, 200_000, seed=seed).to(device)
    calls = {
        "tritonrec": ops.gather_rows,
        "torch_index_select": lambda source, rows: source.index_select(0, rows),
        "torch_embedding": lambda source, rows: functional.embedding(rows, source),
    }
    exact = source[rows]
    least_bytes = rows_moved(source, rows) + moved(exact)
    return Case("65,536 Zipf rows of 200,000, dim 64", (source, rows), calls, same(exact), least_bytes)


@case
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


@case
def to_fixed_point(device, seed):
    values = randn(1 << 20, seed=seed).to(device)
    calls = {
        "tritonrec": ops.to_fixed_point,
        "torch": lambda values: values.double().mul_(2.0**36).round_().long(),
    }
    exact = (values.double() * 2.0**36).round().long()
    return Case("1,048,576 float32", (values,), calls, same(exact), moved(values, exact))


@case
def from_fixed_point(device, seed):
    sums = (randn(1 << 20, seed=seed).double() * 2.0**40).long().to(device)
    calls = {
        "tritonrec": lambda sums: ops.from_fixed_point(sums, 3.0),
        "torch": lambda sums: sums.double().mul_(2.0**-36).div_(3.0).float(),
    }
    exact = (sums.double() * 2.0**-36 / 3.0).float()
    return Case("1,048,576 sums", (sums,), calls, same(exact), moved(sums, exact))


@case
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


@case
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


@case
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


@case
def sparse_sgd(device, seed):
    def theirs(weight, rows, grad):
        weight.index_add_(0, rows, grad, alpha=-0.1)

    return optimizer(device, seed, lambda w, rows, grad: ops.sparse_sgd(w, rows, grad, 0.1), theirs, ())


@case
def sparse_rowwise_adagrad(device, seed):
    def ours(weight, state, rows, grad):
        ops.sparse_rowwise_adagrad(weight, state, rows, grad, 0.1)

    def theirs(weight, state, rows, grad):
        total = state.index_select(0, rows) + grad.square().mean(1, keepdim=True)
        state.index_copy_(0, rows, total)
        weight.index_add_(0, rows, grad / (total.sqrt() + 1e-8), alpha=-0.1)

    return optimizer(device, seed, ours, theirs, (1,))


@case
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


@case(gpu_only=True)
def unique(device, seed):
    keys = zipf(1_000_000, 10_000_000, seed=seed).to(device)
    expected = torch.unique(keys, return_counts=True)

    def check(got, keys):
        distinct, inverse, counts = got
        order = torch.argsort(distinct)
        assert torch.equal(distinct[inverse], keys)
        assert torch.equal(distinct[order], expected[0]) and torch.equal(counts[order], expected[1])

    calls = {
        "tritonrec": ops.unique,
        "torch_unique": lambda keys: torch.unique(keys, return_inverse=True, return_counts=True),
    }
    return Case("1,000,000 Zipf keys", (keys,), calls, check, moved(keys, keys, *expected))


@case(gpu_only=True)
def intersect(device, seed):
    keys = randperm(1 << 20, seed).to(device)
    left, right = keys[:100_000].clone(), keys[50_000:150_000].clone()

    def by_sort(left, right):
        ascending, order = torch.sort(right)
        place = torch.searchsorted(ascending, left).clamp_(max=len(right) - 1)
        positions = (ascending[place] == left).nonzero().flatten()
        return positions, order[place[positions]]

    def check(got, left, right):
        assert torch.equal(left[got[0]], right[got[1]])
        assert torch.equal(got[0].sort().values, torch.arange(50_000, 100_000, device=device))

    calls = {"tritonrec": ops.intersect, "torch_searchsorted": by_sort}
    return Case(
        "100,000 and 100,000 keys, 50,000 common",
        (left, right),
        calls,
        check,
        moved(left, right) + 16 * 50_000,
    )


@case(gpu_only=True)
def hash_find(device, seed):
    keys = torch.arange(786_432, device=device) * 0x9E3779B97F4A7C1
    slots = 1 << 20
    table = (
        torch.zeros(slots, dtype=torch.int64, device=device),
        torch.full((slots,), -1, dtype=torch.int32, device=device),
    )
    rows, _ = ops.hash_insert(*table, keys, 0)
    wanted = randperm(len(keys), seed)[:262_144].to(device)
    query = torch.cat([keys[wanted[:131_072]], -1 - keys[wanted[131_072:]]])
    ascending, order = torch.sort(keys)
    exact = torch.cat([rows[wanted[:131_072]], torch.full_like(rows[:131_072], -1)])

    def by_search(slots, found, query):
        place = torch.searchsorted(ascending, query).clamp_(max=len(keys) - 1)
        return torch.where(ascending[place] == query, rows[order[place]], -1)

    calls = {"tritonrec": ops.hash_find, "torch_searchsorted": by_search}
    workload = "262,144 lookups, half absent, 786,432 keys, load 0.75"
    return Case(workload, (*table, query), calls, same(exact), moved(query, exact))


@case(gpu_only=True)
def segment_sum(device, seed):
    values, segments = randn(262_144, 64, seed=seed).to(device), zipf(262_144, 131_072, seed=seed).to(device)

    def plain(values, segments):
        return torch.zeros(131_072, 64, device=device, dtype=values.dtype).index_add_(0, segments, values)

    calls = {
        "tritonrec": lambda values, segments: ops.segment_sum(values, segments, 131_072),
        "torch_index_add": plain,
    }
    exact = plain(values.double(), segments)
    return Case(
        "262,144 rows of 64 into 131,072 (the peer's sums have no order)", (values, segments), calls,
        close(exact, atol=1e-1), moved(values, segments) + 4 * exact.numel(),
    )  # fmt: skip
