"""Sampled softmax: a token's loss and gradients depend on that token alone, bit for bit."""

import pytest
import torch
import torch.utils._pytree as pytree
from float_error import assert_error_at_most_twice
from impls import IMPLS, TRITON, on
from torch.utils._python_dispatch import TorchDispatchMode

from tritonrec.kernels.accumulator import GradientAccumulator
from tritonrec.kernels.fixed_point.errors import ExactSumError
from tritonrec.kernels.rows.op import gather_rows
from tritonrec.kernels.sampled_softmax.op import _check_backward, sampled_softmax

# name: tokens, negatives, features
SHAPES = {
    "empty": (0, 3, 5),
    "one_row": (1, 4, 7),
    "no_negatives": (5, 0, 6),
    "one_negative": (5, 1, 1),
    "odd_dim": (23, 11, 37),
    "tile_minus_one": (3, 31, 128),
    "tile": (3, 32, 128),
    "tile_plus_one": (3, 33, 128),
}


def case(name, seed=0):
    """hidden, positive, negatives, valid and a cotangent; scores go up to 8 in magnitude and more."""
    tokens, count, dim = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, dim), (tokens, dim), (tokens, count, dim)]
    hidden, positive, negatives = (torch.randn(shape, generator=generator) + 0.1 for shape in shapes)
    valid = torch.rand(tokens, count, generator=generator) > 0.3
    if tokens > 2:
        valid[1] = False
    return hidden * 4 * dim**-0.5, positive, negatives, valid, torch.randn(tokens, generator=generator) + 0.3


def gradients(call, hidden, positive, negatives, valid, dloss):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (hidden, positive, negatives)]
    losses = call(*leaves, valid, 0.7)
    return losses.detach(), *torch.autograd.grad(losses, leaves, dloss)


def plain(hidden, positive, negatives, valid, temperature):
    """What one would write in torch."""
    scores = torch.cat([positive.unsqueeze(1), negatives], 1).matmul(hidden.unsqueeze(2)).squeeze(2)
    mask = torch.cat([torch.ones_like(valid[:, :1]), valid], 1) if valid.shape[1] else scores == scores
    scores = (scores / temperature).masked_fill(~mask, -torch.inf)
    return torch.nn.functional.cross_entropy(
        scores, torch.zeros(len(hidden), dtype=torch.int64), reduction="none"
    )


def ours(impl):
    return lambda *tensors: sampled_softmax(*tensors, impl=impl)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_error_is_that_of_plain_float32(impl, name):
    *tensors, valid, dloss = case(name)
    got = gradients(ours(impl), *(on(impl, tensor) for tensor in (*tensors, valid, dloss)))
    same = gradients(plain, *tensors, valid, dloss)
    exact = gradients(plain, *(tensor.double() for tensor in tensors), valid, dloss.double())
    for what, *values in zip(("loss", "dhidden", "dpositive", "dnegatives"), got, same, exact, strict=True):
        assert_error_at_most_twice(*values, what, largest=8.0 if what == "loss" else 0.0)
    assert (got[0] >= 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_negative_that_is_not_valid_counts_for_nothing(impl):
    hidden, positive, negatives, valid, dloss = (on(impl, tensor) for tensor in case("odd_dim"))
    expected = gradients(ours(impl), hidden, positive, negatives, valid, dloss)
    poisoned = torch.where(valid[:, :, None], negatives, 1e4)
    got = gradients(ours(impl), hidden, positive, poisoned, valid, dloss)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert not got[3][~valid].any() and got[3][valid].any()
    assert not got[0][1] and not got[1][1].any()  # no negative at all: the loss is zero


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_neither_overflow_nor_vanish(impl):
    hidden = torch.tensor([[200.0], [-200.0], [200.0]])
    positive, negatives = torch.tensor([[1.0], [1.0], [-1.0]]), torch.tensor([[[-1.0]], [[-1.0]], [[1.0]]])
    valid = torch.ones(3, 1, dtype=torch.bool)
    losses, dhidden, *_ = gradients(
        ours(impl), *(on(impl, t) for t in (hidden, positive, negatives, valid, torch.ones(3)))
    )
    torch.testing.assert_close(losses.cpu(), torch.tensor([0.0, 400 / 0.7, 400 / 0.7]))
    torch.testing.assert_close(dhidden.cpu(), torch.tensor([[0.0], [-2 / 0.7], [2 / 0.7]]))


@pytest.mark.parametrize("impl", IMPLS)
def test_not_a_number_shows(impl):
    hidden, positive, negatives, valid, _ = case("odd_dim")
    hidden[4, 2] = float("nan")
    losses = sampled_softmax(*(on(impl, t) for t in (hidden, positive, negatives, valid)), impl=impl)
    assert losses.isnan().nonzero().view(-1).tolist() == [4]


@pytest.mark.parametrize("impl", IMPLS)
def test_the_temperature_is_one_by_default(impl):
    tensors = [on(impl, tensor) for tensor in case("odd_dim")[:4]]
    assert torch.equal(sampled_softmax(*tensors, impl=impl), sampled_softmax(*tensors, 1.0, impl=impl))


def by_rows(name, seed=0):
    """`case`, with negatives that are rows of a matrix, some of them often and some never; and the rows."""
    hidden, positive, negatives, valid, dloss = case(name, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    matrix = torch.randn(max(3, len(negatives)), negatives.shape[2], generator=generator) + 0.1
    rows = torch.randint(0, len(matrix) - 1, valid.shape, generator=generator)
    rows[:, ::3] = 1
    return hidden, positive, matrix, valid, dloss, rows


def gathered(impl, rows):
    """The op, given rows of the matrix that were gathered before."""

    def call(hidden, positive, matrix, valid, temperature):
        negatives = gather_rows(matrix, rows.reshape(-1), impl=impl).view(*rows.shape, matrix.shape[1])
        return sampled_softmax(hidden, positive, negatives, valid, temperature, impl=impl)

    return call


def in_place(impl, rows):
    return lambda *tensors: sampled_softmax(*tensors, rows=rows, impl=impl)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_negatives_in_a_matrix_have_the_bits_of_gathered_ones(impl, name):
    *tensors, rows = (on(impl, tensor) for tensor in by_rows(name))
    expected = gradients(gathered(impl, rows), *tensors)
    for one, other in zip(gradients(in_place(impl, rows), *tensors), expected, strict=True):
        assert torch.equal(one, other)
    hidden, positive, matrix, valid, _ = tensors
    wide = torch.full((len(matrix), matrix.shape[1] + 3), float("nan"), device=matrix.device)
    wide[:, 1:-2] = matrix
    turned = rows.t().contiguous().t()
    losses = in_place(impl, turned)(hidden, positive, wide[:, 1:-2], valid, 0.7)
    assert torch.equal(losses, expected[0])


@pytest.mark.parametrize("name", ["one_row", "odd_dim", "tile_plus_one"])
@pytest.mark.parametrize("impl", IMPLS)
def test_exact_gradients_of_a_matrix_are_those_of_gathered_rows(impl, name):
    hidden, positive, matrix, valid, dloss, rows = (on(impl, tensor) for tensor in by_rows(name))

    def sums(call):
        module = torch.nn.Module()
        module.matrix = torch.nn.Parameter(matrix.clone())
        accumulator = GradientAccumulator(module)
        with accumulator.active():
            call(hidden, positive, module.matrix, valid, 0.7).backward(dloss)
        return accumulator.take()["matrix"]

    expected = sums(gathered(impl, rows))
    assert torch.equal(sums(in_place(impl, rows)), expected)
    assert expected.any() and not expected[-1].any()  # the last row is nobody's negative


@pytest.mark.parametrize("impl", [TRITON])
def test_one_row_takes_the_gradients_of_all_places(impl):
    hidden, positive, matrix, valid, dloss, rows = (on(impl, tensor) for tensor in by_rows("odd_dim"))
    tensors = hidden, positive, matrix[:1], valid, dloss
    expected = gradients(gathered(impl, rows * 0), *tensors)
    for one, other in zip(gradients(in_place(impl, rows * 0), *tensors), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_gathered_negatives_are_in_no_memory(impl):
    hidden, positive, matrix, valid, dloss, rows = (on(impl, tensor) for tensor in by_rows("tile"))
    leaves = [tensor.requires_grad_() for tensor in (hidden, positive, matrix)]

    def largest(call):
        with Elements() as seen:
            losses = call(*leaves, valid, 0.7)
            if impl == "triton":  # on the CPU the terms of the gradient are written out
                torch.autograd.grad(losses, leaves, dloss)
        return seen.most

    assert largest(in_place(impl, rows)) < rows.numel() * matrix.shape[1] <= largest(gathered(impl, rows))


class Elements(TorchDispatchMode):
    """The most elements that a tensor has which an aten op makes inside."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.most = max(self.most, each.untyped_storage().nbytes() // each.element_size())
        return result


@pytest.mark.parametrize("impl", IMPLS)
def test_an_exact_gradient_that_is_not_finite_is_named(impl):
    hidden, positive, matrix, valid, dloss, rows = (on(impl, tensor) for tensor in by_rows("odd_dim"))
    hidden[4, 0] = float("nan")
    module = torch.nn.Module()
    module.matrix = torch.nn.Parameter(matrix)
    with GradientAccumulator(module).active():
        losses = in_place(impl, rows)(hidden, positive, module.matrix, valid, 0.7)
        with pytest.raises(ExactSumError, match=r"gradient of matrix\[44, 0\]"):  # token 4 has 44 to 54
            losses.backward(dloss)


def test_a_gradient_of_a_gradient_is_refused():
    hidden, positive, matrix, valid, _, rows = by_rows("odd_dim")
    matrix.requires_grad_()
    (gradient,) = torch.autograd.grad(
        in_place("cpu", rows)(hidden, positive, matrix, valid, 1.0).sum(), matrix, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="sampled_softmax_backward has no derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("bad", [-1, 23, 2**40])
def test_a_row_outside_the_matrix_is_refused(impl, bad):
    hidden, positive, matrix, valid, _, rows = by_rows("odd_dim")
    rows[3, 7] = bad
    with pytest.raises(IndexError, match=rf"rows\[40\] = {bad} is outside \[0, 23\)"):
        in_place(impl, rows)(hidden, positive, matrix, valid, 1.0)


@pytest.mark.parametrize("temperature", [0.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    rows, valid = torch.zeros(4, 3), torch.ones(4, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"temperature must lie in \(0, inf\), got {temperature}"):
        sampled_softmax(rows, rows, torch.zeros(4, 5, 3), valid, temperature)


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("impl", [TRITON])
def test_bits_do_not_depend_on_where_tensors_begin(impl, dim):
    generator = torch.Generator().manual_seed(dim)
    shapes = (5, dim), (5, dim), (5, 32, dim), (5,)
    tensors = [on(impl, torch.randn(shape, generator=generator)) for shape in shapes]
    valid = on(impl, torch.rand(5, 32, generator=generator) < 0.8)

    def computed(hidden, positive, negatives, dloss):
        leaves = [tensor.detach().requires_grad_() for tensor in (hidden, positive, negatives)]
        loss = sampled_softmax(*leaves, valid, impl=impl)
        return [loss, *torch.autograd.grad(loss, leaves, dloss)]

    shifted = [t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t) for t in tensors]
    expected = computed(*tensors)
    for moved in ({0}, {1}, {2}, {0, 1, 2, 3}):
        arguments = [shifted[i] if i in moved else tensor for i, tensor in enumerate(tensors)]
        for got, one in zip(computed(*arguments), expected, strict=True):
            assert torch.equal(got, one), moved


def test_a_gradient_of_other_losses_is_refused():
    with pytest.raises(ValueError, match="dloss"):
        _check_backward(torch.zeros(3), torch.zeros(2, 4))
