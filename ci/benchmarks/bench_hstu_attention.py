"""HSTU attention beside padded torch: ``pytest ci/benchmarks/bench_hstu_attention.py``, ratios from its JSON.

One thread, identical inputs and cotangents; every output is checked against the float64 reference before
it is timed. The peers are the same formula as it is written without a kernel: einsum, as in the HSTU paper's
code, and bmm, both over sequences that are padded already (padding and unpadding are not timed, to their
advantage), and a loop over the sequences as they lie. "forward" runs without autograd; "backward" is the
gradient alone, of a graph that is kept (torch has saved its scores, ours computes them again).
"""

import numpy as np
import pytest
import torch

from tritonrec.kernels.hstu_attention import HSTUBias, HSTUMask, hstu_attention

# name: sequences, longest, heads, dim of a head, whether lengths have a long tail
WORKLOADS = {
    "movielens": (64, 50, 2, 32, True),
    "long_tail_200": (32, 200, 4, 64, True),
    "long_tail_512": (16, 512, 4, 64, True),
    "uniform_200": (16, 200, 4, 64, False),
}


@pytest.fixture(scope="module", params=WORKLOADS)
def workload(request):
    sequences, longest, heads, dim, long_tail = WORKLOADS[request.param]
    rng = np.random.default_rng(0)
    lengths = np.full(sequences, longest)
    if long_tail:  # log-normal, cut at the longest, as histories are
        lengths = np.clip(rng.lognormal(np.log(longest / 4), 1.0, sequences), 2, longest).astype(np.int64)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(int(lengths.sum()), heads, dim, generator=generator) for _ in range(4)]
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    return request.param, tensors, offsets, int(lengths.max()), heads, dim


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


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("contender", [*JAGGED, *PADDED], ids=lambda f: f.__name__)
def test_attention(benchmark, one_thread, workload, contender, direction):
    name, tensors, offsets, longest, heads, dim = workload
    alpha = dim**-0.5
    q, k, v = double = [tensor.double().requires_grad_() for tensor in tensors[1:]]
    out = hstu_attention(q, k, v, offsets, longest, alpha=alpha, scaling_seqlen=longest, impl="reference")
    exact = [out.detach(), *torch.autograd.grad(out, double, tensors[0].double())]
    if contender in PADDED:
        tensors = [padded(tensor, offsets, longest) for tensor in tensors]
    do, *leaves = tensors
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    rest = (offsets, longest, torch.ones(longest, longest).tril(), alpha)

    out = contender(*leaves, *rest)
    got = [out.detach(), *torch.autograd.grad(out, leaves, do, retain_graph=True)]
    for tensor, meant in zip(got, exact, strict=True):
        flat = jagged(tensor, offsets) if contender in PADDED else tensor
        torch.testing.assert_close(flat.double(), meant, rtol=1e-4, atol=1e-5)

    lengths = offsets.diff()
    pairs = int((lengths * (lengths + 1) // 2).sum())
    benchmark.group = f"hstu_attention {direction} {name}"
    benchmark.extra_info.update(
        workload=name, direction=direction, sequences=len(lengths), tokens=int(offsets[-1]), longest=longest,
        heads=heads, dim=dim, visible_pairs=pairs, padded_pairs=len(lengths) * longest**2,
        flop=pairs * heads * dim * (4 if direction == "forward" else 10), threads=1, torch=torch.__version__,
        cpu=torch.backends.cpu.get_cpu_capability(), ours=contender is ours,
    )  # fmt: skip
    if direction == "backward":
        benchmark(torch.autograd.grad, out, leaves, do, retain_graph=True)
        return
    with torch.no_grad():
        benchmark(contender, *leaves, *rest)


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


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["window", "targets", "bias"])
@pytest.mark.parametrize("contender", [*JAGGED, *PADDED], ids=lambda f: f.__name__)
def test_options(benchmark, one_thread, contender, name, direction):
    """Four sequences of 512 tokens, so nothing is padded; torch has its mask made beforehand.

    "backward" of the bias takes the table's gradient along, in every contender.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2048, 4, 64, generator=generator) for _ in range(4)]
    table = [torch.randn(1023, generator=generator)] if name == "bias" else []
    offsets = torch.arange(0, 2049, 512)
    options, mask = options_of(name, 512)
    rest = (offsets, 512, mask, 0.125)

    def leaves_and_results(contender, do, tensors, options):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = contender(*leaves[:3], *rest, *leaves[3:], **options)
        return leaves, out, [out.detach(), *torch.autograd.grad(out, leaves, do, retain_graph=True)]

    double = [tensor.double() for tensor in (*tensors, *table)]
    *_, exact = leaves_and_results(torch_each_sequence, double[0], double[1:], {})
    if contender in PADDED:
        tensors = [padded(tensor, offsets, 512) for tensor in tensors]
    do = tensors[0]
    only_ours = options if contender is ours else {}
    leaves, out, got = leaves_and_results(contender, do, [*tensors[1:], *table], only_ours)
    for tensor, meant in zip(got, exact, strict=True):
        flat = jagged(tensor, offsets) if tensor.dim() == 4 else tensor
        limit = 1e-5 * float(meant.abs().max())
        torch.testing.assert_close(flat.double(), meant, rtol=1e-4, atol=limit)

    benchmark.group = f"hstu_attention {direction} {name}_512"
    benchmark.extra_info.update(
        workload=f"{name}_512", direction=direction, threads=1, ours=contender is ours
    )
    if direction == "backward":
        benchmark(torch.autograd.grad, out, leaves, do, retain_graph=True)
        return
    with torch.no_grad():
        benchmark(contender, *leaves[:3], *rest, *leaves[3:], **only_ours)
