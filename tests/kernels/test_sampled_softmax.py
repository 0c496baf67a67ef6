"""Sampled softmax: a token's loss and gradients depend on that token alone, bit for bit."""

import pytest
import torch
from float_error import assert_error_at_most_twice
from hypothesis import given, settings
from hypothesis import strategies as st
from speeds import slow_on_triton

from tritonrec.kernels.sampled_softmax import sampled_softmax

GPU = torch.cuda.is_available()
TRITON = pytest.param("triton", marks=pytest.mark.gpu if GPU else pytest.mark.interpreter)
IMPLS = ["reference", "cpu", TRITON]

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


def on(impl, tensor):
    return tensor.cuda() if impl == "triton" and GPU else tensor


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


@pytest.mark.parametrize(
    ("impl", "name"), slow_on_triton(["cpu", TRITON], ["odd_dim", "tile_plus_one"], ["odd_dim"])
)
def test_a_token_keeps_its_bits_in_any_batch(impl, name):
    tensors = [on(impl, tensor) for tensor in case(name)]
    whole = gradients(ours(impl), *tensors)
    tokens = len(tensors[0])
    generator = torch.Generator().manual_seed(1)
    for count in (1, 1, 2, 3, tokens // 2, tokens):
        rows = on(impl, torch.randperm(tokens, generator=generator)[:count])
        for some, every in zip(gradients(ours(impl), *(t[rows] for t in tensors)), whole, strict=True):
            assert torch.equal(some, every[rows]), count


def test_threads_change_no_bit(threads_one_and_two):
    generator = torch.Generator().manual_seed(2)
    hidden, positive = torch.randn(2, 999, 64, generator=generator)
    negatives = torch.randn(999, 130, 64, generator=generator)
    valid = torch.rand(999, 130, generator=generator) > 0.1
    one, two = threads_one_and_two(
        lambda: gradients(ours("cpu"), hidden, positive, negatives, valid, torch.ones(999))
    )
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_strided_inputs(impl):
    hidden, positive, negatives, valid, dloss = (on(impl, tensor) for tensor in case("odd_dim"))
    expected = gradients(ours(impl), hidden, positive, negatives, valid, dloss)
    strided = (
        hidden.t().contiguous().t(),
        positive.repeat_interleave(2, 0)[::2],
        negatives.transpose(0, 1).contiguous().transpose(0, 1),
        valid.t().contiguous().t(),
    )
    losses = sampled_softmax(*strided, 0.7, impl=impl)
    leaves = [tensor.detach().requires_grad_() for tensor in strided[:3]]
    wide = torch.stack([dloss, dloss * 5], 1)[:, 0]
    got = torch.autograd.grad(sampled_softmax(*leaves, strided[3], 0.7, impl=impl), leaves, wide)
    for one, other in zip((losses, *got), expected, strict=True):
        assert torch.equal(one, other)


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


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.integers(1, 6),
    count=st.integers(0, 9),
    dim=st.integers(1, 40),
    seed=st.integers(0, 99),
    at=st.integers(0, 5),
)
def test_a_token_alone(tokens, count, dim, seed, at):
    generator = torch.Generator().manual_seed(seed)
    hidden, positive = torch.randn(2, tokens, dim, generator=generator) * 3
    negatives = torch.randn(tokens, count, dim, generator=generator) * 3
    valid = torch.rand(tokens, count, generator=generator) > 0.5
    tensors = (hidden, positive, negatives, valid, torch.randn(tokens, generator=generator))
    rows = torch.tensor([at % tokens])
    whole = gradients(ours("cpu"), *tensors)
    for some, every in zip(gradients(ours("cpu"), *(t[rows] for t in tensors)), whole, strict=True):
        assert torch.equal(some, every[rows])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4)}, "hidden and positive must be"),
        ({"positive": torch.zeros(4, 2)}, r"\(4, 3\), \(4, 2\), \(4, 5, 3\), \(4, 5\)"),
        ({"negatives": torch.zeros(4, 5, 2)}, r"negatives \(L, K, D\)"),
        ({"negatives": torch.zeros(3, 5, 3)}, r"negatives \(L, K, D\)"),
        ({"valid": torch.ones(4, 4, dtype=torch.bool)}, r"valid \(L, K\)"),
        ({"valid": torch.ones(4, 5)}, "valid bool"),
        ({"hidden": torch.zeros(4, 3).double()}, "float32"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive, got nan"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {
        "hidden": torch.zeros(4, 3),
        "positive": torch.zeros(4, 3),
        "negatives": torch.zeros(4, 5, 3),
        "valid": torch.ones(4, 5, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        sampled_softmax(**(arguments | change))


def test_compiles_without_a_graph_break():
    tensors = case("odd_dim")
    compiled = torch.compile(sampled_softmax, fullgraph=True, backend="aot_eager")
    for got, expected in zip(gradients(compiled, *tensors), gradients(ours("auto"), *tensors), strict=True):
        assert torch.equal(got, expected)


def test_registration():
    *tensors, valid, dloss = case("odd_dim")
    backward = torch.ops.tritonrec.sampled_softmax_backward.default
    torch.library.opcheck(backward, (dloss, *tensors, valid, 1.4, "cpu"))
    torch.library.opcheck(torch.ops.tritonrec.sampled_softmax.default, (*tensors, valid, 1.4, "cpu"))


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
