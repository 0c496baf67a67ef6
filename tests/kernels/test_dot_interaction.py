"""Dot interaction: the pairs of the lower triangle, and a sample keeps its bits in any batch."""

import pytest
import torch
from float_error import assert_error_at_most_twice
from impls import IMPLS, TRITON, on
from speeds import slow_on_triton

from tritonrec import ops
from tritonrec.kernels.dot_interaction.op import MOST

# Samples, vectors, columns. Triton's tiles have 16 to 64 of each, the CPU's 4 rows by 16 columns.
SHAPES = {
    "one_vector": (3, 1, 5),
    "two": (3, 2, 1),
    "tile_minus_one": (2, 15, 16),
    "tile_plus_one": (2, 17, 17),
    "dlrm": (5, 27, 64),
    "chain_plus_one": (2, 5, 65),
    "two_tiles_plus_one": (1, 129, 7),
    "two_tiles_of_columns": (2, 6, 130),
}


def drawn(name):
    samples, count, dim = SHAPES[name]
    generator = torch.Generator().manual_seed(count)
    both = torch.randn(samples, count, 2 * dim, generator=generator) + 0.2
    return both[:, :, 1::2], torch.randn(samples, count * (count - 1) // 2, generator=generator)  # strided


def results(vectors, dy, impl):
    leaf = on(impl, vectors).detach().requires_grad_()
    out = ops.dot_interaction(leaf, impl=impl)
    return out.detach().cpu(), torch.autograd.grad(out, leaf, on(impl, dy))[0].cpu()


def dense(vectors, dy):
    """The same by whole matrices, in the dtype of the vectors."""
    count = vectors.shape[1]
    row, column = torch.tril_indices(count, count, -1)
    square = dy.new_zeros(len(dy), count, count)
    square[:, row, column] = square[:, column, row] = dy
    return (vectors @ vectors.mT)[:, row, column], square @ vectors


@pytest.mark.parametrize(
    ("impl", "name"), slow_on_triton(IMPLS, SHAPES, SHAPES.keys() - {"two_tiles_plus_one"})
)
def test_pairs_and_gradients_are_those_of_whole_matrices(impl, name):
    vectors, dy = drawn(name)
    exact, plain = dense(vectors.double(), dy.double()), dense(vectors, dy)
    for got, true, float32 in zip(results(vectors, dy, impl), exact, plain, strict=True):
        assert_error_at_most_twice(got, float32, true)


@pytest.mark.parametrize("impl", ["cpu", TRITON])
@pytest.mark.parametrize("name", ["dlrm", "two_tiles_of_columns"])
def test_a_sample_keeps_its_bits_in_any_batch(name, impl):
    vectors, dy = drawn(name)
    whole = results(vectors, dy, impl)
    for at in ([1], [1, 0], [*range(len(dy))][::-1]):
        for got, expected in zip(results(vectors[at], dy[at], impl), whole, strict=True):
            assert torch.equal(got, expected[at])


def test_what_does_not_fit_is_refused():
    for wrong in (torch.zeros(2, 3), torch.zeros(2, 3, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"vectors must be \(B, V, D\) float32"):
            ops.dot_interaction(wrong)
    with pytest.raises(ValueError, match="at most 4096 vectors, got 4097"):
        ops.dot_interaction(torch.zeros(0, MOST + 1, 1))
