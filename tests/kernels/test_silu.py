"""SiLU: the value at an element depends on that element alone, in any place, and is the same in Triton."""

import pytest
import torch
from float_error import assert_error_at_most_twice
from impls import IMPLS, TRITON, on

from tritonrec.kernels.silu.op import silu

SHAPES = [(), (0,), (3, 0), (1,), (7, 13), (1023,), (1024,), (1025,), (2, 3, 5)]


def numbers(shape, seed=0):
    """Values from far below to far above 0, and a cotangent."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 8 + 0.3, torch.randn(shape, generator=generator) + 0.2


def both(call, x, dy):
    leaf = x.detach().clone().requires_grad_()
    y = call(leaf)
    return y.detach(), *torch.autograd.grad(y, leaf, dy)


@pytest.mark.smoke
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_error_is_that_of_plain_float32(impl, shape):
    x, dy = numbers(shape)
    got = both(lambda t: silu(t, impl=impl), on(impl, x), on(impl, dy))
    plain = both(torch.nn.functional.silu, x, dy)
    exact = both(torch.nn.functional.silu, x.double(), dy.double())
    for what, *values in zip(("y", "dx"), got, plain, exact, strict=True):
        assert_error_at_most_twice(*values, what)


@pytest.mark.parametrize("impl", IMPLS)
def test_relative_error_stays_small_down_to_the_end_of_exp(impl):
    x = torch.linspace(-85, 85, 3001)
    exact = x.double() / (1 + torch.exp(-x.double()))
    relative = (silu(on(impl, x), impl=impl).cpu().double() - exact).abs() / exact.abs().clamp_min(1e-38)
    assert relative.max() < 4 * 2.0**-23, f"x = {x[relative.argmax()]}: {relative.max()}"


@pytest.mark.parametrize("impl", [TRITON])
def test_triton_has_the_bits_of_the_cpu(impl):
    x, dy = numbers((41, 101), 1)
    x.view(-1)[:6] = torch.tensor([0.0, -0.0, 88.5, -88.5, 3e38, -3e38])
    got = both(lambda t: silu(t, impl=impl), on(impl, x), on(impl, dy))
    for one, other in zip(got, both(lambda t: silu(t, impl="cpu"), x, dy), strict=True):
        assert torch.equal(one.cpu(), other)
