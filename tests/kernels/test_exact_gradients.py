"""Kernels that add exact gradients themselves: the sums of the terms they would have written, bit for bit."""

import pytest
import torch
from impls import IMPLS, TRITON, on

from tritonrec.kernels import dispatch
from tritonrec.kernels.accumulator import GradientAccumulator
from tritonrec.kernels.deferred import DeferredErrors
from tritonrec.kernels.fixed_point.errors import ExactSumError
from tritonrec.kernels.fixed_point.op import to_fixed_point
from tritonrec.kernels.gradients import targets_of
from tritonrec.kernels.linear.op import linear_weight_grad
from tritonrec.kernels.norm_linear_silu.op import (
    NORM_LINEAR_SILU,
    NORM_LINEAR_SILU_BACKWARD_EXACT,
    NORM_LINEAR_SILU_BACKWARD_INTO,
)
from tritonrec.kernels.norm_mul_dropout.op import (
    NORM_MUL_DROPOUT,
    NORM_MUL_DROPOUT_BACKWARD_EXACT,
    NORM_MUL_DROPOUT_BACKWARD_INTO,
    norm_mul_dropout,
)
from tritonrec.kernels.row_terms import add_rows

BITS, NAN = 36, float("nan")
# tokens, features: none, one, odd ones, and more tokens than a program of the norm adds up
SHAPES = [(0, 5), (1, 1), (9, 37), (21, 4)]
NAMES = ["scale", "shift"]


def floats(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.25


def sums(*shape, seed=0):
    """Sums that something was added to before."""
    return torch.randint(-(2**50), 2**50, shape, generator=torch.Generator().manual_seed(seed))


def added(before, terms):
    return before + to_fixed_point(terms.cpu().contiguous(), BITS).sum(0)


def norm_arguments(impl, tokens, dim, gated=True, p=0.4):
    """dy, x, u, weight, bias and what follows, of which dy and u are parts of a wider buffer."""
    wide = on(impl, floats(tokens, 3 * dim))
    dy, x = wide[:, :dim], on(impl, floats(tokens, dim, seed=1))
    u = wide[:, 2 * dim :] if gated else None
    weight, bias = on(impl, floats(dim, seed=2)), on(impl, floats(dim, seed=3))
    sites = [on(impl, torch.arange(tokens) // k) for k in (3, 1)] if p else [None, None]
    _, means, rstds = NORM_MUL_DROPOUT.launch(x, u, weight, bias, 1e-6, p, 7, *sites, impl=impl)
    return dy, x, u, weight, bias, p, 7, *sites, means, rstds


@pytest.mark.parametrize(("gated", "p"), [(True, 0.4), (False, 0.0)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_the_norm_adds_the_terms_of_its_weight_and_bias(impl, shape, gated, p):
    given = norm_arguments(impl, *shape, gated, p)
    expected_du, du = (torch.full_like(given[1], NAN) for _ in range(2))
    into = expected_du if gated else expected_du[:0]
    expected_dx, *terms = NORM_MUL_DROPOUT_BACKWARD_INTO.launch(into, *given, impl=impl)
    totals = [on(impl, sums(shape[1], seed=seed)) for seed in range(2)]
    expected = [added(total.cpu(), each) for total, each in zip(totals, terms, strict=True)]
    dx = NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(
        *totals, du if gated else None, *given, BITS, NAMES, impl=impl
    )
    assert torch.equal(dx, expected_dx) and (not gated or torch.equal(du, expected_du))
    assert all(torch.equal(total.cpu(), each) for total, each in zip(totals, expected, strict=True))


def front_arguments(impl, tokens, dim, columns=35):
    x = on(impl, floats(tokens, dim))
    parameters = [
        on(impl, floats(*shape, seed=seed))
        for seed, shape in enumerate([(dim,), (dim,), (columns, dim), (columns,)])
    ]
    _, z, normed, *rows = NORM_LINEAR_SILU.launch(x, *parameters, 1e-6, True, True, impl=impl)
    return x, *parameters, 1e-6, z, normed, *rows


@pytest.mark.parametrize("kept", ["all", "linear", "nothing"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_the_front_of_a_layer_adds_all_gradients_of_its_parameters(impl, shape, kept):
    tokens, dim = shape
    *given, z, normed, means, rstds = front_arguments(impl, *shape)
    offsets = on(impl, torch.tensor([0, tokens // 3, tokens // 3, tokens]))
    dz, dy = (on(impl, floats(tokens, 35, seed=9)) for _ in range(2))
    rest = z if kept != "nothing" else z[:0], normed if kept == "all" else normed[:0], means, rstds
    expected_dx, *terms, _ = NORM_LINEAR_SILU_BACKWARD_INTO.launch(dz, *given, *rest, impl=impl)
    shapes = [(dim,), (dim,), (35, dim), (35,)]
    totals = [on(impl, sums(*shape, seed=seed)) for seed, shape in enumerate(shapes)]
    expected = [
        added(total.cpu(), each)
        for total, each in zip(totals, [*terms, None, dz], strict=True)
        if each is not None
    ]
    expected.insert(2, linear_weight_grad(totals[2].clone(), dz, normed, offsets, BITS, impl=impl).cpu())
    dx = NORM_LINEAR_SILU_BACKWARD_EXACT.launch(
        *totals, dy, *given, *rest, offsets, BITS, ["a", "b", "c", "d"], impl=impl
    )
    assert torch.equal(dx, expected_dx) and torch.equal(dy, dz)
    assert all(torch.equal(total.cpu(), each) for total, each in zip(totals, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (70, 33, 34)])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_linear_layer_adds_the_gradient_of_its_bias(impl, shape):
    tokens, inputs, outputs = shape
    dy, x = on(impl, floats(tokens, 2 * outputs))[:, ::2], on(impl, floats(tokens, inputs, seed=1))
    offsets = on(impl, torch.tensor([0, 0, tokens // 2, tokens]))
    weight, bias = on(impl, sums(outputs, inputs)), on(impl, sums(outputs, seed=1))
    alone, expected = weight.clone(), added(bias.cpu(), dy)
    linear_weight_grad(alone, dy, x, offsets, BITS, impl=impl)
    linear_weight_grad(weight, dy, x, offsets, BITS, bias_accumulator=bias, impl=impl)
    assert torch.equal(weight, alone) and torch.equal(bias.cpu(), expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_term_without_a_number_is_named(impl):
    for place, name in ((2, "scale"), (3, "shift")):
        dy, x, u, *rest = norm_arguments(impl, 21, 6, True, 0.0)
        dy = dy.clone()
        if name == "scale":
            x = x.clone()
            x[17, 2] = NAN  # of the normalised row alone
            u = torch.ones_like(x)
        else:
            dy[17, place] = 2.0**30
            rest[-2][17], x = x[17, place], x.clone()  # a normalised value of 0, whose term is 0
            u[17] = 1.0
        totals = [on(impl, sums(6)), on(impl, sums(6))]
        with pytest.raises(ExactSumError) as caught:
            NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(
                *totals, torch.empty_like(x), dy, x, u, *rest, BITS, NAMES, impl=impl
            )
        assert (caught.value.name, caught.value.index) == (f"gradient of {name}", (17, place))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_token_without_a_number_is_named_in_the_bias(impl):
    dy, x = torch.zeros(40, 34), torch.zeros(40, 3)
    dy[39, 33] = dy[38, 33] = 2.0**26  # times an x of 0: the weight has a sum
    totals = on(impl, sums(34, 3)), on(impl, sums(34))
    with pytest.raises(ExactSumError, match=r"gradient of shift\[38, 33\]") as caught:
        linear_weight_grad(
            totals[0], on(impl, dy), on(impl, x), on(impl, torch.tensor([0, 5, 40])), BITS, "scale",
            bias_accumulator=totals[1], bias_name="shift", impl=impl,
        )  # fmt: skip
    assert caught.value.index == (38, 33)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("impl", IMPLS)
def test_no_sum_wraps(impl, sign):
    """Not in a program, not among programs, and not in a block of tokens, whose sum alone leaves int64."""
    edge = 2**63 - 1 if sign > 0 else -(2**63)
    x, ones = torch.tensor([[1.0, -1.0]]).repeat(20, 1), torch.ones(2)
    means, rstds = torch.zeros(20), torch.ones(20)
    given = [
        on(impl, each) for each in (torch.full((20, 2), float(sign)), x, None, ones, ones) if each is not None
    ]
    given.insert(2, None)
    rest = 0.0, 0, None, None, on(impl, means), on(impl, rstds), BITS, NAMES
    for room, fits in ((20 << BITS, True), ((20 << BITS) - 1, False)):
        totals = on(impl, torch.zeros(2).long()), on(impl, torch.zeros(2).long())
        totals[1][1] = edge - sign * room
        if fits:
            NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*totals, None, *given, *rest, impl=impl)
            assert totals[1][1] == edge
            continue
        with pytest.raises(ExactSumError, match=r"gradient of shift\[\d+, 1\]"):
            NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*totals, None, *given, *rest, impl=impl)
    large = on(impl, torch.full((32, 3), sign * 2.0**25))
    offsets, x = on(impl, torch.tensor([0, 32])), on(impl, torch.zeros(32, 2))
    for tokens, fits in ((3, True), (4, sign < 0), (5, False), (32, False)):
        weight, bias = on(impl, torch.zeros(3, 2).long()), on(impl, torch.zeros(3).long())
        part = large[:tokens], x[:tokens], offsets.clamp(max=tokens), BITS
        if fits:
            linear_weight_grad(weight, *part, bias_accumulator=bias, impl=impl)
            assert bias.tolist() == [sign * tokens * 2**61] * 3
            continue
        with pytest.raises(ExactSumError, match="gradient of bias"):
            linear_weight_grad(weight, *part, bias_accumulator=bias, impl=impl)


@pytest.mark.parametrize("impl", [TRITON])
def test_errors_are_put_off_without_the_terms(impl):
    dy, *rest = norm_arguments(impl, 21, 6, True, 0.0)
    dy = dy.clone()
    dy[4, 5] = NAN
    totals, later = [on(impl, sums(6)), on(impl, sums(6))], DeferredErrors()
    with later.active():
        given = torch.empty_like(dy), dy, *rest
        NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*totals, *given, BITS, NAMES, impl=impl)
    with pytest.raises(ExactSumError, match=r"gradient of scale\[4, 5\] or a sum it is added to"):
        later.check()


@pytest.mark.parametrize("impl", [TRITON])
def test_a_device_without_int64_atomics_adds_the_same(impl, monkeypatch):
    given, totals = norm_arguments(impl, 21, 6), [on(impl, sums(6)), on(impl, sums(6, seed=1))]
    others, du = [each.clone() for each in totals], [torch.empty_like(given[1]) for _ in range(2)]
    dx = NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*totals, du[0], *given, BITS, NAMES, impl=impl)
    monkeypatch.setattr(dispatch, "has_int64_atomics", lambda tensor: False)
    again = NORM_MUL_DROPOUT_BACKWARD_EXACT.launch(*others, du[1], *given, BITS, NAMES, impl=impl)
    assert torch.equal(dx, again) and torch.equal(*du)
    assert all(map(torch.equal, totals, others))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_sums": torch.zeros(5)}, "weight_sums must be"),
        ({"du": None}, "du goes with u"),
        ({"names": ["one"]}, "names must be"),
    ],
)
def test_bad_arguments_are_named(change, message):
    dy, x, u, weight, bias, p, seed, ids, positions, means, rstds = norm_arguments("cpu", 3, 5)
    given = {
        "weight_sums": sums(5), "bias_sums": sums(5), "du": torch.zeros(3, 5), "dy": dy, "x": x, "u": u,
        "weight": weight, "bias": bias, "p": p, "seed": seed, "sample_ids": ids, "positions": positions,
        "means": means, "rstds": rstds, "fraction_bits": BITS, "names": NAMES,
    }  # fmt: skip
    op = torch.ops.tritonrec.norm_mul_dropout_backward_exact
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        op(**{**given, **change}, impl="cpu")
    with torch.no_grad():
        torch.library.opcheck(op.default, (*given.values(), "cpu"))


def test_a_parameter_that_is_used_twice_is_summed_by_its_terms():
    """As scale and shift of one norm: a kernel takes two sums apart."""
    x, both = floats(9, 5), torch.nn.Parameter(floats(5, seed=1))
    module = torch.nn.Module()
    module.both = both
    accumulator = GradientAccumulator(module)
    with accumulator.active():
        norm_mul_dropout(x, None, both, both).backward(torch.ones(9, 5))
    total = accumulator.take()["both"]
    apart = torch.nn.ParameterDict({"scale": both.detach().clone(), "shift": both.detach().clone()})
    separate = GradientAccumulator(apart)
    with separate.active():
        norm_mul_dropout(x, None, apart["scale"], apart["shift"]).backward(torch.ones(9, 5))
    assert torch.equal(total, sum(separate.take().values())) and total.any()


def test_kernels_add_the_gradients_of_parameters_that_are_held_once_and_float32():
    layer = torch.nn.Linear(3, 2)
    accumulator, (weight, bias) = GradientAccumulator(layer), layer.parameters()
    with torch.no_grad():
        targets = targets_of(accumulator, weight, bias)
        assert targets.names == ["weight", "bias"]
        assert [each.data_ptr() for each in targets.sums] == [
            accumulator.sums[name].data_ptr() for name in targets.names
        ]
        assert targets_of(None, weight, bias) is None
        assert targets_of(accumulator, weight, weight) is None
        assert targets_of(accumulator, weight, torch.nn.Parameter(torch.ones(2))) is None


def test_terms_of_a_parameter_are_added_in_a_graph_as_they_are_outside():
    def added(sums, values):
        add_rows(sums, values, 36, "weight", "reference")
        return sums + 0

    values, sums = torch.randn(4, 3, 2), torch.zeros(3, 2, dtype=torch.int64)
    expected = added(sums.clone(), values)
    assert torch.equal(torch.compile(added, backend="eager", fullgraph=True)(sums, values), expected)
    assert expected.any()
