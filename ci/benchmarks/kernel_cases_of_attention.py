"""Cases of `bench_kernels` on HSTU attention: lengths with a long tail, masks, a bias by position.

Peers are the formula as it is written without a kernel: einsum, as in the HSTU paper's code, and bmm, both on
sequences that are padded already (padding and unpadding are not timed, to their advantage), and a loop over
the sequences as they lie. torch has its mask made beforehand, and its bias is taken from the table inside of
the call. "forward" runs without autograd; "backward" is the gradient alone, of a graph that is made before
each round and kept (torch has saved its scores, ours computes them again).
"""

from __future__ import annotations

import numpy as np
import torch
from kernel_cases import SEED, Case, case, moved, randn
from torch.nn import functional

from tritonrec import ops

# sequences, longest, heads, dim of a head, lengths
SIZES = {
    "movielens": (64, 50, 2, 32, "long tail"), "long_tail_200": (32, 200, 4, 64, "long tail"),
    "long_tail_512": (16, 512, 4, 64, "long tail"), "uniform_200": (16, 200, 4, 64, "all the same"),
    "window_512": (4, 512, 4, 64, "a window of 64"), "targets_512": (4, 512, 4, 64, "half of them targets"),
    "bias_512": (4, 512, 4, 64, "a bias by position"),
}  # fmt: skip


def padded(tensor: torch.Tensor, offsets: torch.Tensor, longest: int) -> torch.Tensor:
    """(B, H, N, D) contiguous, zero behind the end of a sequence."""
    out = tensor.new_zeros(len(offsets) - 1, longest, *tensor.shape[1:])
    for b, part in enumerate(tensor.split(offsets.diff().tolist())):
        out[b, : len(part)] = part
    return out.transpose(1, 2).contiguous()


def jagged(tensor: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    lengths = offsets.diff().tolist()
    return torch.cat([part[:, :length].transpose(0, 1) for part, length in zip(tensor, lengths, strict=True)])


def options_of(kind: str, sequences: int, length: int, device) -> tuple[dict, torch.Tensor]:
    """What the op takes, and the dense mask of one sequence that stands for it."""
    place = torch.arange(length, device=device)
    back = place[:, None] - place
    causal = (back >= 0).float()
    if "window" in kind:
        return {"mask": ops.HSTUMask(max_attn_len=64)}, causal * (back <= 64)
    if "targets" in kind:
        targets = torch.full((sequences,), length // 2, device=device)
        return {"mask": ops.HSTUMask(num_targets=targets)}, causal * ((place < length // 2) | (back == 0))
    return {}, causal


def biased(weights: torch.Tensor, longest: int) -> torch.Tensor:
    """(N, N) of the weights (2 N - 1,) of a key's place behind its query's."""
    return weights.unfold(0, longest, 1).flip(0)


def attention(device, seed, backward, sequences, longest, heads, dim, kind):
    lengths = np.full(sequences, longest)
    if kind == "long tail":  # log-normal, cut at the longest, as histories are
        drawn = np.random.default_rng(SEED).lognormal(np.log(longest / 4), 1.0, sequences)
        lengths = np.clip(drawn, 2, longest).astype(np.int64)
    offsets, longest = torch.tensor([0, *np.cumsum(lengths)], device=device), int(lengths.max())
    tokens, alpha = int(lengths.sum()), dim**-0.5
    dy, *leaves = (randn(tokens, heads, dim, seed=4 * seed + n).to(device) for n in range(4))
    if "bias" in kind:
        leaves.append(randn(2 * longest - 1, seed=seed).to(device))
    options, mask = options_of(kind, sequences, longest, device)

    def ours(q, k, v, table=None):
        bias = ops.HSTUBias(table)
        return ops.hstu_attention(
            q, k, v, offsets, longest, alpha=alpha, scaling_seqlen=longest, bias=bias, **options
        )

    def einsum(q, k, v, table=None):
        scores = torch.einsum("bhnd,bhmd->bhnm", q, k) * alpha
        if table is not None:
            scores = scores + biased(table, longest)
        return torch.einsum("bhnm,bhmd->bhnd", functional.silu(scores) / longest * mask, v)

    def bmm(q, k, v, table=None):
        batch = q.shape[:2]
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        if table is None:
            scores = torch.bmm(q, k.mT) * alpha
        else:
            scores = torch.baddbmm(biased(table, longest), q, k.mT, alpha=alpha)
        return torch.bmm(functional.silu(scores) * (mask / longest), v).unflatten(0, batch)

    def each_sequence(q, k, v, table=None):
        outs, bias = [], 0 if table is None else biased(table, longest)
        for a, b, c in zip(*(tensor.split(lengths.tolist()) for tensor in (q, k, v)), strict=True):
            scores = torch.matmul(a.transpose(0, 1), b.permute(1, 2, 0)) * alpha
            if table is not None:
                scores = scores + bias[: len(a), : len(a)]
            weights = functional.silu(scores) * (mask[: len(a), : len(a)] / longest)
            outs.append(torch.matmul(weights, c.transpose(0, 1)).transpose(0, 1))
        return torch.cat(outs)

    doubles = [each.double().requires_grad_() for each in leaves]
    out = each_sequence(*doubles)
    gradients = torch.autograd.grad(out, doubles, dy.double())

    def agree(got, exact):
        for tensor, meant in zip(got, exact, strict=True):
            flat = jagged(tensor, offsets) if tensor.dim() == 4 else tensor
            torch.testing.assert_close(flat.double(), meant, rtol=1e-4, atol=1e-5 * float(meant.abs().max()))

    def without_grad(call, *arguments):
        with torch.no_grad():
            return call(*arguments)

    def gradients_of(out, dy, *leaves):
        return torch.autograd.grad(out, leaves, dy, retain_graph=True)

    wide_calls = {"torch_einsum": einsum, "torch_bmm": bmm}
    calls, prepare = {}, {}
    for name, call in {"tritonrec": ours, "torch_each_sequence": each_sequence, **wide_calls}.items():
        wide = name in wide_calls

        def prepared(dy, *leaves, call=call, wide=wide):
            if wide:
                dy, *leaves = (padded(x, offsets, longest) if x.dim() == 3 else x for x in (dy, *leaves))
            if not backward:
                return tuple(leaves)
            leaves = [leaf.detach().requires_grad_() for leaf in leaves]
            return call(*leaves), dy, *leaves

        prepare[name] = prepared
        calls[name] = gradients_of if backward else lambda *given, call=call: without_grad(call, *given)

    def check(got, *_):
        agree(got if backward else [got], gradients if backward else [out.detach()])

    workload = f"{sequences} sequences, {tokens:,} tokens, {heads} heads of {dim}, {kind}"
    least_bytes = moved(dy, times=7 if backward else 4)
    return Case(workload, (dy, *leaves), calls, check, least_bytes, prepare=prepare)


WORKLOADS = {
    f"{way} {name}": (way == "backward", *sizes)
    for name, sizes in SIZES.items()
    for way in ("forward", "backward")
}


@case("torch_bmm", "torch_einsum", "torch_each_sequence", workloads=WORKLOADS)
def hstu_attention(device, seed, *given):
    return attention(device, seed, *given)
