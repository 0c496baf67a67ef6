"""HSTU attention beside padded torch: ``pytest ci/bench_hstu_attention.py``, ratios from its JSON.

One thread, identical inputs and cotangents; every output is checked against the float64 reference before
it is timed. The peers are the same formula as it is written without a kernel: einsum, as in the HSTU paper's
code, and bmm, both over sequences that are padded already (padding and unpadding are not timed, to their
advantage), and a loop over the sequences as they lie. "forward" runs without autograd; "backward" is the
gradient alone, of a graph that is kept (torch has saved its scores, ours computes them again).
"""

import numpy as np
import pytest
import torch

from tritonrec.kernels.hstu_attention import hstu_attention

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


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def padded(tensor, offsets, longest):
    """(B, H, N, D) contiguous, zero behind the end of a sequence."""
    out = tensor.new_zeros(len(offsets) - 1, longest, *tensor.shape[1:])
    for b, part in enumerate(tensor.split(offsets.diff().tolist())):
        out[b, : len(part)] = part
    return out.transpose(1, 2).contiguous()


def jagged(tensor, offsets):
    lengths = offsets.diff().tolist()
    return torch.cat([part[:, :length].transpose(0, 1) for part, length in zip(tensor, lengths, strict=True)])


def ours(q, k, v, offsets, longest, mask, alpha):
    return hstu_attention(q, k, v, offsets, longest, alpha=alpha, scaling_seqlen=longest)


def torch_einsum(q, k, v, offsets, longest, mask, alpha):
    p = torch.nn.functional.silu(torch.einsum("bhnd,bhmd->bhnm", q, k) * alpha) / longest * mask
    return torch.einsum("bhnm,bhmd->bhnd", p, v)


def torch_bmm(q, k, v, offsets, longest, mask, alpha):
    batch = q.shape[:2]
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    p = torch.nn.functional.silu(torch.bmm(q, k.mT) * alpha) * (mask / longest)
    return torch.bmm(p, v).unflatten(0, batch)


def torch_each_sequence(q, k, v, offsets, longest, mask, alpha):
    outs = []
    for a, c, e in zip(*(tensor.split(offsets.diff().tolist()) for tensor in (q, k, v)), strict=True):
        s = torch.matmul(a.transpose(0, 1), c.permute(1, 2, 0)) * alpha
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


def options_of(name, length, generator):
    """What the op takes, and the dense mask and bias of one sequence that stand for it."""
    place = torch.arange(length)
    back = place[:, None] - place
    causal, nothing = (back >= 0).float(), torch.zeros(length, length)
    if name == "window":
        return {"max_attn_len": 64}, causal * (back <= 64), nothing
    if name == "targets":
        half = torch.full((4,), length // 2)
        history = (place < length // 2) | (back == 0)
        return {"num_targets": half}, causal * history, nothing
    weights = torch.randn(2 * length - 1, generator=generator)
    return {"pos_weights": weights}, causal, weights[length - 1 - back]


@pytest.mark.parametrize("name", ["window", "targets", "bias"])
@pytest.mark.parametrize("contender", ["ours", "torch_each_sequence"])
def test_options(benchmark, one_thread, contender, name):
    """Forward of four sequences of 512 tokens; torch has mask and bias made beforehand, to its advantage."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2048, 4, 64, generator=generator) for _ in range(3))
    offsets = torch.arange(0, 2049, 512)
    options, mask, bias = options_of(name, 512, generator)

    def ours():
        return hstu_attention(q, k, v, offsets, 512, alpha=0.125, scaling_seqlen=512, **options)

    def torch_each_sequence():
        outs = []
        for a, c, e in zip(*(tensor.split(512) for tensor in (q, k, v)), strict=True):
            s = torch.matmul(a.transpose(0, 1), c.permute(1, 2, 0)) * 0.125 + bias
            outs.append(torch.matmul(torch.nn.functional.silu(s) * (mask / 512), e.transpose(0, 1)))
        return torch.cat([out.transpose(0, 1) for out in outs])

    torch.testing.assert_close(ours(), torch_each_sequence(), rtol=1e-4, atol=1e-5)
    benchmark.group = f"hstu_attention forward {name}_512"
    benchmark.extra_info.update(workload=f"{name}_512", threads=1, ours=contender == "ours")
    benchmark({"ours": ours, "torch_each_sequence": torch_each_sequence}[contender])
