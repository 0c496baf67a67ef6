"""HSTU attention beside padded torch: ``pytest ci/benchmarks/bench_hstu_attention.py``, ratios from its JSON.

One thread, identical inputs and cotangents, of three seeds in turn; every output is checked against the
float64 reference after its time is taken (`honest`). The peers are the same formula as it is written without
a kernel: einsum, as in the HSTU paper's code, and bmm, both over sequences that are padded already (padding
and unpadding are not timed, to their advantage), and a loop over the sequences as they lie. "forward" runs
without autograd; "backward" is the gradient alone, of a graph that is made before each round and kept (torch
has saved its scores, ours computes them again).
"""

from functools import cache

import numpy as np
import pytest
import torch
from honest import Given, in_turn, time_rounds

from tritonrec.kernels.hstu_attention import HSTUBias, HSTUMask, hstu_attention

# name: sequences, longest, heads, dim of a head, whether lengths have a long tail
WORKLOADS = {
    "movielens": (64, 50, 2, 32, True),
    "long_tail_200": (32, 200, 4, 64, True),
    "long_tail_512": (16, 512, 4, 64, True),
    "uniform_200": (16, 200, 4, 64, False),
}
SEEDS = range(3)


@pytest.fixture(scope="module", params=WORKLOADS)
def workload(request):
    sequences, longest, heads, dim, long_tail = WORKLOADS[request.param]
    rng = np.random.default_rng(0)
    lengths = np.full(sequences, longest)
    if long_tail:  # log-normal, cut at the longest, as histories are
        lengths = np.clip(rng.lognormal(np.log(longest / 4), 1.0, sequences), 2, longest).astype(np.int64)
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    longest, variants = int(lengths.max()), []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(int(lengths.sum()), heads, dim, generator=generator) for _ in range(4)]
        q, k, v = double = [tensor.double().requires_grad_() for tensor in tensors[1:]]
        out = hstu_attention(
            q, k, v, offsets, longest, alpha=dim**-0.5, scaling_seqlen=longest, impl="reference"
        )
        variants.append((tensors, [out.detach(), *torch.autograd.grad(out, double, tensors[0].double())]))
    return request.param, variants, offsets, longest, heads, dim


def padded(tensor, offsets, longest):
    """(B, H, N, D) contiguous, zero behind the end of a sequence."""
    out = tensor.new_zeros(len(offsets) - 1, longest, *tensor.shape[1:])
    for b, part in enumerate(tensor.split(offsets.diff().tolist())):
        out[b, : len(part)] = part
    return out.transpose(1, 2).contiguous()


def jagged(tensor, offsets):
    lengths = offsets.diff().tolist()
    return torch.cat([part[:, :length].transpose(0, 1) for part, length in zip(tensor, lengths, strict=True)])


def ours(q, k, v, offsets, longest, _dense_mask, alpha, weights=None, **options):
    return hstu_attention(
        q, k, v, offsets, longest, alpha=alpha, scaling_seqlen=longest, bias=HSTUBias(weights), **options
    )


def biased(weights, longest):
    """(N, N) of the weights (2 N - 1,) of a key's place behind its query's."""
    return weights.unfold(0, longest, 1).flip(0)


def torch_einsum(q, k, v, offsets, longest, mask, alpha, weights=None):
    s = torch.einsum("bhnd,bhmd->bhnm", q, k) * alpha
    if weights is not None:
        s = s + biased(weights, longest)
    p = torch.nn.functional.silu(s) / longest * mask
    return torch.einsum("bhnm,bhmd->bhnd", p, v)


def torch_bmm(q, k, v, offsets, longest, mask, alpha, weights=None):
    batch = q.shape[:2]
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    if weights is None:
        s = torch.bmm(q, k.mT) * alpha
    else:
        s = torch.baddbmm(biased(weights, longest), q, k.mT, alpha=alpha)
    p = torch.nn.functional.silu(s) * (mask / longest)
    return torch.bmm(p, v).unflatten(0, batch)


def torch_each_sequence(q, k, v, offsets, longest, mask, alpha, weights=None):
    outs = []
    bias = 0 if weights is None else biased(weights, longest)
    for a, c, e in zip(*(tensor.split(offsets.diff().tolist()) for tensor in (q, k, v)), strict=True):
        s = torch.matmul(a.transpose(0, 1), c.permute(1, 2, 0)) * alpha
        if weights is not None:
            s = s + bias[: len(a), : len(a)]
        p = torch.nn.functional.silu(s) * (mask[: len(a), : len(a)] / longest)
        outs.append(torch.matmul(p, e.transpose(0, 1)).transpose(0, 1))
    return torch.cat(outs)


JAGGED = (ours, torch_each_sequence)
PADDED = (torch_einsum, torch_bmm)


def forward(call, exact, offsets, leaves, do, limits):
    """A round without autograd: `call` of the leaves."""

    def check(got, *_leaves):
        compare([got], exact[:1], offsets, limits[:1])

    def without_grad(*leaves):
        with torch.no_grad():
            return call(*leaves)

    return Given(without_grad, tuple(leaves), check)


def backward(call, exact, offsets, leaves, do, limits):
    """A round of the gradient alone: its graph is made before the time starts."""

    def gradients(out, do, *leaves):
        return torch.autograd.grad(out, leaves, do, retain_graph=True)

    def prepare(do, *leaves):
        leaves = [leaf.requires_grad_() for leaf in leaves]
        out = call(*leaves)
        compare([out.detach()], exact[:1], offsets, limits[:1])
        return out, do, *leaves

    def check(got, out, *_):
        compare(got, exact[1:], offsets, limits[1:])

    return Given(gradients, (do, *leaves), check, prepare=prepare)


DIRECTIONS = {"forward": forward, "backward": backward}


def compare(got, exact, offsets, limits):
    for tensor, meant, atol in zip(got, exact, limits, strict=True):
        flat = jagged(tensor, offsets) if tensor.dim() == 4 else tensor
        torch.testing.assert_close(flat.double(), meant, rtol=1e-4, atol=atol)


def least_bytes(direction, tokens, heads, dim):
    """q, k, v and the output; or these inputs with dy, and three gradients."""
    return 4 * tokens * heads * dim * (4 if direction == "forward" else 7)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("contender", [*JAGGED, *PADDED], ids=lambda f: f.__name__)
def test_attention(benchmark, one_thread, workload, contender, direction):
    name, variants, offsets, longest, heads, dim = workload
    rest = (offsets, longest, torch.ones(longest, longest).tril(), dim**-0.5)

    def call(q, k, v):
        return contender(q, k, v, *rest)

    given = []
    for tensors, exact in variants:
        if contender in PADDED:
            tensors = [padded(tensor, offsets, longest) for tensor in tensors]
        do, *leaves = tensors
        given.append(DIRECTIONS[direction](call, exact, offsets, leaves, do, [1e-5] * 4))

    lengths = offsets.diff()
    pairs = int((lengths * (lengths + 1) // 2).sum())
    tokens = int(offsets[-1])
    benchmark.group = f"hstu_attention {direction} {name}"
    benchmark.extra_info.update(
        workload=name, direction=direction, sequences=len(lengths), tokens=int(offsets[-1]), longest=longest,
        heads=heads, dim=dim, visible_pairs=pairs, padded_pairs=len(lengths) * longest**2,
        flop=pairs * heads * dim * (4 if direction == "forward" else 10), threads=1, torch=torch.__version__,
        cpu=torch.backends.cpu.get_cpu_capability(), ours=contender is ours,
    )  # fmt: skip
    time_rounds(benchmark, in_turn(given), least_bytes(direction, tokens, heads, dim))


def options_of(name, length):
    """What the op takes, and the dense mask of one sequence that stands for it."""
    place = torch.arange(length)
    back = place[:, None] - place
    causal = (back >= 0).float()
    if name == "window":
        return {"mask": HSTUMask(max_attn_len=64)}, causal * (back <= 64)
    if name == "targets":
        history = (place < length // 2) | (back == 0)
        return {"mask": HSTUMask(num_targets=torch.full((4,), length // 2))}, causal * history
    return {}, causal


@cache
def options_variants(name):
    """Of each seed: (dy, q, k, v and the table of a bias, if any), and the exact output and gradients."""
    offsets, variants = torch.arange(0, 2049, 512), []
    _, mask = options_of(name, 512)
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(2048, 4, 64, generator=generator) for _ in range(4)]
        if name == "bias":
            tensors.append(torch.randn(1023, generator=generator))
        do, *leaves = (tensor.double().requires_grad_() for tensor in tensors)
        out = torch_each_sequence(*leaves[:3], offsets, 512, mask, 0.125, *leaves[3:])
        variants.append((tensors, [out.detach(), *torch.autograd.grad(out, leaves, do)]))
    return variants


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["window", "targets", "bias"])
@pytest.mark.parametrize("contender", [*JAGGED, *PADDED], ids=lambda f: f.__name__)
def test_options(benchmark, one_thread, contender, name, direction):
    """Four sequences of 512 tokens, so nothing is padded; torch has its mask made beforehand.

    "backward" of the bias takes the table's gradient along, in every contender.
    """
    offsets = torch.arange(0, 2049, 512)
    options, mask = options_of(name, 512)
    only_ours = options if contender is ours else {}
    given = []
    for tensors, exact in options_variants(name):
        do, *leaves = tensors
        if contender in PADDED:
            do, *leaves = [padded(each, offsets, 512) if each.dim() == 3 else each for each in tensors]

        def call(q, k, v, *table):
            return contender(q, k, v, offsets, 512, mask, 0.125, *table, **only_ours)

        limits = [1e-5 * float(each.abs().max()) for each in exact]
        given.append(DIRECTIONS[direction](call, exact, offsets, leaves, do, limits))

    benchmark.group = f"hstu_attention {direction} {name}_512"
    benchmark.extra_info.update(
        workload=f"{name}_512", direction=direction, threads=1, ours=contender is ours
    )
    time_rounds(benchmark, in_turn(given), least_bytes(direction, 2048, 4, 64))
