"""Promise: without offsets a weight gradient is the sum of exact products, rounded half away from zero."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from impls import IMPLS, TRITON, on

from tritonrec.kernels.accumulator import GradientAccumulator
from tritonrec.kernels.fixed_point.errors import ExactSumError
from tritonrec.kernels.linear.op import linear, linear_weight_grad

# name: rows, inputs, outputs
SHAPES = {
    "nothing": (0, 5, 3),
    "no_inputs": (4, 0, 3),
    "no_outputs": (4, 3, 0),
    "one_of_each": (1, 1, 1),
    "odd_dim": (7, 5, 3),
    "block_minus_one": (63, 7, 31),
    "block": (64, 8, 32),
    "block_plus_one": (65, 9, 33),
    "wide": (5, 67, 66),
}


def case(name, seed=0):
    """Sums, dy and x; a third of the products are ties at 36 bits."""
    rows, inputs, outputs = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    dy, x = (
        torch.randn(rows, outputs, generator=generator) / 64,
        torch.randn(rows, inputs, generator=generator),
    )
    dy[::3], x[::3] = odd(dy[::3] * 2**17) / 2**24, odd(x[::3] * 2**8) / 2**13
    return torch.randint(-(2**40), 2**40, (outputs, inputs), generator=generator), dy, x.relu()


def odd(values):
    """Odd numbers near: their products, over 2**37, have a half behind the 36th bit."""
    return (values / 2).round() * 2 + 1


def total_of(sums, dy, x, bits=36):
    """The definition, in whole numbers: a float32 is one of them over 2**149, a product over 2**298."""
    total = sums.tolist()
    behind, half = 298 - bits, 2 ** (297 - bits)
    lefts, rights = ([[int(value * 2.0**149) for value in row] for row in each.tolist()] for each in (dy, x))
    for one, other in zip(lefts, rights, strict=True):
        for row, left in zip(total, one, strict=True):
            for i, right in enumerate(other):
                exact = left * right
                row[i] += exact + half >> behind if exact > 0 else -(half - exact >> behind)
    return torch.tensor(total, dtype=torch.int64).view_as(sums)


@pytest.mark.smoke
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_each_product_is_rounded_once(impl, name):
    sums, dy, x = case(name)
    got = linear_weight_grad(on(impl, sums.clone()), on(impl, dy), on(impl, x), impl=impl)
    assert torch.equal(got.cpu(), total_of(sums, dy, x))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_tie_goes_away_from_zero_whatever_was_added_before(impl, sign):
    """Half a unit twice: rounded to the even sum, the second would be lost."""
    for first in (0.0, 1.0, 2.0):
        dy = torch.tensor([[first], [sign * 0.5], [sign * 0.5], [sign * 1.5]]) * 2.0**-20
        x = torch.full((4, 1), 2.0**-16)
        got = linear_weight_grad(
            on(impl, torch.zeros(1, 1, dtype=torch.int64)), on(impl, dy), on(impl, x), impl=impl
        )
        assert got.item() == first + sign * (1 + 1 + 2)


LARGE = 2.0**9, 2.0**14, 2.0**18, 2.0**21


@pytest.mark.parametrize(
    ("impl", "scale"),
    [
        ("reference", LARGE[-1]),  # which has no blocks
        *(("cpu", scale) for scale in LARGE),
        *(pytest.param("triton", scale, marks=TRITON.marks) for scale in LARGE),
    ],
)
def test_large_products_have_the_same_sums(impl, scale):
    """Blocks whose sums are near the bound, are cut in parts, and are added one by one."""
    sums, dy, x = case("block_plus_one", seed=1)
    dy[11, 2] = scale
    got = linear_weight_grad(on(impl, sums.clone()), on(impl, dy), on(impl, x), impl=impl)
    assert torch.equal(got.cpu(), total_of(sums, dy, x))


@given(data=st.data())
def test_any_numbers(data):
    rows, inputs, outputs = (data.draw(st.integers(1, most)) for most in (80, 9, 6))
    bits = data.draw(st.sampled_from([0, 20, 36, 50, 62]))
    numbers = st.one_of(
        st.floats(-1.0, 1.0, width=32), st.sampled_from([0.0, -0.0, 2.0**-149, 1.0, -(2.0**-20), 2.0**-18])
    )
    some = data.draw(st.lists(numbers, min_size=13, max_size=13))
    dy = torch.tensor([some[at % 13] for at in range(rows * outputs)]).view(rows, outputs)
    x = torch.tensor([some[at * 5 % 11] for at in range(rows * inputs)]).view(rows, inputs)
    scale = 2.0 ** (data.draw(st.integers(-24, 0)) - max(bits - 50, 0))
    sums = torch.zeros(outputs, inputs, dtype=torch.int64)
    got = linear_weight_grad(sums.clone(), dy * scale, x, None, bits, impl="cpu")
    assert torch.equal(got, total_of(sums, dy * scale, x, bits))


@pytest.mark.parametrize("impl", ["cpu", TRITON])
def test_strides_and_bias(impl):
    sums, dy, x = case("odd_dim")
    want = total_of(sums, dy, x)
    buffer = torch.full((3, 9), 7, dtype=torch.int64)
    buffer[:, 2:7] = sums
    wide = torch.full((7, 9), float("nan"))
    wide[:, 3:8] = x
    given, bias = on(impl, buffer), on(impl, torch.full((3,), 5))
    linear_weight_grad(
        given[:, 2:7], on(impl, dy).t().contiguous().t(), on(impl, wide)[:, 3:8], bias_accumulator=bias,
        impl=impl,
    )  # fmt: skip
    assert torch.equal(given[:, 2:7].cpu(), want)
    assert (given[:, :2] == 7).all() and (given[:, 7:] == 7).all()
    assert torch.equal(bias.cpu(), 5 + (dy.double() * 2**36).round().long().sum(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_lower_precision_are_exact_too(dtype):
    sums, dy, x = case("block_plus_one")
    dy, x = dy.to(dtype), x.to(dtype)
    want = total_of(sums, dy, x)
    for impl in ("reference", "cpu"):
        assert torch.equal(linear_weight_grad(sums.clone(), dy, x, impl=impl), want)


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ([(70, 2, float("nan")), (66, 9, float("inf"))], (66, 9)),
        ([(66, 9, float("nan")), (66, 4, 2.0**27)], (66, 4)),
        ([(3, 9, 2.0**26), (2, 9, 2.0**25)], (3, 9)),  # 2**25 has a place in fixed point
    ],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_the_first_row_without_an_exact_sum_is_named(impl, places, named):
    dy, x = torch.ones(71, 10), torch.ones(71, 4)
    for row, column, value in places:
        dy[row, column] = value
    sums = on(impl, torch.zeros(10, 4, dtype=torch.int64))
    with pytest.raises(ExactSumError, match="gradient of item_tower by sample") as caught:
        linear_weight_grad(sums, on(impl, dy), on(impl, x), name="item_tower", impl=impl)
    assert caught.value.index == (*named, 0)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_sum_never_wraps(impl, sign):
    edge = 2**63 - 1 if sign > 0 else -(2**63)
    for room, fits in ((2**36 * 3, True), (2**36 * 3 - 1, False)):
        sums = on(impl, torch.zeros(3, 2, dtype=torch.int64))
        sums[2, 1] = edge - sign * room
        dy, x = on(impl, torch.full((3, 3), float(sign))), on(impl, torch.ones(3, 2))
        if fits:
            assert linear_weight_grad(sums, dy, x, impl=impl)[2, 1] == edge
            continue
        with pytest.raises(ExactSumError, match=r"sample\[2, 2, 1\].*element \[2, 1\] of the sum"):
            linear_weight_grad(sums, dy, x, impl=impl)


@pytest.mark.parametrize("sign", [1, -1])
def test_many_rows_cannot_wrap_unseen(sign):
    """2**49 units a row, added in parts of two rows: 2**14 rows reach the end of int64."""
    dy, x = torch.full((2**14, 1), sign * 2.0**7), torch.full((2**14, 1), 2.0**6)
    sums = linear_weight_grad(torch.zeros(1, 1, dtype=torch.int64), dy[1:], x[1:])
    assert sums.item() == sign * (2**14 - 1) * 2**49
    with pytest.raises(ExactSumError, match=r"gradient of weight by sample\[16382, 0, 0\]"):
        linear_weight_grad(torch.full((1, 1), sign * (2**49 + 1)), dy[: 2**14 - 1], x[: 2**14 - 1])


@pytest.fixture
def small_shares(monkeypatch):
    """So that programs share 71 rows."""
    from tritonrec.kernels.linear import triton_row_products

    monkeypatch.setattr(triton_row_products, "ROWS_OF_SHARE", 8)


@pytest.mark.parametrize("impl", [TRITON])
def test_programs_that_share_rows_add_up(impl, small_shares):
    sums, dy, x = case("block_plus_one", seed=3)
    got = linear_weight_grad(on(impl, sums.clone()), on(impl, dy), on(impl, x), impl=impl)
    assert torch.equal(got.cpu(), total_of(sums, dy, x))
    full = on(impl, torch.full((2, 2), 2**63 - 2**60))
    with pytest.raises(ExactSumError, match=r"gradient of weight by sample\[") as caught:
        linear_weight_grad(
            full, on(impl, torch.full((32, 2), 2.0**20)), on(impl, torch.ones(32, 2)), impl=impl
        )
    assert caught.value.index[0] % 8 == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_a_linear_layer_without_offsets_sums_its_rows(impl):
    """Through the accumulator, as a model does."""
    sums, dy, x = case("odd_dim")
    layer = torch.nn.Linear(5, 3, bias=False, device=on(impl, x).device)
    accumulator = GradientAccumulator(layer)
    with accumulator.active():
        (linear(on(impl, x), layer.weight, impl=impl) * on(impl, dy)).sum().backward()
    assert torch.equal(accumulator.sums["weight"].cpu(), total_of(torch.zeros_like(sums), dy, x))
