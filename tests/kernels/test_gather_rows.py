"""Row moves change no bit, touch no other element, and their gradient adds occurrences in order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonrec.kernels.gather_rows import gather_rows, scatter_rows

GPU = torch.cuda.is_available()
TRITON = pytest.param("triton", marks=pytest.mark.gpu if GPU else pytest.mark.interpreter)
IMPLS = ["reference", "cpu", TRITON]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool]


def on(impl, tensor):
    return tensor.cuda() if impl == "triton" and GPU else tensor


def random_bits(shape, dtype, seed=5):
    """Random bits of `dtype`, so that floats include NaNs with payloads, infinities and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).squeeze(-1)


def same_bits(left, right):
    left, right = left.cpu().contiguous(), right.cpu().contiguous()
    return left.shape == right.shape and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_gathers_exact_bits(impl, dtype):
    source = random_bits((9, 5), dtype)
    rows = torch.tensor([8, 0, 3, 3, 8, 1])
    expected = torch.stack([source[row] for row in rows.tolist()])
    assert same_bits(gather_rows(on(impl, source), on(impl, rows), impl), expected)


@pytest.mark.parametrize("num_rows, dim", [(0, 5), (1, 1), (15, 127), (16, 128), (17, 129), (40, 0)])
@pytest.mark.parametrize("impl", IMPLS)
def test_gathers_from_a_view_of_a_wider_buffer(impl, num_rows, dim):
    buffer = random_bits((20, dim + 3), torch.float32)
    rows = torch.randint(0, 20, (num_rows,), generator=torch.Generator().manual_seed(num_rows))
    expected = buffer[rows, 2 : 2 + dim]
    assert same_bits(gather_rows(on(impl, buffer)[:, 2 : 2 + dim], on(impl, rows), impl), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_scatters_exact_bits_and_nothing_else(impl, dtype):
    buffer = random_bits((9, 12), dtype)
    rows, values = torch.tensor([8, 0, 5]), random_bits((3, 7), dtype, seed=6)
    expected = buffer.clone()
    for row, value in zip(rows.tolist(), values, strict=True):
        expected[row, 2:9] = value
    ours = on(impl, buffer.clone())
    scatter_rows(ours[:, 2:9], on(impl, rows), on(impl, values), impl)
    assert same_bits(ours, expected)


@pytest.mark.parametrize("bad", [-1, 4, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("impl", ["reference", "cpu"] if GPU else IMPLS)
def test_refuses_rows_outside_and_leaves_the_destination_alone(impl, bad):
    matrix = torch.arange(12.0).view(4, 3)
    rows = torch.tensor([0, bad])
    with pytest.raises(IndexError, match=rf"rows\[1\] = {bad} is outside \[0, 4\)"):
        gather_rows(matrix, rows, impl)
    with pytest.raises(IndexError, match=rf"rows\[1\] = {bad} is outside \[0, 4\)"):
        scatter_rows(matrix, rows, torch.full((2, 3), -1.0), impl)
    assert torch.equal(matrix, torch.arange(12.0).view(4, 3))


def test_refuses_shapes_that_do_not_fit():
    matrix, rows = torch.zeros(4, 3), torch.arange(2)
    with pytest.raises(ValueError, match=r"source must be \(R, D\), got shape \(4,\)"):
        gather_rows(matrix[:, 0], rows)
    with pytest.raises(ValueError, match=r"rows must be \(K,\) int64, got shape \(2,\) torch.int32"):
        gather_rows(matrix, rows.int())
    with pytest.raises(ValueError, match=r"values must be \(2, 3\) torch.float32, got \(2, 4\)"):
        scatter_rows(matrix, rows, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"values must be \(2, 3\) torch.float32, got .* torch.float64"):
        scatter_rows(matrix, rows, torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("impl", IMPLS)
def test_gradient_adds_occurrences_in_order(impl):
    source = on(impl, torch.randn(6, 5)).requires_grad_()
    rows = torch.tensor([4, 1, 4, 4, 0, 1])
    cotangent = torch.randn(6, 5, generator=torch.Generator().manual_seed(7)) * torch.tensor(
        [1e8, 1, 1, 1, 1e-8]
    )
    gather_rows(source, on(impl, rows), impl).backward(on(impl, cotangent))
    expected = torch.zeros(6, 5)
    for row, grad in zip(rows.tolist(), cotangent, strict=True):
        expected[row] += grad
    assert torch.equal(source.grad.cpu(), expected)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_scatter_then_gather_gives_the_values_back(data):
    num_rows = data.draw(st.integers(1, 12))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, num_rows - 1), unique=True)), dtype=torch.int64)
    values = random_bits(
        (len(rows), data.draw(st.integers(0, 9))), torch.float32, data.draw(st.integers(0, 99))
    )
    for impl in ["reference", "cpu"] if GPU else ["reference", "cpu", "triton"]:
        matrix = torch.zeros(num_rows, values.shape[1])
        scatter_rows(matrix, rows, values, impl)
        assert same_bits(gather_rows(matrix, rows, impl), values)


def test_compiles_without_a_graph_break():
    rows, values = torch.tensor([3, 1]), torch.randn(2, 4)

    def move(source):
        destination = torch.zeros(5, 4)
        scatter_rows(destination, rows, values)
        return (gather_rows(source, rows) * gather_rows(destination, rows)).sum()

    grads = []
    for function in (move, torch.compile(move, fullgraph=True, backend="aot_eager")):
        source = torch.arange(20.0).view(5, 4).requires_grad_()
        function(source).backward()
        grads.append(source.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0][rows], values)


def test_registration():
    rows = torch.tensor([3, 1])
    source = torch.randn(5, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.tritonrec.gather_rows, (source, rows, "cpu"))
    torch.library.opcheck(
        torch.ops.tritonrec.scatter_rows, (torch.zeros(5, 4), rows, torch.ones(2, 4), "cpu")
    )
