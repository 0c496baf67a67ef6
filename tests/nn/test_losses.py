"""Losses from logits: stable in both tails, right at zero, and a row's bits depend on that row alone."""

import pytest
import torch

from tritonrec.nn import binary_cross_entropy, sigmoid

pytestmark = pytest.mark.smoke


def numbers(rows, tasks, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, tasks, generator=generator) * 6 + 0.4
    labels = torch.randint(0, 2, (rows, tasks), generator=generator)
    return logits, labels, torch.randn(rows, generator=generator) + 0.3


def run(logits, labels, dy):
    leaf = logits.clone().requires_grad_()
    losses = binary_cross_entropy(leaf, labels)
    return losses.detach(), torch.autograd.grad(losses, leaf, dy)[0]


@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_error_is_that_of_rounding(tasks):
    logits, labels, dy = numbers(101, tasks)
    losses, gradient = run(logits, labels, dy)
    z, y = logits.double().requires_grad_(), labels.double()
    exact = -(y * torch.log(torch.sigmoid(z)) + (1 - y) * torch.log(torch.sigmoid(-z))).sum(1)
    torch.testing.assert_close(losses.double(), exact.detach(), rtol=1e-6, atol=0)
    expected = torch.autograd.grad(exact, z, dy.double())[0]
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=0)


def test_at_zero_and_far_out():
    logits = torch.tensor([[0.0], [-0.0], [80.0], [-80.0], [200.0], [-200.0], [3e38], [-3e38]])
    half = torch.tensor([0.5, 0.5])
    for label in (0, 1):
        losses, gradient = run(logits, torch.full((8, 1), label), torch.ones(8))
        assert torch.isfinite(losses).all() and (losses >= 0).all()
        torch.testing.assert_close(losses[:2], torch.log(torch.tensor([2.0, 2.0])))
        assert torch.equal(gradient[:2, 0], half - label)
        wrong = (logits[:, 0] > 0) != bool(label)
        far = torch.arange(8) >= 2
        assert torch.equal(losses[wrong & far], logits[wrong & far, 0].abs())
        assert (losses[~wrong & far] < 1e-30).all()
        # a relative statement: 1 - sigmoid(80) would be 0
        right = gradient[2 + (1 - label), 0].double().abs()
        torch.testing.assert_close(right, torch.exp(torch.tensor(-80.0).double()), rtol=1e-5, atol=0)


def test_labels_between_zero_and_one():
    logits, _, dy = numbers(17, 2)
    labels = torch.rand(17, 2)
    losses, _ = run(logits, labels, dy)
    exact = torch.nn.functional.binary_cross_entropy_with_logits(
        logits.double(), labels.double(), reduction="none"
    )
    torch.testing.assert_close(losses.double(), exact.sum(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_a_row_keeps_its_bits_anywhere(tasks):
    logits, labels, dy = numbers(67, tasks, 1)
    whole, gradient = run(logits, labels, dy)
    probabilities = sigmoid(logits)
    generator = torch.Generator().manual_seed(2)
    for count in (0, 1, 2, 3, 9, 33, 67):
        rows = torch.randperm(67, generator=generator)[:count]
        some, part = run(logits[rows], labels[rows], dy[rows])
        assert torch.equal(some, whole[rows]) and torch.equal(part, gradient[rows]), count
        assert torch.equal(sigmoid(logits[rows]), probabilities[rows]), count


def test_sigmoid_is_precise_in_both_tails():
    x = torch.linspace(-87, 87, 1001)
    exact = torch.sigmoid(x.double())
    assert ((sigmoid(x).double() - exact).abs() / exact).max() < 4 * 2.0**-23
    ends = sigmoid(torch.tensor([0.0, -0.0, 3e38, -3e38, float("inf"), float("-inf")]))
    assert ends.tolist() == [0.5, 0.5, 1, 0, 1, 0]
    assert sigmoid(torch.tensor([float("nan")])).isnan().all()


@pytest.mark.parametrize(
    "shapes", [((3, 2), (3,)), ((3, 1), (3,)), ((3,), (3, 1)), ((3,), (4,)), ((2, 3, 1),) * 2]
)
def test_shapes_that_do_not_fit_are_named(shapes):
    with pytest.raises(ValueError, match=r"both be \(L,\) or \(L, T\), got \(") as error:
        binary_cross_entropy(*map(torch.zeros, shapes))
    assert str(error.value).endswith(" and ".join(map(str, shapes)))


def test_one_task_may_have_no_dimension_of_its_own():
    logits, labels, dy = numbers(101, 1)
    losses, gradient = run(logits[:, 0], labels[:, 0], dy)
    other, another = run(logits, labels, dy)
    assert torch.equal(losses, other) and torch.equal(gradient, another[:, 0])
