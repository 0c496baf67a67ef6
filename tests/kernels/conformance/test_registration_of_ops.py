"""What torch knows of an op is what it does: schema, fake kernel, derivative, and as a part of a graph."""

import pytest
import torch
from drawn import (
    CONSTANT,
    DIFFERENTIABLE,
    NAMES,
    PUBLIC,
    WRITTEN,
    accepted,
    arguments,
    by_names,
    results,
    tensors_of,
    to_host,
)
from impls import IMPLS, TRITON, on
from test_agreement_of_ops import assert_equal_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from verdicts import compare, flat

from tritonrec.kernels.op import OPS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BY_VALUE = {"unique", "unique_table", "intersect", "pack_rows"}  # the shapes of results depend on values


def checked_by_torch(op, *utilities):
    given = arguments(op, accepted(op)[-1])
    torch.library.opcheck(OPS[op].registered.default, (*given.values(), "cpu"), test_utils=utilities)


@pytest.mark.if_changed
@pytest.mark.parametrize("op", OPS)
def test_registration(op):
    fakes = ["test_faketensor"] if op in BY_VALUE else []  # of the others the next test but one has all sizes
    checked_by_torch(op, "test_schema", "test_autograd_registration", *fakes)


@pytest.mark.parametrize("name", OPS)
def test_registration_in_a_graph_of_any_shape(name):
    """Traced and differentiated, which takes ten times as long as all of `test_registration`."""
    checked_by_torch(name, "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("op", [op for op in OPS if op not in BY_VALUE])
def test_a_fake_has_the_shape_and_dtype_of_the_result(op):
    for size in accepted(op):
        expected = flat(OPS[op].registered(*arguments(op, size).values(), "cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            given = {n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
                     for n, v in arguments(op, size).items()}  # fmt: skip
            found = flat(OPS[op].registered(*given.values(), "cpu"))
        for place, (fake, real) in enumerate(zip(found, expected, strict=True)):
            assert fake.shape == real.shape and fake.dtype == real.dtype, (size, place)


@pytest.mark.parametrize("door", PUBLIC)
def test_a_public_function_is_a_part_of_one_graph(door):
    op, function = PUBLIC[door]
    size = accepted(op)[-1]

    def call(*values, impl):
        if op == "hstu_attention":  # its mask and bias are made of fields by name, which no graph has
            return OPS[op](*values, impl=impl)
        return function(**dict(zip(NAMES[op], values, strict=True)), impl=impl)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    if op in DIFFERENTIABLE and of_floats(op, size):
        ways = [gradients(op, of_floats(op, size), "cpu", each)[0].values() for each in (compiled, call)]
        assert_equal_bits(*map(list, ways))
    assert_equal_bits(*(results(op, arguments(op, size), "cpu", each) for each in (compiled, call)))


def gradients(op, given, impl, launch=None):
    """Of the floats that an op takes, by name, with the cotangent: one that tells elements apart."""
    leaves = {}
    for name, value in tensors_of(given).items():
        if value.is_floating_point() and (op, name) not in CONSTANT:
            leaf = value.detach().clone().requires_grad_()
            given[name] = leaf if name not in WRITTEN[op] else leaf * 1
            leaves[name] = leaf
    out = flat((launch or OPS[op])(*given.values(), impl=impl)) or [given[name] for name in WRITTEN[op]]
    cotangent = torch.linspace(-1.0, 2.0, max(out[0].numel(), 1), dtype=torch.float64)[: out[0].numel()]
    cotangent = cotangent.view(out[0].shape).to(out[0].dtype).to(out[0].device)
    found = torch.autograd.grad(out[0], [*leaves.values()], cotangent, materialize_grads=True)
    return dict(zip(leaves, found, strict=True)), cotangent


def of_floats(op, size, impl="cpu"):
    """Arguments that have a derivative, or None."""
    given = arguments(op, size, impl)
    if op in ("gather_rows", "scatter_rows"):  # of any dtype
        for name in {"destination", "values"} & {*given} if op == "scatter_rows" else ["source"]:
            given[name] = given[name].float()
    return given if given.get("consistency", "window") == "window" else None


@pytest.mark.if_changed
@pytest.mark.parametrize("impl", ["cpu", TRITON])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradients_agree(op, impl):
    for size in accepted(op):
        if size.startswith("zero") or of_floats(op, size) is None:
            continue
        ways = [gradients(op, of_floats(op, size, one), one)[0] for one in (impl, "reference")]
        found, expected = ([*map(to_host, way.values())] for way in ways)
        assert compare(by_names(op), found, expected) == ("accepted", ""), size


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_the_derivative_is_that_of_the_reference(op):
    """In a random direction: its gradient against two values of the reference in float64."""
    seen, step = 0, 0.5 if op == "segment_sum" else 1e-5  # it is linear, and its sums are float32
    for size in accepted(op):
        if of_floats(op, size) is None:
            continue
        given = of_floats(op, size)
        found, cotangent = gradients(op, dict(given), "cpu")
        draw = torch.Generator().manual_seed(3)
        ways = {n: torch.randn(g.shape, generator=draw, dtype=torch.float64) for n, g in found.items()}
        ends = []
        for sign in (1, -1):
            moved = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                     for n, v in given.items()}  # fmt: skip
            moved |= {n: moved[n] + sign * step * way for n, way in ways.items()}
            out = flat(OPS[op].launch(*moved.values(), impl="reference")) or [moved[n] for n in WRITTEN[op]]
            ends.append((out[0] * cotangent.double()).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
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
