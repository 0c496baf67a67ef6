"""Norm, linear layer and SiLU as one op: the bits of the three, whatever is kept for backward."""

from itertools import pairwise, product

import pytest
import torch
from float_error import assert_error_at_most_twice
from impls import GPU, IMPLS, TRITON, on
from speeds import slow_on_triton

from tritonrec import ops
from tritonrec.kernels.norm_linear_silu.op import norm_linear_silu

EPS = 1e-5
CHOICES = [(), ("norm",), ("linear",), ("norm", "linear")]

# name: tokens, inputs, outputs
SHAPES = {
    "empty": (0, 5, 3),
    "one_row": (1, 7, 5),
    "one_column": (6, 1, 3),
    "one_output": (6, 5, 1),
    "odd_dim": (40, 37, 35),
    "block_plus_one": (33, 33, 33),
    "wide": (9, 130, 70),
}
op = torch.ops.tritonrec.norm_linear_silu
backward_op = torch.ops.tritonrec.norm_linear_silu_backward_into


def case(name, seed=0):
    """x, norm_weight, norm_bias, weight, bias and a cotangent; z reaches 8 in size."""
    tokens, inputs, outputs = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, inputs), (inputs,), (inputs,), (outputs, inputs), (outputs,), (tokens, outputs)]
    x, norm_weight, norm_bias, weight, bias, dy = (torch.randn(s, generator=generator) for s in shapes)
    return x * 3 + 1, norm_weight + 1, norm_bias, weight * 2 * inputs**-0.5, bias + 0.3, dy + 0.1


def gradients(call, tensors):
    """y, dx and the gradients of the parameters."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[:-1]]
    y = call(*leaves)
    return [value.cpu() for value in (y.detach(), *torch.autograd.grad(y, leaves, tensors[-1]))]


def fused(impl, recompute=("norm",)):
    return lambda *leaves: norm_linear_silu(*leaves, EPS, recompute, impl=impl)


def unfused(impl):
    def call(x, norm_weight, norm_bias, weight, bias):
        normed = ops.norm_mul_dropout(x, None, norm_weight, norm_bias, EPS, impl=impl)
        return ops.silu(ops.linear(normed, weight, bias, impl=impl), impl=impl)

    return call


def plain(x, norm_weight, norm_bias, weight, bias):
    normed = torch.nn.functional.layer_norm(x, norm_weight.shape, norm_weight, norm_bias, EPS)
    z = torch.nn.functional.linear(normed, weight, bias)
    return z / (1 + torch.exp(-z))


WHAT = ("y", "dx", "dnorm_weight", "dnorm_bias", "dweight", "dbias")


@pytest.mark.parametrize(
    ("impl", "kept"),
    slow_on_triton(
        IMPLS,
        [("odd_dim", ()), ("odd_dim", ("norm", "linear")), *product(SHAPES, CHOICES[1:3])],
        [("odd_dim", ("norm",)), ("one_row", ("linear",)), ("block_plus_one", ("linear",))],
    ),
)
def test_bits_are_those_of_the_three_ops(impl, kept):
    name, recompute = kept
    tensors = [on(impl, tensor) for tensor in case(name)]
    expected = gradients(unfused(impl), tensors)
    for what, got, want in zip(WHAT, gradients(fused(impl, recompute), tensors), expected, strict=True):
        assert torch.equal(got, want), what
    if name == "odd_dim":
        assert expected[0].min() < -0.2 and expected[0].max() > 6


@pytest.mark.parametrize(("impl", "name"), slow_on_triton(IMPLS, SHAPES, SHAPES.keys() - {"odd_dim", "wide"}))
def test_error_is_that_of_plain_float32(impl, name):
    tensors = case(name)
    got = gradients(fused(impl), [on(impl, tensor) for tensor in tensors])
    same = gradients(plain, tensors)
    exact = gradients(plain, [tensor.double() for tensor in tensors])
    # sums over the tokens pass through terms of this size
    for what, *values in zip(WHAT, got, same, exact, strict=True):
        assert_error_at_most_twice(*values, what, largest=10.0)


@pytest.mark.parametrize("recompute", CHOICES, ids="-".join)
def test_what_is_kept_for_backward(recompute):
    tensors = case("odd_dim")
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        fused("cpu", recompute)(*(tensor.requires_grad_() for tensor in tensors[:-1]))
    parameters = 2 * 37 + 37 * 35 + 35
    kept = 40 * 37 * ("norm" not in recompute) + 40 * 35 * ("linear" not in recompute)
    assert sum(sizes) == 40 * 37 + parameters + 2 * 40 + kept


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_without_a_bias(impl):
    x, norm_weight, norm_bias, weight, _, dy = (on(impl, tensor) for tensor in case("odd_dim"))
    leaves = [tensor.requires_grad_() for tensor in (x, norm_weight, norm_bias, weight)]
    zero = torch.zeros(35, device=x.device)
    with_zero = norm_linear_silu(*leaves, zero, EPS, impl=impl)
    without = norm_linear_silu(*leaves, None, EPS, ("linear",), impl=impl)
    assert torch.equal(with_zero, without)
    pairs = (torch.autograd.grad(y, leaves, dy) for y in (with_zero, without))
    assert all(map(torch.equal, *pairs))


def test_exact_weight_gradient_from_the_buffer():
    """dz and n make each sample's gradient on the grid: what `linear` makes of the unfused ones."""
    x, norm_weight, norm_bias, weight, bias, dy = case("odd_dim")
    _, *kept = op(x, norm_weight, norm_bias, weight, bias, EPS, False, False, "cpu")
    dz = dy.clone()
    normed = backward_op(dz, x, norm_weight, norm_bias, weight, bias, EPS, *kept, "cpu")[3]
    offsets = [0, 7, 7, 30, 40]
    whole, parts = (torch.zeros_like(weight, dtype=torch.int64) for _ in range(2))
    ops.linear_weight_grad(whole, dz, normed, torch.tensor(offsets))
    for start, stop in reversed(list(pairwise(offsets))):
        ops.linear_weight_grad(parts, dz[start:stop], normed[start:stop], torch.tensor([0, stop - start]))
    assert whole.any() and torch.equal(whole, parts)
    exact = gradients(plain, [tensor.double() for tensor in case("odd_dim")])[4]
    torch.testing.assert_close(ops.from_fixed_point(whole).double(), exact, rtol=1e-5, atol=1e-4)


# The interpreter cuts a float32 to bfloat16 instead of rounding it.
@pytest.mark.parametrize(("impl", "recompute"), slow_on_triton([TRITON], CHOICES, [("norm", "linear")]))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if GPU else [torch.float16])
def test_half_precision(impl, dtype, recompute):
    """Against the same with float64 in between; whatever is kept, the bits are the same."""
    tensors = [on(impl, tensor.to(dtype)) for tensor in case("odd_dim")]
    got = gradients(fused(impl, recompute), tensors)
    assert all(value.dtype == dtype for value in got)
    for one, other in zip(got, gradients(fused(impl), tensors), strict=True):
        assert torch.equal(one, other)
    halves = [tensor.cpu() for tensor in tensors]
    exact = gradients(plain, [tensor.double() for tensor in halves])
    for what, value, right in zip(WHAT, got, exact, strict=True):
        error = (value.double() - right).square().mean().sqrt() / right.square().mean().sqrt()
        assert error < 4 * torch.finfo(dtype).eps, (what, error)


def test_other_bad_arguments():
    tensors = [tensor.double() for tensor in case("odd_dim")]
    with pytest.raises(ValueError, match=r"on the CPU takes float32, .* got torch\.float64"):
        norm_linear_silu(*tensors[:5], impl="cpu")
    *inputs, dy = case("odd_dim")
    kept = op(*inputs, EPS, True, True, "cpu")[1:]
    with pytest.raises(ValueError, match=r"dy is written in place and must be \(40, 35\) and contiguous"):
        backward_op(dy.t().contiguous().t(), *inputs, EPS, *kept, "cpu")


def test_one_name_to_recompute_is_a_name():
    *inputs, _ = case("odd_dim")
    assert torch.equal(norm_linear_silu(*inputs, EPS, "norm"), norm_linear_silu(*inputs, EPS, ("norm",)))
    with pytest.raises(ValueError, match=r"got \['silu'\]"):
        norm_linear_silu(*inputs, EPS, "silu")
