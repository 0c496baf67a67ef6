"""Mixed precision of ops: which arguments autocast casts, float32 inside, one rounding, bits of a row."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conformance.drawn import NAMES, PUBLIC, arguments, flat
from impls import GPU, IMPLS, TRITON, on
from speeds import slow_except

from tritonrec import ops
from tritonrec.kernels import dispatch
from tritonrec.kernels.autocast import autocast_dtype, to_dtype
from tritonrec.kernels.norm_linear_silu.op import NORM_LINEAR_SILU, NORM_LINEAR_SILU_BACKWARD_EXACT

LOW = [torch.bfloat16, torch.float16]
# Triton's interpreter cuts a float32 to bfloat16 where compiled code rounds it.
DTYPES = LOW if GPU or dispatch.emulated else [torch.float16]
PAIRS = [(impl, dtype) for impl in IMPLS[:2] for dtype in LOW]
PAIRS += [pytest.param("triton", dtype, marks=TRITON.marks) for dtype in DTYPES]

PAGE = (Path(__file__).parents[2] / "docs" / "ops.md").read_text()


def mixed(dtype=torch.bfloat16, **options):
    return torch.autocast("cuda" if GPU else "cpu", dtype, **options)


def rules():
    """Each public op's arguments that autocast casts, to "low" or "float32", as docs/ops.md has them."""
    section = PAGE.partition("## Mixed precision\n")[2].partition("\n## ")[0]
    found = {}
    for row in re.findall(r"^\| `.*\|$", section, re.M):
        names, low, float32 = (re.findall(r"`(\w+)`", cell) for cell in row.split("|")[1:4])
        for name in names:
            assert name not in found, name
            found[name] = dict.fromkeys(low, "low") | dict.fromkeys(float32, "float32")
    return found


@pytest.mark.smoke
def test_every_op_has_a_rule():
    assert rules().keys() == {door.split()[0] for door in PUBLIC} - {"sparse_nesterov_sgd"}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("door", [door for door in PUBLIC if door in ops.__all__])
def test_an_op_keeps_its_rule(door, dtype):
    """Under autocast it gives what it gives elsewhere for arguments that the rule has cast."""
    to, back = {"low": dtype, "float32": torch.float32}, {"low": torch.float32, "float32": dtype}
    (op, function), rule = PUBLIC[door], rules()[door]
    assert rule.keys() <= {*NAMES[op]}

    def call(kinds, cast):
        given = arguments(op, "ample")
        given |= {n: given[n].to(back[k]).to(kinds[k]) for n, k in rule.items() if given[n] is not None}
        with mixed(dtype) if cast else nullcontext():
            return flat(function(**given, impl="auto"))

    for one, other in zip(call(back, True), call(to, False), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def whole(*values):
    return torch.tensor(values)


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# op -> float arguments that may be of lower precision, its other arguments, and a call
CUTS, TIMES = whole(0, 3, 3, 8), whole(1, 5, 7, 0, 3, 3, 9, 40)
MASKED = torch.zeros(3, 2, 5, 5)
MASKED[..., 3] = -torch.inf
DRAWS = {"seed": 3, "sample_ids": TIMES % 4, "positions": TIMES}
DENSE = {
    "linear": ((some(8, 5), some(7, 5), some(7)), ops.linear),
    "linear_plain": ((some(8, 5), some(7, 5)), ops.linear),
    "norm": ((some(8, 5), None, some(5), some(6)[:5]), ops.norm_mul_dropout),
    "gated_norm": (
        (some(8, 5), some(8, 6)[:, 1:], some(5), some(6)[:5]),
        lambda *given, **rest: ops.norm_mul_dropout(*given, dropout=0.3, **on_device(given, DRAWS), **rest),
    ),
    "front": ((some(8, 5), some(5), some(6)[:5], some(7, 5), some(7)), ops.norm_linear_silu),
    "silu": ((some(8, 5) * 3,), ops.silu),
    "interaction": ((some(4, 3, 5),), ops.dot_interaction),
    "dropout": (
        (some(8, 5),), lambda x, **rest: ops.dropout(x, 0.3, **on_device((x,), DRAWS), **rest)
    ),
    "hstu": (
        (some(8, 2, 5), some(9, 2, 5)[1:], some(8, 2, 3)),
        lambda *given, **rest: ops.hstu_attention(
            *given, CUTS.to(given[0].device), 5, alpha=0.7, scaling_seqlen=5, **rest
        ),
    ),
    "softmax": (
        (some(8, 2, 5), some(9, 2, 5)[1:], some(8, 2, 3)),
        lambda *given, **rest: ops.softmax_attention(
            *given, CUTS.to(given[0].device), 5, bias=MASKED.to(given[0].device), dropout=0.2, seed=5,
            sample_ids=whole(3, 5, 9).to(given[0].device), **rest,
        ),
    ),
    "aggregate": (
        (some(8, 2, 5),),
        lambda v, **rest: ops.relative_aggregate(
            v, some(2, 4).to(v.device), CUTS.to(v.device), 5, TIMES.to(v.device), **rest
        ),
    ),
    "gather": ((some(8, 5),), lambda x, **rest: ops.gather_rows(x, whole(3, 0, 3, 7).to(x.device), **rest)),
}  # fmt: skip


def on_device(given, draws):
    return {
        name: value.to(given[0].device) if isinstance(value, torch.Tensor) else value
        for name, value in draws.items()
    }


def gradients(name, tensors, impl):
    """Output and gradients of the float arguments, for a cotangent of the output's dtype."""
    function = DENSE[name][1]
    leaves = [None if each is None else each.detach().clone().requires_grad_() for each in tensors]
    out = function(*leaves, impl=impl)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.device, out.dtype)
    wanted = [leaf for leaf in leaves if leaf is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, dy)]


@pytest.mark.parametrize(("impl", "dtype"), PAIRS)
@pytest.mark.parametrize("name", DENSE)
def test_lower_precision_is_close_to_float64(name, impl, dtype):
    """Of the same rounded arguments: a result has one rounding, a gradient those of what it is made of."""
    tensors = [None if each is None else on(impl, each.to(dtype)) for each in DENSE[name][0]]
    got = gradients(name, tensors, impl)
    wide = gradients(name, [None if each is None else each.float().cpu() for each in tensors], "cpu")
    for place, (low, exact) in enumerate(zip(got, wide, strict=True)):
        assert low.dtype == dtype
        error = (low.cpu().float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert error < (1 if place == 0 and name != "front" else 4) * torch.finfo(dtype).eps, (place, error)


@pytest.mark.parametrize(("impl", "dtype"), PAIRS[:4])
@pytest.mark.parametrize("name", [name for name in DENSE if name != "front"])
def test_an_op_is_the_float32_one_of_widened_arguments_rounded_once(name, impl, dtype):
    tensors = [None if each is None else each.to(dtype) for each in DENSE[name][0]]
    function = DENSE[name][1]
    got = function(*tensors, impl=impl)
    wide = function(*(None if each is None else each.float() for each in tensors), impl=impl)
    assert got.dtype == dtype and torch.equal(got, wide.to(dtype))


@pytest.mark.parametrize(("impl", "dtype"), PAIRS)
@pytest.mark.parametrize("recompute", [("norm", "linear"), ()])
def test_the_fused_front_has_the_bits_of_its_three_ops(recompute, impl, dtype):
    def gradients(function, x_dtype):
        dtypes = x_dtype, x_dtype, x_dtype, dtype, dtype
        leaves = [
            on(impl, each).to(to).requires_grad_() for each, to in zip(DENSE["front"][0], dtypes, strict=True)
        ]
        y = function(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, on(impl, some(8, 7)).to(dtype))

    def three(x, scale, shift, weight, bias):
        normed = ops.norm_mul_dropout(x, None, scale, shift, impl=impl).to(dtype)
        return ops.silu(ops.linear(normed, weight, bias, impl=impl), impl=impl)

    def fused(*leaves):
        return ops.norm_linear_silu(*leaves, recompute=recompute, impl=impl)

    for x_dtype in (dtype, torch.float32):
        for got, want in zip(gradients(fused, x_dtype), gradients(three, x_dtype), strict=True):
            assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize(("impl", "dtype"), PAIRS[2:])
@pytest.mark.parametrize("name", ["linear", "front", "gated_norm"])
def test_a_row_keeps_its_bits_in_any_batch(name, impl, dtype):
    """Also where its memory is not aligned as in the other batch."""
    tensors, function = DENSE[name]
    rows = [at for at, each in enumerate(tensors) if each is not None and len(each) == 8]
    tensors = [None if each is None else on(impl, each.to(dtype)) for each in tensors]
    draws = {each: on(impl, DRAWS[each]) for each in ("sample_ids", "positions")}

    def run(at):
        given = [each[at] if place in rows else each for place, each in enumerate(tensors)]
        if name == "gated_norm":
            rest = {"dropout": 0.3, "seed": 3, **{key: value[at] for key, value in draws.items()}}
            return ops.norm_mul_dropout(*given, impl=impl, **rest)
        return function(*given, impl=impl)

    whole_batch = run(slice(None))
    for at in (slice(1, 2), slice(3, 8), [6, 1]):
        assert torch.equal(run(at), whole_batch[at])


@pytest.mark.parametrize(("impl", "dtype"), PAIRS)
def test_exact_gradients_of_a_cast_parameter(impl, dtype):
    """The accumulator finds the float32 parameter, and its sum is that of the op on rounded tensors."""
    model = torch.nn.ParameterDict({"weight": some(7, 5), "bias": some(7)})
    model = model.cuda() if impl == "triton" and GPU else model
    x, dy, cuts = (on(impl, each) for each in (some(8, 5), some(8, 7), CUTS))
    found = []
    for order in ([(0, 3)], [(1, 3), (0, 1)]):
        accumulator = ops.GradientAccumulator(model)
        with accumulator.active(), mixed(dtype):
            for first, last in order:
                begin, end = int(cuts[first]), int(cuts[last])
                leaf = x[begin:end].clone().requires_grad_()
                offsets = cuts[first : last + 1] - begin
                y = ops.linear(leaf, model["weight"], model["bias"], offsets, impl=impl)
                y.backward(dy[begin:end].to(dtype))
                assert leaf.grad.dtype == torch.float32
        assert model["weight"].grad is model["bias"].grad is None
        found.append(accumulator.take())
    want, of_bias = (torch.zeros_like(model[name], dtype=torch.int64) for name in ("weight", "bias"))
    wide = dy.to(dtype).float(), x.to(dtype).float()
    ops.linear_weight_grad(want, *wide, cuts, bias_accumulator=of_bias, impl="reference")
    for sums in found:
        assert torch.equal(sums["weight"], found[0]["weight"]) and torch.equal(sums["bias"], of_bias)
        if impl == "triton":  # the order of a product's sum is its own
            assert (sums["weight"] - want).abs().max() <= 2**-20 * 2**ops.FRACTION_BITS
        else:
            assert torch.equal(sums["weight"], want)


@pytest.mark.parametrize("dtype", LOW)
def test_a_float32_sum_of_a_cast_parameter_is_not_rounded(dtype):
    model = torch.nn.ParameterDict({"weight": some(7, 5)})
    x, dy = some(8, 5).to(dtype), some(8, 7).to(dtype)
    accumulator = ops.GradientAccumulator(model, None)
    with accumulator.active(), mixed(dtype):
        ops.linear(x, model["weight"], None, CUTS, impl="cpu").backward(dy)
    assert torch.equal(accumulator.take()["weight"], dy.float().t() @ x.float())


@pytest.mark.parametrize(("impl", "dtype"), PAIRS)
def test_exact_sums_behind_a_norm_that_is_computed_again(impl, dtype):
    """Its rows are rounded to the product's dtype, as those that were kept."""
    x, scale, shift, weight, bias = (on(impl, each) for each in DENSE["front"][0])
    given = x, scale, shift, weight.to(dtype), bias.to(dtype), 1e-6
    y, z, normed, means, rstds = NORM_LINEAR_SILU.launch(*given, True, True, impl=impl)
    found = []
    for kept in (normed, normed[:0]):
        sums = [torch.zeros_like(each, dtype=torch.int64) for each in (scale, shift, weight, bias)]
        rest = z, kept, means, rstds, on(impl, CUTS), 36, list("abcd")
        NORM_LINEAR_SILU_BACKWARD_EXACT.launch(*sums, y.clone(), *given, *rest, impl=impl)
        found.append(sums)
    for one, other in zip(*found, strict=True):
        assert one.any() and torch.equal(one, other)


@pytest.mark.parametrize("exact", [False, True])
def test_backward_casts_nothing_wherever_it_runs(exact):
    model = torch.nn.ParameterDict({"weight": some(5), "bias": some(6)[:5], "inner": some(7, 5)})

    def run(inside):
        accumulator = ops.GradientAccumulator(model, ops.FRACTION_BITS if exact else None)
        x = some(8, 5).requires_grad_()
        with accumulator.active():
            with mixed():
                y = ops.linear(x, model["inner"], None, CUTS).float() @ some(7, 5)
                y = ops.norm_mul_dropout(y, None, model["weight"], model["bias"]).square()
            with mixed() if inside else nullcontext():
                y.backward(some(8, 5) + 1)
        return [x.grad, *accumulator.take().values()]

    assert all(map(torch.equal, run(False), run(True)))


def test_a_weight_that_changes_is_cast_again():
    """autocast keeps the casts of torch's own ops until its context ends."""
    x, weight = some(8, 5), torch.nn.Parameter(some(7, 5))
    with mixed():
        before = ops.linear(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(ops.linear(x, weight), 2 * before)
        with mixed(enabled=False):
            assert ops.linear(x, weight).dtype == torch.float32
        assert ops.linear(x.double(), weight.double(), impl="reference").dtype == torch.float64
    assert autocast_dtype(x.device) is None and autocast_dtype(torch.device("meta")) is None


@pytest.mark.if_changed
@pytest.mark.parametrize("name", slow_except(["front"], ["linear", "front", "softmax", "hstu"]))
def test_it_compiles_as_one_graph(name):
    def run(function):
        leaves = [None if each is None else each.detach().clone().requires_grad_() for each in DENSE[name][0]]
        with mixed():
            out = function(*leaves)
        out.backward(torch.ones_like(out))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    compiled = torch.compile(DENSE[name][1], fullgraph=True, backend="aot_eager")
    for got, want in zip(run(compiled), run(DENSE[name][1]), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize(("impl", "dtype"), PAIRS)
@pytest.mark.parametrize("consistency", ["window", "batch"])
def test_sums_of_lower_precision(impl, dtype, consistency):
    """Float32 in order of occurrence, or exact."""
    values, segments = on(impl, some(9, 5).to(dtype)), on(impl, whole(1, 0, 3, 1, 1, 0, 3, 3, 3))
    options = {"consistency": consistency, "impl": impl}
    got = ops.segment_sum(values, segments, 4, **options)
    assert torch.equal(got, ops.segment_sum(values.float(), segments, 4, **options))


def test_what_autocast_casts_are_tensors_of_float32_and_16_bits():
    given = [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert {to_dtype(each, torch.bfloat16).dtype for each in given} == {torch.bfloat16}
    others = [torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64), None, 3.0]
    assert all(to_dtype(each, torch.bfloat16) is each for each in others)
