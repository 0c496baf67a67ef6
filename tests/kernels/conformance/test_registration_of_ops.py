"""What torch knows of an op is what it does: schema, fake kernel, derivative, and as a part of a graph."""

import pytest
import torch
from drawn import DIFFERENTIABLE, NAMES, WRITTEN, accepted, arguments, by_names, results, tensors_of, to_host
from impls import IMPLS, TRITON, on
from test_agreement_of_ops import assert_equal_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from verdicts import compare, flat

from tritonrec.kernels.op import OPS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BY_VALUE = {"unique", "intersect", "pack_rows"}  # the shapes of results depend on values


@pytest.mark.parametrize("op", OPS)
def test_registration(op):
    given = arguments(op, accepted(op)[-1])
    torch.library.opcheck(OPS[op].registered.default, (*given.values(), "cpu"))


@pytest.mark.parametrize("op", [op for op in OPS if op not in BY_VALUE])
def test_a_fake_has_the_shape_and_dtype_of_the_result(op):
    for size in accepted(op):
        expected = flat(OPS[op].registered(*arguments(op, size).values(), "cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            given = {n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
                     for n, v in arguments(op, size).items()}  # fmt: skip
            found = flat(OPS[op].registered(*given.values(), "cpu"))
        for place, (fake, real) in enumerate(zip(found, expected, strict=True)):
            if op == "unique_table" and place == 4:
                continue
            assert fake.shape == real.shape and fake.dtype == real.dtype, (size, place)


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_a_part_of_one_graph(op):
    size = accepted(op)[-1]

    def call(*values):
        return OPS[op](*values, impl="cpu")

    torch._dynamo.reset()
    expected = results(op, arguments(op, size), "cpu")
    given = arguments(op, size)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = flat(compiled(*given.values()))
    written = [given[name] for name in WRITTEN[op] if given[name] is not None]
    if op != "hash_insert":
        assert_equal_bits([*map(to_host, found[:4] if op == "unique_table" else found), *written], expected)


def gradients(op, given, impl, launch=None):
    """The floats that an op gives, and their gradients: of a cotangent that tells elements apart."""
    leaves = {}
    for name, value in tensors_of(given).items():
        if value.is_floating_point() and name not in CONSTANT.get(op, ()):
            leaf = value.detach().clone().requires_grad_()
            given[name] = leaf if name not in WRITTEN[op] else leaf * 1
            leaves[name] = leaf
    out = flat((launch or OPS[op])(*given.values(), impl=impl)) or [given[name] for name in WRITTEN[op]]
    cotangent = torch.linspace(-1.0, 2.0, max(out[0].numel(), 1), dtype=torch.float64)[: out[0].numel()]
    cotangent = cotangent.view(out[0].shape).to(out[0].dtype).to(out[0].device)
    found = torch.autograd.grad(out[0], [*leaves.values()], cotangent, allow_unused=True)
    return out[0], dict(zip(leaves, found, strict=True)), cotangent


CONSTANT = {"hstu_attention": ["attn_scale"], "softmax_attention": ["bias"]}
"""Floats that have no gradient."""


@pytest.mark.parametrize("impl", ["cpu", TRITON])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradients_agree(op, impl):
    for size in accepted(op):
        if not differentiable(op, size):
            continue
        ways = [gradients(op, arguments(op, size, one), one)[1] for one in (impl, "reference")]
        assert [each is None for each in ways[0].values()] == [each is None for each in ways[1].values()]
        found, expected = ([to_host(each) for each in way.values() if each is not None] for way in ways)
        assert compare(by_names(op), found, expected) == ("accepted", ""), size


def differentiable(op, size):
    given = arguments(op, size)
    floats = [given[n].dtype == torch.float32 for n in NAMES[op][:3] if isinstance(given[n], torch.Tensor)]
    return any(floats) and given.get("consistency", "window") == "window"


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_the_derivative_is_that_of_the_reference(op):
    """In a random direction: its gradient against two values of the reference in float64."""
    seen = 0
    for size in accepted(op):
        if not differentiable(op, size):
            continue
        given = arguments(op, size)
        _, found, cotangent = gradients(op, dict(given), "cpu")
        draw = torch.Generator().manual_seed(3)
        ways = {
            n: torch.randn(g.shape, generator=draw, dtype=torch.float64)
            for n, g in found.items()
            if g is not None
        }
        ends = []
        for step in (1e-5, -1e-5):
            moved = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                     for n, v in given.items()}  # fmt: skip
            moved |= {n: moved[n] + step * way for n, way in ways.items()}
            out = flat(OPS[op].launch(*moved.values(), impl="reference")) or [moved[n] for n in WRITTEN[op]]
            ends.append((out[0] * cotangent.double()).sum())
        slope = (ends[0] - ends[1]) / 2e-5
        along = sum((found[n].double() * way).sum() for n, way in ways.items())
        size_of = sum((found[n].double() * way).abs().sum() for n, way in ways.items())
        assert abs(along - slope) <= 1e-4 * (1 + size_of), (size, float(along), float(slope))
        seen += bool(size_of)
    assert seen, "no case has a gradient"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("op", [op for op in OPS if WRITTEN[op]])
def test_autograd_learns_of_what_is_written(op, impl):
    for call in (OPS[op], OPS[op].launch):
        given = {n: on(impl, v) for n, v in arguments(op, accepted(op)[-1]).items()}
        written = [given[name] for name in WRITTEN[op] if given[name] is not None]
        before = [each._version for each in written]
        with torch.no_grad():
            call(*given.values(), impl=impl)
        assert all(each._version > version for each, version in zip(written, before, strict=True))
