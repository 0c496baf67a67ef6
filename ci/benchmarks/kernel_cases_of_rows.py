"""Cases of `bench_kernels` on ids and rows: keys, tables, exact sums, optimizers."""

from __future__ import annotations

import numpy as np
import torch
from kernel_cases import SEED, Case, case, close, randn, same, zipf
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
def bucketize(device):
    keys = zipf(200_000, 1_000_000).to(device)
    owners = ops.owner_of(keys, 8)

    def by_sort():
        rank = owners_torch(keys, 8)
        return torch.sort(rank, stable=True).indices, torch.bincount(rank, minlength=8)

    def check(got):
        permutation, counts = got
        assert torch.equal(counts, torch.bincount(owners, minlength=8))
        assert torch.equal(permutation, torch.sort(owners, stable=True).indices)

    calls = {"tritonrec": lambda: ops.bucketize(keys, 8), "torch_stable_sort": by_sort}
    return Case("200,000 Zipf keys to 8 ranks", calls, check)


@case
def murmur(device):
    keys = zipf(200_000, 1_000_000).to(device)
    exact = ops.owner_of(keys.cpu(), 8, impl="reference")
    calls = {"tritonrec": lambda: ops.owner_of(keys, 8), "torch": lambda: owners_torch(keys, 8)}
    return Case("owners of 200,000 keys", calls, same(exact))


@case
def gather_rows(device):
    source, rows = randn(200_000, 64).to(device), zipf(65_536, 200_000).to(device)
    calls = {
        "tritonrec": lambda: ops.gather_rows(source, rows),
        "torch_index_select": lambda: source.index_select(0, rows),
        "torch_embedding": lambda: functional.embedding(rows, source),
    }
    return Case("65,536 Zipf rows of 200,000, dim 64", calls, same(source[rows]))


@case
def scatter_rows(device):
    target, values = randn(200_000, 64).to(device), randn(65_536, 64).to(device)
    rows = torch.randperm(200_000, generator=torch.Generator().manual_seed(SEED))[:65_536].to(device)
    exact = target.clone()
    exact[rows] = values

    def ours():
        ops.scatter_rows(target, rows, values)
        return target

    calls = {"tritonrec": ours, "torch_index_copy": lambda: target.index_copy_(0, rows, values)}
    return Case("65,536 of 200,000 rows, dim 64", calls, same(exact))


@case
def to_fixed_point(device):
    values = randn(1 << 20).to(device)
    calls = {
        "tritonrec": lambda: ops.to_fixed_point(values),
        "torch": lambda: values.double().mul_(2.0**36).round_().long(),
    }
    return Case("1,048,576 float32", calls, same((values.double() * 2.0**36).round().long()))


@case
def from_fixed_point(device):
    sums = (randn(1 << 20).double() * 2.0**40).long().to(device)
    calls = {
        "tritonrec": lambda: ops.from_fixed_point(sums, 3.0),
        "torch": lambda: sums.double().mul_(2.0**-36).div_(3.0).float(),
    }
    return Case("1,048,576 sums", calls, same((sums.double() * 2.0**-36 / 3.0).float()))


@case
def packed_rows(device):
    """Sums of a batch's gradients, from the rank that made them into those of their owner."""
    distinct, inverse, _ = ops.unique(zipf(50_000, 1_000_000))
    gradients = randn(50_000, 64, scale=0.1, offset=0.01)
    sums = ops.segment_sum(gradients, inverse, len(distinct), consistency="batch").to(device)
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(SEED)).to(device)
    into = {name: torch.zeros_like(sums) for name in ("tritonrec", "int64_rows", "torch_int64")}

    def ours(out):
        return ops.add_packed_rows(out, order, *ops.pack_rows(sums, order))

    def unpacked(out):
        rows = ops.gather_rows(sums, order)
        return ops.segment_sum(rows, order, len(out), consistency="batch", out=out)

    def plain(out):  # a sum that leaves int64 wraps around
        return out.index_add_(0, order, sums.index_select(0, order))

    calls = {
        name: lambda call=call, out=into[name]: call(out.zero_())
        for name, call in zip(into, (ours, unpacked, plain), strict=True)
    }
    share = len(ops.pack_rows(sums, order)[1]) / (4 * sums.numel())
    workload = (
        f"{len(distinct):,} sums of 64 rows of 50,000 Zipf ids, packed {share:.3f} x the bytes of float32"
    )
    return Case(workload, calls, same(sums))


@case
def initial_rows(device):
    keys = torch.arange(16_384, device=device)
    exact = ops.initial_rows(7, 1, keys.cpu(), 64, 0.05, impl="reference")

    def check(got):
        got = torch.as_tensor(got).cpu()
        assert got.shape == (16_384, 64) and got.abs().max() <= 0.05
        assert abs(float(got.mean())) < 1e-3 and abs(float(got.std()) - 0.05 / 3**0.5) < 1e-3

    same(exact)(ops.initial_rows(7, 1, keys, 64, 0.05))
    calls = {
        "tritonrec": lambda: ops.initial_rows(7, 1, keys, 64, 0.05),
        "torch_uniform": lambda: torch.empty(16_384, 64, device=device).uniform_(-0.05, 0.05),
    }
    if device.type == "cpu":
        philox = np.random.Generator(np.random.Philox(7))
        calls["numpy_philox"] = lambda: (philox.random((16_384, 64), np.float32) - 0.5) * 0.1
    return Case("16,384 rows of 64; peers draw as many numbers, not a function of the key", calls, check)


@case
def random_indices(device):
    ids = torch.arange(6_400, device=device)

    def check(got):
        got = torch.as_tensor(got)
        assert got.shape == (6_400, 32) and int(got.min()) >= 0 and int(got.max()) < 100_000
        assert abs(float(got.double().mean()) / 50_000 - 1) < 0.01

    calls = {
        "tritonrec": lambda: ops.random_indices(7, 1, 3, ids, ids, 32, 100_000),
        "torch_randint": lambda: torch.randint(100_000, (6_400, 32), device=device),
    }
    return Case("6,400 tokens, 32 of 100,000 items; the peer's are no function of the token", calls, check)


def optimizer(device, ours, theirs, states):
    """A sparse update of 8,192 of 100,000 rows; both update copies that start alike."""
    rows = torch.randperm(100_000, generator=torch.Generator().manual_seed(SEED))[:8_192].to(device)
    grad = randn(8_192, 64).to(device)
    tables = {name: [randn(100_000, 64).to(device)] for name in ("tritonrec", "torch")}
    for name in tables:
        tables[name] += [torch.full((100_000, width), 0.5, device=device) for width in states]
    calls = {
        "tritonrec": lambda: ours(*tables["tritonrec"], rows, grad),
        "torch": lambda: theirs(*tables["torch"], rows, grad),
    }
    for call in calls.values():
        call()
    torch.testing.assert_close(tables["tritonrec"], tables["torch"], rtol=1e-5, atol=1e-6)
    return Case("8,192 of 100,000 rows of 64", calls, lambda got: None)


@case
def sparse_sgd(device):
    def theirs(weight, rows, grad):
        weight.index_add_(0, rows, grad, alpha=-0.1)

    return optimizer(device, lambda w, rows, grad: ops.sparse_sgd(w, rows, grad, 0.1), theirs, ())


@case
def sparse_rowwise_adagrad(device):
    def ours(weight, state, rows, grad):
        ops.sparse_rowwise_adagrad(weight, state, rows, grad, 0.1)

    def theirs(weight, state, rows, grad):
        total = state.index_select(0, rows) + grad.square().mean(1, keepdim=True)
        state.index_copy_(0, rows, total)
        weight.index_add_(0, rows, grad / (total.sqrt() + 1e-8), alpha=-0.1)

    return optimizer(device, ours, theirs, (1,))


@case
def sparse_adam(device):
    def ours(weight, mean, square, rows, grad):
        ops.sparse_adam(weight, mean, square, rows, grad, 0.1, step=3)

    def theirs(weight, mean, square, rows, grad):
        m = mean.index_select(0, rows).mul_(0.9).add_(grad, alpha=0.1)
        s = square.index_select(0, rows).mul_(0.999).addcmul_(grad, grad, value=0.001)
        mean.index_copy_(0, rows, m)
        square.index_copy_(0, rows, s)
        rate = 0.1 / (1 - 0.9**3)
        weight.index_add_(0, rows, m / ((s / (1 - 0.999**3)).sqrt() + 1e-8), alpha=-rate)

    return optimizer(device, ours, theirs, (64, 64))


@case(gpu_only=True)
def unique(device):
    keys = zipf(1_000_000, 10_000_000).to(device)
    expected = torch.unique(keys, return_counts=True)

    def check(got):
        distinct, inverse, counts = got
        order = torch.argsort(distinct)
        assert torch.equal(distinct[inverse], keys)
        assert torch.equal(distinct[order], expected[0]) and torch.equal(counts[order], expected[1])

    calls = {
        "tritonrec": lambda: ops.unique(keys),
        "torch_unique": lambda: torch.unique(keys, return_inverse=True, return_counts=True),
    }
    return Case("1,000,000 Zipf keys", calls, check)


@case(gpu_only=True)
def intersect(device):
    keys = torch.randperm(1 << 20, generator=torch.Generator().manual_seed(SEED)).to(device)
    left, right = keys[:100_000], keys[50_000:150_000]

    def by_sort():
        ascending, order = torch.sort(right)
        place = torch.searchsorted(ascending, left).clamp_(max=len(right) - 1)
        positions = (ascending[place] == left).nonzero().flatten()
        return positions, order[place[positions]]

    def check(got):
        assert torch.equal(left[got[0]], right[got[1]]) and len(got[0]) == 50_000

    calls = {"tritonrec": lambda: ops.intersect(left, right), "torch_searchsorted": by_sort}
    return Case("100,000 and 100,000 keys, 50,000 common", calls, check)


@case(gpu_only=True)
def hash_find(device):
    keys = torch.arange(786_432, device=device) * 0x9E3779B97F4A7C1
    slots = 1 << 20
    table = (
        torch.zeros(slots, dtype=torch.int64, device=device),
        torch.full((slots,), -1, dtype=torch.int32, device=device),
    )
    rows, _ = ops.hash_insert(*table, keys, 0)
    wanted = torch.randperm(len(keys), generator=torch.Generator().manual_seed(SEED))[:262_144].to(device)
    query = torch.cat([keys[wanted[:131_072]], -1 - keys[wanted[131_072:]]])
    ascending, order = torch.sort(keys)

    def by_search():
        place = torch.searchsorted(ascending, query).clamp_(max=len(keys) - 1)
        return torch.where(ascending[place] == query, rows[order[place]], -1)

    calls = {"tritonrec": lambda: ops.hash_find(*table, query), "torch_searchsorted": by_search}
    return Case("262,144 lookups, half absent, 786,432 keys, load 0.75", calls, same(by_search()))


@case(gpu_only=True)
def segment_sum(device):
    values, segments = randn(262_144, 64).to(device), zipf(262_144, 131_072).to(device)

    def plain():
        return torch.zeros(131_072, 64, device=device).index_add_(0, segments, values)

    calls = {"tritonrec": lambda: ops.segment_sum(values, segments, 131_072), "torch_index_add": plain}
    return Case(
        "262,144 rows of 64 into 131,072 (the peer's sums have no order)", calls, close(plain(), atol=1e-1)
    )
