"""torch's default dtype changes no bit and no dtype of any op, forward or backward."""

import pytest
import torch
from impls import TRITON
from test_arguments import CALLS as OPS
from test_derivatives import CALLS as DIFFERENTIABLE
from torch._subclasses.fake_tensor import FakeTensorMode

from tritonrec import ops

DEFAULTS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
IDS = torch.tensor([5, -1, 2**63 - 1])


def indices(impl="auto"):
    return ops.random_indices(3, 1, 4, IDS, IDS.flip(0), count=5, upper=1000, impl=impl)


def tensors_of(value):
    """The tensors in what an op returned."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [value for value in value or () if isinstance(value, torch.Tensor)]


def forward(op, impl):
    """What a call returns, and its arguments after it."""
    if op is ops.random_indices:
        return [indices(impl)]
    tensors, rest = OPS[op]
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    results = tensors_of(op(**copies, **rest, impl=impl))
    if op is ops.hash_insert:  # of keys with one home, any may take the first slot
        slots = torch.stack([copies.pop("slot_keys"), copies.pop("slot_rows")])
        results.append(slots[:, slots[0].argsort()])
    return [*results, *copies.values()]


def backward(name):
    """The output of a differentiable op and the gradients of all its arguments."""
    call, values = DIFFERENTIABLE[name]
    leaves = [value.clone().requires_grad_() for value in values.values()]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach().cos())]


@pytest.fixture
def under():
    """Calls a function under a default dtype."""
    before = torch.get_default_dtype()

    def call(dtype, function, *arguments):
        torch.set_default_dtype(dtype)
        try:
            return function(*arguments)
        finally:
            torch.set_default_dtype(before)

    yield call
    assert torch.get_default_dtype() == before


def assert_equal_bits(found, expected):
    assert len(found) == len(expected) > 0
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("impl", ["cpu", "reference", TRITON])
@pytest.mark.parametrize("op", [*OPS, ops.random_indices], ids=lambda op: op.__name__)
def test_forward(op, impl, under):
    expected = under(torch.float32, forward, op, impl)
    for default in DEFAULTS[1:] if impl != "triton" else [torch.float64]:
        assert_equal_bits(under(default, forward, op, impl), expected)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward(name, under):
    expected = under(torch.float32, backward, name)
    for default in DEFAULTS[1:]:
        assert_equal_bits(under(default, backward, name), expected)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_compiler_is_told_the_same_dtypes(name, under):
    call, values = DIFFERENTIABLE[name]

    def fake():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            leaves = [mode.from_tensor(value).requires_grad_() for value in values.values()]
            out = call(*leaves)
            return [out, *torch.autograd.grad(out, leaves, out.detach().cos())]

    dtypes = [got.dtype for got in under(torch.float32, backward, name)]
    assert [got.dtype for got in under(torch.float64, fake)] == dtypes
