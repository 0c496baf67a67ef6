"""Cases of `bench_kernels` on tokens: layers, attention, losses."""

from __future__ import annotations

import numpy as np
import torch
from kernel_cases import SEED, Case, case, close, randn
from torch.nn import functional

from tritonrec import ops


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
