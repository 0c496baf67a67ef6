"""Promise: products of float32 on tensor cores have at most twice the error of plain float32, for any sum.

A number is the sum of three bfloat16, a product that of the six largest products of theirs. `test_plugin.py`
runs this file with ``--emulate``.
"""

import math

import pytest
import torch

from tritonrec import ops
from tritonrec.harness.emulator.driver import current
from tritonrec.kernels import dispatch
from tritonrec.kernels.linear.triton_linear import configuration, configuration_of_weights

pytestmark = pytest.mark.skipif(dispatch.emulated is None, reason="needs pytest --emulate")
TERMS = [1, 2, 5, 31, 64, 200]
OUTPUTS = 66
DATA = {
    "asymmetric": lambda x, _: x * 3 + 0.5,
    "positive": lambda x, _: x.abs() * 1e18 + 1e17,
    "of_all_sizes": lambda x, g: (x + 1) * 2.0 ** torch.randint(-20, 20, x.shape, generator=g),
    # products cancel to a thousandth of the largest
    "cancelling": lambda x, _: 1e3 + x,
}


def drawn(kind, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [DATA[kind](torch.randn(shape, generator=generator), generator) for shape in shapes]


def assert_at_most_twice(got, plain, exact, where, rounding=0.0):
    """As `tests/kernels/float_error.py`, by the largest element of each tensor; `rounding` is beside it."""
    error, before = (float((tensor.double() - exact).abs().max()) for tensor in (got, plain))
    allowed = 2 * before + 2.0**-24 * float(exact.abs().max()) + rounding
    assert error <= allowed, f"{where}: error {error:.3g}, allowed {allowed:.3g}, plain {before:.3g}"


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("terms", TERMS)
def test_rows_and_input_gradients(terms, data):
    x, weight, dy = drawn(data, (70, terms), (OUTPUTS, terms), (70, OUTPUTS))
    leaf = x.clone().requires_grad_()
    y = ops.linear(leaf, weight, impl="triton")
    (dx,) = torch.autograd.grad(y, leaf, dy)
    exact = x.double() @ weight.double().t(), dy.double() @ weight.double()
    plain = x @ weight.t(), dy @ weight
    for where, *tensors in zip(("y", "dx"), (y.detach(), dx), plain, exact, strict=True):
        assert_at_most_twice(*tensors, where)
    row = ops.linear(x[37:38], weight, impl="triton")
    assert torch.equal(row, y[37:38])


@pytest.mark.slow
@pytest.mark.parametrize("data", ["asymmetric", "positive", "cancelling"])
@pytest.mark.parametrize("tokens", [1, 2, 40, 130])
def test_weight_gradients_of_samples(tokens, data):
    """A sample's gradient, rounded once; a share of samples adds the same numbers."""
    scale = 2.0**-58 if data == "positive" else 1.0
    dy, x = (tensor * scale for tensor in drawn(data, (2 * tokens, 35), (2 * tokens, OUTPUTS), seed=tokens))
    bits = 20
    sums = []
    for begin, end in ((0, 1), (1, 2), (0, 2)):
        grid = torch.zeros(35, OUTPUTS, dtype=torch.int64)
        offsets = torch.arange(end - begin + 1) * tokens
        rows = slice(begin * tokens, end * tokens)
        ops.linear_weight_grad(grid, dy[rows], x[rows], offsets, bits, impl="triton")
        sums.append(grid)
    assert torch.equal(sums[0] + sums[1], sums[2])
    got = sums[0].double() * 2.0**-bits
    first = slice(0, tokens)
    exact = dy[first].double().t() @ x[first].double()
    assert_at_most_twice(got, dy[first].t() @ x[first], exact, "weight", 2.0**-bits / 2)


def test_what_is_not_finite_is_that_of_plain_float32():
    x, weight = drawn("asymmetric", (9, 40), (OUTPUTS, 40))
    for (row, column), value in {(1, 3): math.inf, (2, 39): -math.inf, (3, 0): math.nan}.items():
        x[row, column] = value
    weight[5, 7] = math.inf
    weight[6, 7] = math.nan
    weight[7, 3] = 0.0  # times infinity
    x[4] = 0.0
    x[4, 0] = 2e38  # a product beyond the largest number
    x[6, 7] = 0.0
    got, plain = ops.linear(x, weight, impl="triton"), x.double() @ weight.double().t()
    assert torch.equal(got.isnan(), plain.isnan())
    infinite = plain.abs() > torch.finfo(torch.float32).max
    assert torch.equal(got.isinf(), infinite)
    assert torch.equal(got[infinite].sign(), plain[infinite].sign().float())


def test_small_numbers_lose_at_most_half_a_bfloat16():
    """The third part of a number below 2**-109 is no bfloat16."""
    least = 2.0**-133
    x = (torch.randn(5, 3, generator=torch.Generator().manual_seed(1)) + 0.3) * 2.0**-125
    weight = torch.eye(3)
    got = ops.linear(x, weight, impl="triton")
    assert (got.double() - x.double()).abs().max() <= least / 2
    large = x * 2.0**17
    assert torch.equal(ops.linear(large, weight, impl="triton"), large)


def test_they_are_matrix_instructions():
    """Fewer instructions than a multiply-add for each term of a product, and none of those."""
    x, weight = drawn("asymmetric", (256, 256), (256, 256))
    assert configuration(x, 64, 64)["PRECISION"] == "bf16x6"
    session = current()
    session.keep_history, session.history = True, []
    ops.linear(x, weight, impl="triton")
    session.keep_history = False
    ((_, counts),) = session.history
    multiply_adds = 256**3 // 32
    assert counts.instructions < (1.05 if dispatch.emulated < (9, 0) else 0.65) * multiply_adds
    expected = "bf16x6" if dispatch.emulated >= (9, 0) else "ieee"
    assert configuration_of_weights(x, 64)["PRECISION"] == expected


@pytest.mark.parametrize("dim", [32, 50])
def test_attention_of_float32(dim):
    """Output and gradients; a sequence has its bits beside others."""
    offsets, heads = torch.tensor([0, 70, 75]), 2
    q, k, v, do = drawn("asymmetric", *4 * [(75, heads, dim)], seed=dim)

    def attend(impl, dtype, first=0):
        own = [tensor[first:].to(dtype, copy=True).requires_grad_() for tensor in (q, k, v)]
        cuts = offsets[offsets >= first] - first
        out = ops.hstu_attention(*own, cuts, 70, alpha=0.05, scaling_seqlen=70, impl=impl)
        grads = torch.autograd.grad(out, own, do[first:].to(dtype))
        return [out.detach(), *grads]

    got = attend("triton", torch.float32)
    plain, exact = (attend("reference", dtype) for dtype in (torch.float32, torch.float64))
    for where, *tensors in zip(("out", "dq", "dk", "dv"), got, plain, exact, strict=True):
        assert_at_most_twice(*tensors, where)
    for whole, alone in zip(got, attend("triton", torch.float32, 70), strict=True):
        assert torch.equal(whole[70:], alone)
