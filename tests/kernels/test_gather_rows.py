"""Row moves change no bit, touch nothing else, and refuse rows that are not there."""

import numpy as np
import pytest
import torch
from impls import IMPLS, TRITON, on

from tritonrec.kernels.rows.op import gather_rows, scatter_rows

SHAPES = [(1, 1, 1), (5, 0, 3), (5, 4, 0), (7, 15, 127), (7, 16, 128), (7, 17, 129), (40, 33, 13)]


def bits(tensor):
    """float32 as integers, so that NaN payloads and the sign of zero count."""
    return tensor.cpu().contiguous().view(torch.int32)


def any_bits(rows, dim, seed=0):
    """Rows of random bit patterns: NaNs with payloads, infinities, subnormals and negative zeros included."""
    patterns = np.random.default_rng(seed).integers(0, 2**32, (rows, dim), dtype=np.uint32)
    patterns[patterns % 7 == 0] = 0x7FC12345
    patterns[patterns % 11 == 0] = 0x80000000
    return torch.from_numpy(patterns.view(np.float32))


@pytest.mark.parametrize(("height", "count", "dim"), SHAPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_gather_moves_the_bits(impl, height, count, dim):
    source = any_bits(height, dim)
    rows = torch.from_numpy(np.random.default_rng(1).integers(0, height, count))
    got = gather_rows(on(impl, source), on(impl, rows), impl=impl)
    assert got.shape == (count, dim) and got.is_contiguous()
    patterns = bits(source).tolist()
    assert bits(got).tolist() == [patterns[row] for row in rows.tolist()]


@pytest.mark.parametrize(("height", "dim"), [(1, 1), (5, 0), (17, 127), (16, 128), (33, 129), (1040, 131)])
@pytest.mark.parametrize("impl", IMPLS)
def test_scatter_moves_the_bits_and_nothing_else(impl, height, dim):
    """A poisoned destination inside a wider buffer: rows not named and columns beside it keep their bits."""
    buffer = any_bits(height + 2, dim + 5, seed=2)
    expected = bits(buffer).clone()
    rows = torch.from_numpy(np.random.default_rng(3).permutation(height)[: height // 2 + 1])
    values = any_bits(len(rows), dim, seed=4)
    expected[1 + rows, 2 : dim + 2] = bits(values)
    buffer = on(impl, buffer)
    scatter_rows(buffer[1:-1, 2 : dim + 2], on(impl, rows), on(impl, values), impl=impl)
    assert torch.equal(bits(buffer), expected)


@pytest.mark.parametrize(
    ("height", "number", "dim"),
    [(1, 1, 1), (5, 3, 0), (17, 40, 127), (16, 7, 128), (33, 1, 129), (70, 90, 16)],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_scatter_from_rows_moves_the_bits_and_nothing_else(impl, height, number, dim):
    """Both matrices inside wider buffers, of other row strides; rows of values repeat or are left out."""
    rng = np.random.default_rng(6)
    rows = torch.from_numpy(rng.permutation(height)[: height // 2 + 1])
    source = torch.from_numpy(rng.integers(0, number, len(rows)))
    buffer, values = any_bits(height + 2, dim + 5, seed=2), any_bits(number + 1, dim + 3, seed=4)
    expected = bits(buffer).clone()
    expected[1 + rows, 2 : dim + 2] = bits(values)[1 + source, 3:]
    buffer, before = on(impl, buffer), bits(values).clone()
    values = on(impl, values)
    scatter_rows(
        buffer[1:-1, 2 : dim + 2], on(impl, rows), values[1:, 3:], impl=impl, source=on(impl, source)
    )
    assert torch.equal(bits(buffer), expected) and torch.equal(bits(values), before)


@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_rows_lie_further_apart_than_32_bits_count(impl):
    """Two rows 4 GiB apart, of which only a page each is touched."""
    buffer = on(impl, torch.from_numpy(np.empty(2**32 + 3, np.int8)))
    far = buffer.as_strided((2, 3), (2**32, 1))
    rows, values = on(impl, torch.tensor([1, 0])), on(impl, torch.tensor([[1, 2, 3], [4, 5, 6]]).char())
    scatter_rows(far, rows, values, impl=impl)
    assert far.tolist() == [[4, 5, 6], [1, 2, 3]]
    assert gather_rows(far, rows, impl=impl).tolist() == [[1, 2, 3], [4, 5, 6]]
    near = on(impl, torch.zeros(2, 3, dtype=torch.int8))
    scatter_rows(near, rows, far, impl=impl, source=rows)
    assert near.tolist() == [[4, 5, 6], [1, 2, 3]]
    scatter_rows(far, rows, near, impl=impl, source=1 - rows)
    assert far.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("count", [3, 4000])
def test_rows_move_between_parts_of_one_storage(count):
    buffer, rows = torch.randn(2 * count, 64), torch.randperm(count)
    expected = buffer.clone()
    expected[rows] = buffer[count:]
    scatter_rows(buffer[:count], rows, buffer[count:])
    assert torch.equal(buffer, expected)
    expected[rows, :32] = buffer[rows.flip(0), 32:]
    scatter_rows(buffer[:, :32], rows, buffer[:, 32:], source=rows.flip(0))  # columns between each other
    assert torch.equal(buffer, expected)
    with pytest.raises(ValueError, match="elements of it share memory"):
        scatter_rows(torch.zeros(1, 64).expand(count, 64), rows, torch.randn(count, 64))


@pytest.mark.parametrize("count", [3, 20000])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_rare_types_move_at_every_size(count, dtype):
    values = torch.randint(0, 100, (count, 16)).to(dtype)
    out, rows = torch.zeros(count, 16).to(dtype), torch.randperm(count)
    scatter_rows(out, rows, values)
    assert torch.equal(out.view(torch.uint8)[rows], values.view(torch.uint8))


@pytest.mark.parametrize("impl", IMPLS)
def test_backward_adds_in_order_of_occurrence(impl):
    rng = np.random.default_rng(7)
    rows = torch.from_numpy(rng.zipf(1.3, 60) % 9)
    cotangent = torch.from_numpy(rng.standard_normal((60, 13)) * np.exp(rng.standard_normal((60, 1)) * 5))
    cotangent = cotangent.float()
    expected = torch.zeros(12, 13)
    for row, gradient in zip(rows.tolist(), cotangent, strict=True):
        expected[row] += gradient
    source = on(impl, any_bits(12, 13)).requires_grad_()
    gather_rows(source, on(impl, rows), impl=impl).backward(on(impl, cotangent))
    assert torch.equal(source.grad.cpu(), expected)


def test_rows_of_float64_have_no_gradient():
    rows = gather_rows(torch.zeros(4, 3).double().requires_grad_(), torch.tensor([2]))
    with pytest.raises(ValueError, match=r"gather_rows is differentiable .*, got torch\.float64"):
        rows.sum().backward()
