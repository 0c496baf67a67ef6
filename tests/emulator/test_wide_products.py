"""Promise: bfloat16 products in tiles of 128 rows round once, and a row keeps its bits in any batch.

`test_plugin.py` runs this file with ``--emulate``; the interpreter cuts a float32 to bfloat16, and has small
tiles.
"""

import pytest
import torch

from tritonrec import ops
from tritonrec.kernels import dispatch

pytestmark = pytest.mark.skipif(dispatch.emulated is None, reason="needs pytest --emulate")
# inputs, outputs: a tile and more, rows that cannot be loaded 16 bytes at a time, few outputs
SHAPES = [(80, 260), (50, 130), (64, 33)]
TOKENS = 131


def drawn(inputs, outputs):
    generator = torch.Generator().manual_seed(inputs)
    shapes = (TOKENS, inputs), (outputs, inputs), (outputs,), (TOKENS, outputs)
    return [(torch.randn(shape, generator=generator) * 3 + 0.5).bfloat16() for shape in shapes]


def assert_rounded_once(got, exact, where):
    """Within one unit of bfloat16 beside float32's own error, where the sum of magnitudes is of its size."""
    allowed = exact.abs() * 2.0**-8 + float(exact.abs().max()) * 2.0**-20
    assert ((got.double() - exact).abs() <= allowed).all(), where


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_and_input_gradients(inputs, outputs):
    x, weight, bias, dy = drawn(inputs, outputs)
    leaf = x.clone().requires_grad_()
    y = ops.linear(leaf, weight, bias, impl="triton")
    (dx,) = torch.autograd.grad(y, leaf, dy)
    assert_rounded_once(y.detach(), x.double() @ weight.double().t() + bias.double(), "y")
    assert_rounded_once(dx, dy.double() @ weight.double(), "dx")
    for rows in (slice(0, 1), slice(127, 129), slice(3, TOKENS)):
        assert torch.equal(ops.linear(x[rows], weight, bias, impl="triton"), y[rows])


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_they_are_the_products_of_one_pass(inputs, outputs):
    """`norm_linear_silu` has the bits of norm, product and SiLU one after another."""
    x, weight, bias, _ = drawn(inputs, outputs)
    scale, shift = x[0].clone(), x[1].clone()
    normed = ops.norm_mul_dropout(x, None, scale, shift, impl="triton")
    expected = ops.silu(ops.linear(normed, weight, bias, impl="triton"), impl="triton")
    got = ops.norm_linear_silu(x, scale, shift, weight, bias, impl="triton")
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_weight_gradients_of_samples(inputs, outputs):
    """Products of eighths are exact, so the sums are."""
    generator = torch.Generator().manual_seed(outputs)
    x, dy = (
        (torch.randint(-15, 16, (TOKENS, size), generator=generator) / 8).bfloat16()
        for size in (inputs, outputs)
    )
    sums = torch.randint(-(2**40), 2**40, (outputs, inputs), generator=generator)
    expected = sums + (dy.double().t() @ x.double() * 2**36).long()
    offsets = torch.tensor([0, 0, 1, 70, TOKENS])
    assert torch.equal(ops.linear_weight_grad(sums, dy, x, offsets, impl="triton"), expected)
