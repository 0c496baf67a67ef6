"""The kernels without a suite of their own beside a peer each, and all of them on a GPU.

    pytest ci/benchmarks/bench_kernels.py             one thread on the CPU
    pytest ci/benchmarks/bench_kernels.py -m gpu      on a GPU, also the kernels of the other suites

A case builds its inputs on a device and gives what is called: ours, the peers, and a check of an output,
which each contender passes before it is timed. Peers are the same formula in plain torch, through
torch.compile where a GPU is used, and numpy where it has the operation. MurmurHash3 is timed as part of
`owner_of`. Calls on a GPU are timed until it has finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tritonrec import ops

Call = Callable[[], Any]
SEED = 0


@dataclass
class Case:
    """Contenders by name; ours is ``tritonrec``."""

    workload: str
    calls: dict[str, Call]
    check: Callable[[Any], None]


CASES: dict[str, Callable[[torch.device], Case]] = {}
ON_GPU_ONLY = set()


def case(function=None, *, gpu_only: bool = False):
    def add(build):
        CASES[build.__name__] = build
        if gpu_only:
            ON_GPU_ONLY.add(build.__name__)
        return build

    return add(function) if function else add


def randn(*shape: int, scale: float = 1.0, offset: float = 0.1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + sum(shape))
    return torch.randn(shape, generator=generator) * scale + offset


def zipf(count: int, catalogue: int, exponent: float = 1.05) -> torch.Tensor:
    """Ids as a recommender sees them: few of them make up most."""
    rng = np.random.default_rng(SEED)
    cumulative = np.cumsum(np.arange(1, catalogue + 1, dtype=np.float64) ** -exponent)
    ranks = np.searchsorted(cumulative, rng.random(count) * cumulative[-1])
    return torch.from_numpy(rng.permutation(catalogue)[np.minimum(ranks, catalogue - 1)])


def close(exact: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-4) -> Callable[[Any], None]:
    def check(got):
        torch.testing.assert_close(got.double().cpu(), exact.double().cpu(), rtol=rtol, atol=atol)

    return check


def same(exact: torch.Tensor) -> Callable[[Any], None]:
    def check(got):
        assert torch.equal(got.cpu(), exact.cpu())

    return check


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
def silu(device):
    x = randn(6_400, 256, scale=3.0).to(device)
    calls = {"tritonrec": lambda: ops.silu(x), "torch": lambda: functional.silu(x)}
    return Case("6,400 tokens of 256", calls, close(functional.silu(x.double())))


@case
def norm_mul_dropout(device):
    x, u = (randn(6_400, 64, scale=s).to(device).requires_grad_() for s in (2.0, 1.0))
    weight, bias = (randn(64, offset=o).to(device).requires_grad_() for o in (1.0, 0.0))
    ids, dy = torch.arange(6_400, device=device), randn(6_400, 64).to(device)

    def step(p, call):
        y = call(p)
        return torch.cat([y.detach(), torch.autograd.grad(y, x, dy)[0]])

    def ours(p):
        return ops.norm_mul_dropout(x, u, weight, bias, dropout=p, seed=7, sample_ids=ids, positions=ids)

    def plain(p):
        return functional.dropout(u * functional.layer_norm(x, (64,), weight, bias, 1e-6), p)

    exact = step(0.0, plain)

    def check(got):  # a dropped element is 0; what is kept, and the gradient, depend on the mask
        kept = got[:6_400] != 0
        share = float(kept.float().mean())
        assert abs(share - 0.8) < 0.01
        torch.testing.assert_close(got[:6_400][kept], exact[:6_400][kept] / 0.8, rtol=1e-3, atol=1e-4)

    calls = {"tritonrec": lambda: step(0.2, ours), "torch": lambda: step(0.2, plain)}
    if device.type == "cuda":
        compiled = torch.compile(plain)
        calls["torch_compile"] = lambda: step(0.2, compiled)
    return Case("forward and backward, 6,400 tokens of 64, dropout 0.2", calls, check)


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


@case
def sampled_softmax(device):
    hidden, positive = (randn(3_200, 64, scale=s).to(device).requires_grad_() for s in (0.5, 0.4))
    negatives = randn(3_200, 32, 64, scale=0.3).to(device).requires_grad_()
    valid = (torch.arange(3_200 * 32).view(3_200, 32) % 7 != 0).to(device)

    def step(call):
        losses = call()
        return torch.cat([losses.detach()[:, None], torch.autograd.grad(losses.sum(), hidden)[0]], 1)

    def ours():
        return ops.sampled_softmax(hidden, positive, negatives, valid)

    def plain():
        scores = torch.einsum("ld,lkd->lk", hidden, negatives).masked_fill(~valid, float("-inf"))
        scores = torch.cat([(hidden * positive).sum(1, keepdim=True), scores], 1)
        return torch.logsumexp(scores, 1) - scores[:, 0]

    calls = {"tritonrec": lambda: step(ours), "torch": lambda: step(plain)}
    if device.type == "cuda":
        compiled = torch.compile(plain)
        calls["torch_compile"] = lambda: step(compiled)
    return Case("forward and backward, 3,200 tokens, 32 negatives of 64", calls, close(step(plain)))


@case
def relative_aggregate(device):
    lengths = np.clip(np.random.default_rng(SEED).lognormal(3.0, 1.0, 64), 1, 128).astype(np.int64)
    longest, offsets = int(lengths.max()), torch.tensor([0, *np.cumsum(lengths)], device=device)
    tokens = int(lengths.sum())
    v = randn(tokens, 2, 32).to(device).requires_grad_()
    table = randn(2, longest).to(device).requires_grad_()
    dy = randn(tokens, 2, 32).to(device)
    place = torch.arange(longest, device=device)
    distance = (place[:, None] - place[None, :]).clamp(min=0)
    mask = place[:, None] >= place[None, :]

    def step(call):
        out = call()
        dv, dtable = torch.autograd.grad(out, (v, table), dy)
        return torch.cat([out.detach().flatten(), dv.flatten(), dtable.flatten()])

    def ours():
        return ops.relative_aggregate(v, table, offsets, longest)

    def plain():
        weights = table[:, distance] * mask
        parts = v.split(lengths.tolist())
        return torch.cat([torch.einsum("hnm,mhd->nhd", weights[:, : len(p), : len(p)], p) for p in parts])

    calls = {"tritonrec": lambda: step(ours), "torch_each_sequence": lambda: step(plain)}
    return Case(
        f"forward and backward, 64 sequences, {tokens:,} tokens", calls, close(step(plain), atol=1e-2)
    )


@case
def softmax_attention(device):
    lengths = np.clip(np.random.default_rng(SEED).lognormal(3.0, 1.0, 64), 1, 128).astype(np.int64)
    longest, offsets = int(lengths.max()), torch.tensor([0, *np.cumsum(lengths)], device=device)
    tokens = int(lengths.sum())
    q, k, v = (randn(tokens, 2, 32).to(device).requires_grad_() for _ in range(3))
    dy = randn(tokens, 2, 32).to(device)
    places = torch.cat([torch.arange(n) + longest * b for b, n in enumerate(lengths.tolist())]).to(device)

    def step(call):
        out = call()
        gradients = torch.autograd.grad(out, (q, k, v), dy)
        return torch.cat([out.detach().flatten(), *(gradient.flatten() for gradient in gradients)])

    def ours():
        return ops.softmax_attention(q, k, v, offsets, longest, causal=True)

    def each():
        parts = zip(*(x.split(lengths.tolist()) for x in (q, k, v)), strict=True)
        rows = (
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in part), is_causal=True
            ).transpose(0, 1)
            for part in parts
        )
        return torch.cat(list(rows))

    def padded():
        wide = (
            x.new_zeros(64 * longest, 2, 32).index_copy(0, places, x).view(64, longest, 2, 32).transpose(1, 2)
            for x in (q, k, v)
        )
        out = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
        return out.transpose(1, 2).reshape(-1, 2, 32)[places]

    calls = {"tritonrec": ours, "torch_each_sequence": each, "torch_padded": padded}
    return Case(
        f"forward and backward, 64 sequences, {tokens:,} tokens",
        {name: lambda call=call: step(call) for name, call in calls.items()}, close(step(each), atol=1e-3),
    )  # fmt: skip


@case
def dropout(device):
    x, rows = randn(6_400, 64).to(device), torch.arange(6_400, device=device)

    def check(got):
        kept = got != 0
        torch.testing.assert_close(got[kept], (x / 0.8)[kept])
        assert abs(float(kept.float().mean()) - 0.8) < 0.01

    calls = {
        "tritonrec": lambda: ops.dropout(x, 0.2, 7, rows, rows),
        "torch": lambda: torch.nn.functional.dropout(x, 0.2),
    }
    return Case("6,400 tokens of 64; the peer's mask is no function of the token", calls, check)


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


@case(gpu_only=True)
def linear(device):
    x, weight = randn(65_536, 256).to(device).bfloat16(), randn(1024, 256, scale=0.06).to(device).bfloat16()
    calls = {"tritonrec": lambda: ops.linear(x, weight), "torch": lambda: functional.linear(x, weight)}
    exact = functional.linear(x.float(), weight.float())
    return Case("65,536 tokens, 256 to 1,024, bfloat16", calls, close(exact, rtol=2e-2, atol=2e-2))


def attention(device, backward):
    lengths = np.clip(np.random.default_rng(SEED).lognormal(6.0, 1.0, 32), 2, 2048).astype(np.int64)
    longest, offsets = int(lengths.max()), torch.tensor([0, *np.cumsum(lengths)], device=device)
    shape = int(lengths.sum()), 4, 128
    q, k, v, dy = (randn(*shape, scale=s).to(device).bfloat16().requires_grad_() for s in (1, 0.9, 1.1, 0.8))
    mask = torch.ones(longest, longest, device=device).tril()

    def ours():
        return ops.hstu_attention(q, k, v, offsets, longest, alpha=128**-0.5, scaling_seqlen=longest)

    def plain():
        outs = []
        for a, b, c in zip(*(t.split(lengths.tolist()) for t in (q, k, v)), strict=True):
            scores = torch.einsum("nhd,mhd->hnm", a, b) * 128**-0.5
            weights = functional.silu(scores) * (mask[: len(a), : len(a)] / longest).to(a.dtype)
            outs.append(torch.einsum("hnm,mhd->nhd", weights, c))
        return torch.cat(outs)

    contenders = {"tritonrec": ours, "torch_each_sequence": plain, "torch_compile": torch.compile(plain)}
    if backward:
        kept = {name: call() for name, call in contenders.items()}
        calls = {
            name: lambda out=out: torch.cat(torch.autograd.grad(out, (q, k, v), dy, retain_graph=True))
            for name, out in kept.items()
        }
    else:
        calls = contenders
    with torch.no_grad() if not backward else torch.enable_grad():
        exact = calls["torch_each_sequence"]().detach().float()
    direction = "backward" if backward else "forward"
    label = f"{direction}, 32 sequences, {shape[0]:,} tokens, 4 heads of 128, bfloat16"
    return Case(label, calls, close(exact, rtol=5e-2, atol=5e-2))


@case(gpu_only=True)
def hstu_attention_forward(device):
    return attention(device, False)


@case(gpu_only=True)
def hstu_attention_backward(device):
    return attention(device, True)


# The names of the contenders of each case, known before it is built so that a test each can be collected.
PEERS = {
    "bucketize": ("torch_stable_sort",),
    "gather_rows": ("torch_index_select", "torch_embedding"),
    "scatter_rows": ("torch_index_copy",),
    "packed_rows": ("int64_rows", "torch_int64"),
    "norm_mul_dropout": ("torch", "torch_compile"),
    "initial_rows": ("torch_uniform", "numpy_philox"),
    "random_indices": ("torch_randint",),
    "sampled_softmax": ("torch", "torch_compile"),
    "relative_aggregate": ("torch_each_sequence",),
    "softmax_attention": ("torch_each_sequence", "torch_padded"),
    "unique": ("torch_unique",),
    "intersect": ("torch_searchsorted",),
    "hash_find": ("torch_searchsorted",),
    "segment_sum": ("torch_index_add",),
    "hstu_attention_forward": ("torch_each_sequence", "torch_compile"),
    "hstu_attention_backward": ("torch_each_sequence", "torch_compile"),
}
PAIRS = [(name, who) for name in CASES for who in ("tritonrec", *PEERS.get(name, ("torch",)))]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "contender"), PAIRS, ids=lambda text: text)
def test_kernel(benchmark, device, name, contender):
    if device == "cpu" and name in ON_GPU_ONLY:
        pytest.skip("has a suite of its own on the CPU")
    built = CASES[name](torch.device(device))
    if contender not in built.calls:
        pytest.skip(f"{contender} is no peer on {device}")
    call = built.calls[contender]
    built.check(call())
    benchmark.group = f"{name} {device}"
    benchmark.extra_info.update(
        ours=contender == "tritonrec", workload=built.workload, threads=1, seed=SEED,
        versions={"torch": torch.__version__, "numpy": np.__version__},
    )  # fmt: skip
    if device == "cpu":
        benchmark(call)
        return
    from triton.testing import do_bench

    benchmark.extra_info["device_milliseconds"] = do_bench(call, return_mode="median")

    def until_done():
        call()
        torch.cuda.synchronize()

    benchmark(until_done)
