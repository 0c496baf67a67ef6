"""Norm, gate and dropout: a row keeps its bits in any batch, and the mask is a function of what it is for."""

import pytest
import torch
from float_error import assert_error_at_most_twice
from impls import IMPLS, TRITON, on
from speeds import slow_on_triton

from tritonrec.kernels.norm_mul_dropout.op import (
    NORM_MUL_DROPOUT,
    NORM_MUL_DROPOUT_BACKWARD,
    _check_sums,
    norm_mul_dropout,
)

# name: tokens, columns
SHAPES = {
    "empty": (0, 5),
    "no_columns": (3, 0),
    "one_row": (1, 9),
    "one_column": (6, 1),
    "odd_dim": (13, 37),
    "block_minus_one": (19, 63),
    "block": (19, 64),
    "block_plus_one": (19, 65),
}
P, SEED = 0.3, -0x1234_5678_9ABC_DEF0


def case(name, seed=0):
    """x, u, weight, bias, and a cotangent."""
    tokens, dim = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, dim), (tokens, dim), (dim,), (dim,), (tokens, dim)]
    x, u, weight, bias, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    return x * 3 + 1, u + 0.2, weight + 1, bias, dy + 0.1


def places(tokens, seed=0):
    """Sample ids over all of int64, and positions, of which the low 32 bits count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**63), 2**63 - 1, (tokens,), generator=generator)
    ids[: tokens // 2] = torch.arange(tokens // 2) // 4
    return ids, torch.arange(tokens) % 4


def gradients(impl, tensors, ids=None, positions=None, gated=True, p=P, eps=1e-6):
    x, u, weight, bias, dy = (on(impl, tensor) for tensor in tensors)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in ((x, u) if gated else (x,))]
    leaves += [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    some = (on(impl, ids), on(impl, positions)) if ids is not None else (None, None)
    gate = leaves[1] if gated else None
    y = norm_mul_dropout(
        leaves[0], gate, *leaves[-2:], eps, p if ids is not None else 0.0, SEED, *some, impl=impl
    )
    return [value.cpu() for value in (y.detach(), *torch.autograd.grad(y, leaves, dy))]


def plain(tensors, mask, gated, eps=1e-6):
    x, u, weight, bias = leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[:4]]
    y = torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)
    y = (u * y if gated else y) * mask
    inputs = leaves if gated else [x, weight, bias]
    return [y.detach(), *torch.autograd.grad(y, inputs, tensors[4])]


def mask_of(impl, ids, positions, dim, p=P, seed=SEED):
    """Which columns survive, seen through the op: weight 0 and bias 1 leave u * kept / (1 - p)."""
    x = on(impl, torch.randn(len(ids), dim, generator=torch.Generator().manual_seed(9)))
    ones, zero = torch.ones_like(x), torch.zeros(dim, device=x.device)
    y = norm_mul_dropout(
        x, ones, zero, zero + 1, 1e-6, p, seed, on(impl, ids), on(impl, positions), impl=impl
    ).cpu()
    assert ((y == 0) | (y == torch.tensor(1 / (1 - p)))).all()
    return y != 0


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("impl", "name"),
    slow_on_triton(
        IMPLS,
        [name for name in SHAPES if name != "no_columns"],
        ["empty", "one_row", "one_column", "block_plus_one"],
    ),
)
def test_error_is_that_of_plain_float32(impl, name, gated, dropping):
    tensors = case(name)
    ids, positions = places(len(tensors[0])) if dropping else (None, None)
    mask = torch.ones(1)
    if dropping:
        mask = mask_of("reference", ids, positions, tensors[0].shape[1]) / (1 - P)
    got = gradients(impl, tensors, ids, positions, gated)
    same = plain(tensors, mask, gated)
    exact = plain([tensor.double() for tensor in tensors], mask.double(), gated)
    names = ("y", "dx", "du", "dweight", "dbias") if gated else ("y", "dx", "dweight", "dbias")
    # x reaches 10, and what is left of it after the mean is taken off keeps its rounding
    for what, *values in zip(names, got, same, exact, strict=True):
        assert_error_at_most_twice(*values, what, largest=10.0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_rate_is_that_asked_for(p):
    ids, positions = torch.arange(400) // 20, torch.arange(400) % 20
    kept = mask_of("cpu", ids, positions, 500, p)
    deviation = (p * (1 - p)) ** 0.5
    assert abs(kept.double().mean() - (1 - p)) < 5 * deviation / kept.numel() ** 0.5
    for axis in (0, 1):  # and along every row and column
        count = kept.shape[axis]
        assert (kept.double().mean(axis) - (1 - p)).abs().max() < 6 * deviation / count**0.5
    for other in (kept[1:] == kept[:-1], kept[:, 1:] == kept[:, :-1], kept[20:] == kept[:-20]):
        expected = p * p + (1 - p) * (1 - p)
        assert abs(other.double().mean() - expected) < 5 * 0.5 / other.numel() ** 0.5


@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_the_mask_depends_on_seed_sample_and_position_alone(impl):
    ids, positions = places(12)
    mask = mask_of(impl, ids, positions, 37)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mask_of(impl, ids[order], positions[order], 37), mask[order])
    assert torch.equal(mask_of(impl, ids[7:8], positions[7:8], 37), mask[7:8])
    assert torch.equal(mask_of(impl, ids, positions, 11), mask[:, :11])
    for change in (
        mask_of(impl, ids ^ (1 << 40), positions, 37),
        mask_of(impl, ids, positions + 1, 37),
        mask_of(impl, ids, positions, 37, seed=SEED + 1),
        mask_of(impl, ids, positions, 37, seed=SEED ^ (1 << 40)),
    ):
        assert ((change != mask).any(1)).all()


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_backward_uses_the_mask_of_forward(impl):
    tensors = case("odd_dim")
    ids, positions = places(13)
    kept = mask_of(impl, ids, positions, 37)
    x, u, weight, bias, dy = (on(impl, tensor) for tensor in tensors)
    sites = on(impl, ids), on(impl, positions)
    y, means, rstds = NORM_MUL_DROPOUT.launch(x, u, weight, bias, 1e-6, P, SEED, *sites, impl=impl)
    _, du, dweight, dbias = NORM_MUL_DROPOUT_BACKWARD.launch(
        dy, x, u, weight, bias, P, SEED, *sites, means, rstds, impl=impl
    )
    for value in (y, du, dweight, dbias):
        assert torch.equal(value.cpu() != 0, kept)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the interpreter is numpy
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("impl", IMPLS)
def test_a_constant_row_without_eps_is_nan_and_the_others_are_not(impl):
    x, *rest = case("odd_dim")
    expected = gradients(impl, [x, *rest], gated=False, eps=0.0)[:2]
    x[3] = 2.5
    for got, before in zip(gradients(impl, [x, *rest], gated=False, eps=0.0), expected, strict=False):
        assert got[3].isnan().all()
        others = torch.arange(len(x)) != 3
        assert torch.equal(got[others], before[others]) and not before.isnan().any()


@pytest.mark.parametrize("impl", IMPLS)
def test_no_dropout_outside_training(impl):
    x, u, weight, bias, _ = (on(impl, tensor) for tensor in case("odd_dim"))
    ids, positions = (on(impl, site) for site in places(13))
    calm = norm_mul_dropout(x, u, weight, bias, impl=impl)
    assert torch.equal(
        calm, norm_mul_dropout(x, u, weight, bias, 1e-6, P, SEED, ids, positions, training=False, impl=impl)
    )
    assert not torch.equal(
        calm, norm_mul_dropout(x, u, weight, bias, 1e-6, P, SEED, ids, positions, impl=impl)
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_a_constant_row_has_no_infinite_gradient(impl):
    tensors = case("odd_dim")
    tensors[0][3] = 5.0
    for value in gradients(impl, tensors):
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("dim", [130, 256])
@pytest.mark.parametrize("impl", [TRITON])
def test_means_and_deviations_have_one_order_of_sums(impl, dim):
    """Whatever else is computed, and wherever the tensors begin: recomputing changes no bit."""
    from tritonrec.kernels.norm_mul_dropout.triton_norm import normalise

    generator = torch.Generator().manual_seed(dim)
    x, u, weight, bias = (
        on(impl, torch.randn(shape, generator=generator)) for shape in ((6, dim), (6, dim), (dim,), (dim,))
    )
    ids = on(impl, torch.arange(6))
    shifted = x.new_empty(6 * dim + 1)[1:].view(6, dim).copy_(x)
    apart = x.new_empty(6, 2 * dim)[:, ::2].copy_(x)
    sums = []
    for rows, gate, p, y in (
        (x, None, 0.0, None), (x, None, 0.0, torch.empty_like(x)), (x, u, 0.0, torch.empty_like(x)),
        (x, u, P, torch.empty_like(x)), (shifted, None, 0.0, None), (apart, None, 0.0, None),
    ):  # fmt: skip
        means, rstds = x.new_empty(6), x.new_empty(6)
        normalise(rows, gate, weight, bias, 1e-6, p, SEED, ids, ids, y, means, rstds)
        sums.append(torch.stack([means, rstds]))
    for other in sums[1:]:
        assert torch.equal(other, sums[0])


def test_sums_have_the_names_of_weight_and_bias():
    sums = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="names must be those of weight and bias"):
        _check_sums(sums, sums, torch.zeros(2, 4), 20, ("weight",))
