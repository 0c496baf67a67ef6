"""Batch-invariant linear layers beside torch: ``pytest ci/benchmarks/bench_linear.py``, ratios from its JSON.

One thread, identical inputs; every round has other values, and its output is checked (`honest`).
`torch.nn.functional.linear` calls a BLAS, which promises nothing about a row's bits and chooses its kernel by
shape. The exact weight gradients (each sample's product, or each row's, rounded once, added as int64) are
compared with one product of the whole batch in float32, which depends on the batch and its order.
"""

import statistics

import pytest
import torch
from honest import Given, by_turns, honest, scaled

from tritonrec.kernels.linear import linear, linear_weight_grad

TOKENS, SAMPLES = 6_400, 128  # a MovieLens-like batch: 50 tokens a sample on average
SHAPES = {"64->256": (64, 256), "256->64": (256, 64), "128->512": (128, 512)}


@pytest.fixture(scope="module", params=SHAPES)
def workload(request):
    inputs, outputs = SHAPES[request.param]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    bias = torch.randn(outputs, generator=generator)
    dy = torch.randn(TOKENS, outputs, generator=generator)
    cuts = torch.randint(0, TOKENS + 1, (SAMPLES - 1,), generator=generator).sort().values
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([TOKENS])])
    return request.param, x, weight, bias, dy, offsets


def forward_ours(x, weight, bias, dy, offsets):
    return linear(x, weight, bias)


def forward_torch(x, weight, bias, dy, offsets):
    return torch.nn.functional.linear(x, weight, bias)


def input_gradient_ours(x, weight, bias, dy, offsets):
    return linear(dy, weight.t())


def input_gradient_torch(x, weight, bias, dy, offsets):
    return dy @ weight


def weight_gradient_exact(x, weight, bias, dy, offsets):
    return linear_weight_grad(torch.zeros_like(weight, dtype=torch.int64), dy, x, offsets)


def weight_gradient_of_rows(x, weight, bias, dy, offsets):
    return linear_weight_grad(torch.zeros_like(weight, dtype=torch.int64), dy, x)


def weight_gradient_torch(x, weight, bias, dy, offsets):
    return dy.t() @ x


CONTENDERS = {
    "forward": (forward_ours, forward_torch),
    "input_gradient": (input_gradient_ours, input_gradient_torch),
    "weight_gradient": (weight_gradient_exact, weight_gradient_torch),
    "weight_gradient_of_rows": (weight_gradient_of_rows, weight_gradient_torch),
}


def check(direction, got, x, weight, bias, dy):
    exact = {
        "forward": lambda: x.double() @ weight.double().t() + bias.double(),
        "input_gradient": lambda: dy.double() @ weight.double(),
        "weight_gradient": lambda: dy.double().t() @ x.double(),
    }[direction.removesuffix("_of_rows")]()
    values = got.double() * 2.0**-36 if got.dtype == torch.int64 else got.double()
    torch.testing.assert_close(values, exact, rtol=1e-4, atol=1e-3)


def describe(workload, direction):
    name, _, weight, *_ = workload
    return {
        "workload": name,
        "direction": direction,
        "tokens": TOKENS,
        "samples": SAMPLES,
        "operations": 2 * TOKENS * weight.numel(),
        "threads": 1,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def checked(direction):
    def check_round(got, x, weight, bias, dy, offsets):
        check(direction, got, x, weight, bias, dy)

    return check_round


def least_bytes(x, weight, dy):
    """Two of them in, the third one out."""
    return 4 * (x.numel() + weight.numel() + dy.numel())


@pytest.mark.parametrize("which", [0, 1], ids=["ours", "torch"])
@pytest.mark.parametrize("direction", CONTENDERS)
def test_linear(benchmark, one_thread, workload, direction, which):
    name, x, weight, bias, dy, offsets = workload
    contender = CONTENDERS[direction][which]
    benchmark.group = f"linear {direction} {name}"
    benchmark.extra_info.update(describe(workload, direction), ours=which == 0)
    honest(
        benchmark, contender, x, weight, bias, dy, offsets, fresh=scaled, check=checked(direction),
        least_bytes=least_bytes(x, weight, dy),
    )  # fmt: skip


@pytest.mark.parametrize("direction", CONTENDERS)
def test_cost_of_invariance(benchmark, one_thread, workload, direction):
    """Median ratio of processor time, ours over torch, of alternating calls."""
    name, *given = workload
    x, weight, _, dy, _ = given
    rounds = {
        call.__name__: lambda number, call=call: Given(call, scaled(number, *given), checked(direction))
        for call in CONTENDERS[direction]
    }
    seconds = by_turns(rounds, 21, least_bytes(x, weight, dy))
    ratio = statistics.median(mine / theirs for mine, theirs in zip(*seconds.values(), strict=True))
    benchmark.group = "cost of invariance"
    benchmark.extra_info.update(describe(workload, direction), ours_over_torch=ratio)
    honest(
        benchmark, CONTENDERS[direction][0], *given, fresh=scaled, check=checked(direction),
        least_bytes=least_bytes(x, weight, dy),
    )  # fmt: skip
    print(f"\n{direction} {name}: {ratio:.2f} times the time of torch")
