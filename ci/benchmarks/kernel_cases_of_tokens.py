"""Cases of `bench_kernels` on tokens: layers, softmax attention, losses."""

import numpy as np
import torch
from kernel_cases import SEED, Case, case, close, moved, randn
from torch.nn import functional

from tritonrec import ops


def with_compiled(device, contenders, plain):
    """The contenders, and on a GPU `plain` through torch.compile."""
    return {**contenders, "torch_compile": torch.compile(plain)} if device.type == "cuda" else contenders


@case()
def silu(device, seed):
    x = randn(6_400, 256, scale=3.0, seed=seed).to(device)
    calls = {"tritonrec": ops.silu, "torch": functional.silu}
    return Case("6,400 tokens of 256", (x,), calls, close(functional.silu(x.double())), moved(x, x))


@case("torch", "torch_compile")
def norm_mul_dropout(device, seed):
    x, u = (
        randn(6_400, 64, scale=s, seed=2 * seed + n).to(device).requires_grad_()
        for n, s in enumerate((2.0, 1.0))
    )
    weight, bias = (randn(64, offset=o, seed=seed).to(device).requires_grad_() for o in (1.0, 0.0))
    ids, dy = torch.arange(6_400, device=device), randn(6_400, 64, seed=2 * seed + 7).to(device)

    def ours(x, u, weight, bias):
        return ops.norm_mul_dropout(x, u, weight, bias, dropout=0.2, seed=seed, sample_ids=ids, positions=ids)

    def undropped(x, u, weight, bias):
        return u * functional.layer_norm(x, (64,), weight, bias, 1e-6)

    def plain(x, u, weight, bias):
        return functional.dropout(undropped(x, u, weight, bias), 0.2)

    def step(call):
        def both(x, u, weight, bias, dy):
            y = call(x, u, weight, bias)
            return torch.cat([y.detach(), torch.autograd.grad(y, x, dy)[0]])

        return both

    leaves = [each.detach().double().requires_grad_() for each in (x, u, weight, bias)]
    exact = undropped(*leaves)

    def check(got, *_):  # a dropped element is 0; what is kept, and the gradient, depend on the mask
        kept = got[:6_400] != 0
        assert abs(float(kept.float().mean()) - 0.8) < 0.01, "not a fifth dropped"
        dx = torch.autograd.grad(exact, leaves[0], dy * kept / 0.8, retain_graph=True)[0]
        meant = torch.cat([exact.detach() * kept / 0.8, dx])
        torch.testing.assert_close(got.double(), meant, rtol=1e-3, atol=1e-3)

    contenders = with_compiled(device, {"tritonrec": ours, "torch": plain}, plain)
    return Case(
        "forward and backward, 6,400 tokens of 64, dropout 0.2", (x, u, weight, bias, dy),
        {name: step(call) for name, call in contenders.items()}, check, moved(x, u, dy, x, x),
    )  # fmt: skip


@case("torch", "torch_compile")
def sampled_softmax(device, seed):
    hidden, positive = (
        randn(3_200, 64, scale=s, seed=2 * seed + n).to(device).requires_grad_()
        for n, s in enumerate((0.5, 0.4))
    )
    negatives = randn(3_200, 32, 64, scale=0.3, seed=seed).to(device).requires_grad_()
    valid = ((torch.arange(3_200 * 32).view(3_200, 32) + seed) % 7 != 0).to(device)

    def plain(hidden, positive, negatives, valid):
        scores = torch.einsum("ld,lkd->lk", hidden, negatives).masked_fill(~valid, float("-inf"))
        scores = torch.cat([(hidden * positive).sum(1, keepdim=True), scores], 1)
        return torch.logsumexp(scores, 1) - scores[:, 0]

    def step(call):
        def both(hidden, positive, negatives, valid):
            losses = call(hidden, positive, negatives, valid)
            return torch.cat([losses.detach()[:, None], torch.autograd.grad(losses.sum(), hidden)[0]], 1)

        return both

    arguments = hidden, positive, negatives, valid
    exact = step(plain)(*(each.detach().double().requires_grad_() for each in arguments[:3]), valid)
    contenders = with_compiled(device, {"tritonrec": ops.sampled_softmax, "torch": plain}, plain)
    return Case(
        "forward and backward, 3,200 tokens, 32 negatives of 64", arguments,
        {name: step(call) for name, call in contenders.items()}, close(exact), moved(*arguments, hidden),
    )  # fmt: skip


def sequences(device, mean, count, longest):
    """Lengths of sequences with a long tail, the greatest of them, and offsets; alike for all seeds."""
    lengths = np.clip(np.random.default_rng(SEED).lognormal(mean, 1.0, count), 1, longest).astype(np.int64)
    return lengths, int(lengths.max()), torch.tensor([0, *np.cumsum(lengths)], device=device)


@case("torch_each_sequence")
def relative_aggregate(device, seed):
    lengths, longest, offsets = sequences(device, 3.0, 64, 128)
    tokens = int(lengths.sum())
    v = randn(tokens, 2, 32, seed=2 * seed).to(device).requires_grad_()
    table = randn(2, longest, seed=seed).to(device).requires_grad_()
    dy = randn(tokens, 2, 32, seed=2 * seed + 1).to(device)
    place = torch.arange(longest, device=device)
    distance = (place[:, None] - place[None, :]).clamp(min=0)
    mask = place[:, None] >= place[None, :]

    def step(call):
        def both(v, table, dy):
            out = call(v, table)
            dv, dtable = torch.autograd.grad(out, (v, table), dy)
            return torch.cat([out.detach().flatten(), dv.flatten(), dtable.flatten()])

        return both

    def ours(v, table):
        return ops.relative_aggregate(v, table, offsets, longest)

    def plain(v, table):
        weights = table[:, distance] * mask
        parts = v.split(lengths.tolist())
        return torch.cat([torch.einsum("hnm,mhd->nhd", weights[:, : len(p), : len(p)], p) for p in parts])

    exact = step(plain)(*(each.detach().double().requires_grad_() for each in (v, table)), dy.double())
    return Case(
        f"forward and backward, 64 sequences, {tokens:,} tokens", (v, table, dy),
        {"tritonrec": step(ours), "torch_each_sequence": step(plain)}, close(exact, atol=1e-2),
        moved(v, table, dy, v, v, table),
    )  # fmt: skip


@case("torch", "torch_compile")
def dot_interaction(device, seed):
    x = randn(2_048, 27, 64, seed=2 * seed).to(device).requires_grad_()
    dy = randn(2_048, 351, seed=2 * seed + 1).to(device)
    row, column = torch.tril_indices(27, 27, -1, device=device)

    def plain(x):
        return torch.bmm(x, x.transpose(1, 2))[:, row, column]

    def step(call):
        def both(x, dy):
            y = call(x)
            return torch.cat([y.detach().flatten(), torch.autograd.grad(y, x, dy)[0].flatten()])

        return both

    exact = step(plain)(x.detach().double().requires_grad_(), dy.double())
    contenders = with_compiled(device, {"tritonrec": ops.dot_interaction, "torch": plain}, plain)
    return Case(
        "forward and backward, 2,048 samples of 27 vectors of 64", (x, dy),
        {name: step(call) for name, call in contenders.items()}, close(exact, atol=1e-3), moved(x, dy, x, dy),
    )  # fmt: skip


@case("torch_each_sequence", "torch_padded")
def softmax_attention(device, seed):
    lengths, longest, offsets = sequences(device, 3.0, 64, 128)
    tokens = int(lengths.sum())
    q, k, v = (randn(tokens, 2, 32, seed=4 * seed + n).to(device).requires_grad_() for n in range(3))
    dy = randn(tokens, 2, 32, seed=4 * seed + 3).to(device)
    places = torch.cat([torch.arange(n) + longest * b for b, n in enumerate(lengths.tolist())]).to(device)

    def step(call):
        def both(q, k, v, dy):
            out = call(q, k, v)
            gradients = torch.autograd.grad(out, (q, k, v), dy)
            return torch.cat([out.detach().flatten(), *(gradient.flatten() for gradient in gradients)])

        return both

    def ours(q, k, v):
        return ops.softmax_attention(q, k, v, offsets, longest, causal=True)

    def each(q, k, v):
        parts = zip(*(x.split(lengths.tolist()) for x in (q, k, v)), strict=True)
        rows = (
            functional.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in part), is_causal=True
            ).transpose(0, 1)
            for part in parts
        )
        return torch.cat(list(rows))

    def padded(q, k, v):
        wide = (
            x.new_zeros(64 * longest, 2, 32).index_copy(0, places, x).view(64, longest, 2, 32).transpose(1, 2)
            for x in (q, k, v)
        )
        out = functional.scaled_dot_product_attention(*wide, is_causal=True)
        return out.transpose(1, 2).reshape(-1, 2, 32)[places]

    exact = step(each)(*(x.detach().double().requires_grad_() for x in (q, k, v)), dy.double())
    contenders = {"tritonrec": ours, "torch_each_sequence": each, "torch_padded": padded}
    return Case(
        f"forward and backward, 64 sequences, {tokens:,} tokens", (q, k, v, dy),
        {name: step(call) for name, call in contenders.items()}, close(exact, atol=1e-3),
        moved(q, times=8),  # with dy and the output, and a gradient each
    )  # fmt: skip


@case()
def dropout(device, seed):
    x, rows = randn(6_400, 64, seed=seed).to(device), torch.arange(6_400, device=device)

    def check(got, x, rows):
        kept = got != 0
        torch.testing.assert_close(got[kept], (x / 0.8)[kept])
        assert abs(float(kept.float().mean()) - 0.8) < 0.01, "not a fifth dropped"

    calls = {
        "tritonrec": lambda x, rows: ops.dropout(x, 0.2, 7, rows, rows),
        "torch": lambda x, rows: functional.dropout(x, 0.2),
    }
    workload = "6,400 tokens of 64; the peer's mask is no function of the token"
    return Case(workload, (x, rows), calls, check, moved(x, x))


SHAPES = {"64->256": (64, 256), "256->64": (256, 64), "128->512": (128, 512)}
PASSES = ("forward", "input_gradient", "weight_gradient", "weight_gradient_of_rows")


@case(workloads={f"{which} {name}": (which, *shape) for name, shape in SHAPES.items() for which in PASSES})
def linear(device, seed, which, inputs, outputs):
    """Batch-invariant passes, whose weight gradients are exact, beside a BLAS that promises nothing of a row.

    Samples have 50 tokens on average, as MovieLens'. Weight gradients are sums of each sample's product, or
    each row's, rounded once; the peer's is one product of the whole batch in float32.
    """
    tokens, samples = 6_400, 128
    x, dy = randn(tokens, inputs, seed=seed).to(device), randn(tokens, outputs, seed=seed + 3).to(device)
    weight = randn(outputs, inputs, scale=inputs**-0.5, seed=seed).to(device)
    bias = randn(outputs, seed=seed).to(device)
    generator = torch.Generator().manual_seed(SEED)
    cuts = torch.randint(0, tokens + 1, (samples - 1,), generator=generator).sort().values
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])]).to(device)

    def sums_of(*cut):
        def weight_gradient(dy, x):
            sums = torch.zeros(outputs, inputs, dtype=torch.int64, device=device)
            return ops.linear_weight_grad(sums, dy, x, *cut)

        return weight_gradient

    def check(got, *_):
        values = got.double() * 2.0**-36 if got.dtype == torch.int64 else got.double()
        torch.testing.assert_close(values, exact, rtol=1e-4, atol=1e-3)

    if which == "forward":
        exact = functional.linear(x.double(), weight.double(), bias.double())
        arguments, calls = (x, weight, bias), (ops.linear, functional.linear)
    elif which == "input_gradient":
        exact = dy.double() @ weight.double()
        arguments = dy, weight
        calls = (lambda dy, weight: ops.linear(dy, weight.t())), torch.matmul
    else:
        exact = dy.double().t() @ x.double()
        arguments = dy, x
        calls = sums_of(*() if "rows" in which else (offsets,)), lambda dy, x: dy.t() @ x
    named = dict(zip(("tritonrec", "torch"), calls, strict=True))
    workload = f"{which.replace('_', ' ')}, {tokens:,} tokens, {inputs} to {outputs}"
    return Case(workload, arguments, named, check, moved(x, weight, dy))
