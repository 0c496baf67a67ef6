"""Rows of a linear layer keep their bits in any batch; exact weight gradients in any split and order."""

from itertools import pairwise

import pytest
import torch
from float_error import assert_error_at_most_twice
from impls import GPU, IMPLS, TRITON, on

from tritonrec.kernels.fixed_point.errors import ExactSumError
from tritonrec.kernels.fused import fused_multiply_add
from tritonrec.kernels.linear.op import linear, linear_weight_grad

# name: tokens, inputs, outputs
SHAPES = {
    "empty": (0, 5, 3),
    "no_inputs": (4, 0, 3),
    "no_outputs": (4, 3, 0),
    "one_row": (1, 7, 5),
    "one_of_each": (1, 1, 1),
    "odd_dim": (40, 37, 35),
    "block_minus_one": (31, 31, 31),
    "block": (32, 32, 32),
    "block_plus_one": (33, 33, 33),
    "wide": (9, 130, 70),
}


def case(name, seed=0):
    """x, weight, bias and a cotangent, none of them symmetric."""
    tokens, inputs, outputs = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, inputs), (outputs, inputs), (outputs,), (tokens, outputs)]
    return [torch.randn(shape, generator=generator) * 3 + 0.5 for shape in shapes]


def gradients(call, x, weight, bias, dy):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]
    y = call(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_error_is_that_of_plain_float32(impl, name):
    tensors = case(name)
    got = gradients(lambda *t: linear(*t, impl=impl), *(on(impl, tensor) for tensor in tensors))
    plain = gradients(torch.nn.functional.linear, *tensors)
    exact = gradients(torch.nn.functional.linear, *(tensor.double() for tensor in tensors))
    for what, *values in zip(("y", "dx", "dweight", "dbias"), got, plain, exact, strict=True):
        assert_error_at_most_twice(*values, what)


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_no_bias_is_a_bias_of_zero(impl):
    x, weight, bias, _ = (on(impl, tensor) for tensor in case("odd_dim"))
    assert torch.equal(linear(x, weight, impl=impl), linear(x, weight, bias * 0, impl=impl))


# The interpreter cuts a float32 to bfloat16 instead of rounding it.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if GPU else [torch.float16])
@pytest.mark.parametrize("impl", [TRITON])
def test_half_precision_rounds_once(impl, dtype):
    x, weight, bias, _ = (on(impl, tensor.to(dtype)) for tensor in case("odd_dim"))
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).cpu()
    assert_error_at_most_twice(linear(x, weight, bias, impl=impl).float(), exact.to(dtype).float(), exact)


OFFSETS = {
    "one_sample": [0, 40],
    "empty_samples": [0, 0, 3, 3, 40, 40],
    "single_tokens": list(range(41)),
    "block_edges": [0, 31, 31, 32, 40],
}


def eighths(shape, generator):
    """Multiples of 1/8 below 2: their float32 products and sums are exact, in whatever order."""
    return torch.randint(-15, 16, shape, generator=generator) / 8


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("impl", IMPLS)
def test_weight_gradient_of_exact_products_is_exact(impl, name):
    generator = torch.Generator().manual_seed(3)
    dy, x = eighths((40, 35), generator), eighths((40, 33), generator)
    sums = torch.randint(-(2**40), 2**40, (35, 33), generator=generator)
    expected = sums + (dy.double().t() @ x.double() * 2**36).long()
    got = linear_weight_grad(
        on(impl, sums), on(impl, dy), on(impl, x), on(impl, torch.tensor(OFFSETS[name])), impl=impl
    )
    assert got.data_ptr() == sums.data_ptr() or impl == "triton"
    assert torch.equal(got.cpu(), expected)


@pytest.fixture
def small_shares(monkeypatch):
    """So that programs share 40 tokens."""
    from tritonrec.kernels.linear import triton_linear

    monkeypatch.setattr(triton_linear, "TOKENS_OF_SHARE", 8)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("impl", [TRITON])
def test_programs_that_share_samples_add_up(impl, name, bias, small_shares):
    generator = torch.Generator().manual_seed(3)
    dy, x = eighths((40, 35), generator), eighths((40, 33), generator)
    sums = torch.randint(-(2**40), 2**40, (35, 34), generator=generator)
    expected = sums.clone()
    expected[:, :33] += (dy.double().t() @ x.double() * 2**36).long()
    expected[:, 33] += (dy.double().sum(0) * 2**36).long() * bias
    weight, of_bias = on(impl, sums[:, :33].contiguous()), on(impl, sums[:, 33].contiguous())
    options = {"bias_accumulator": of_bias, "bias_name": "bias"} if bias else {}
    offsets = on(impl, torch.tensor(OFFSETS[name]))
    linear_weight_grad(weight, on(impl, dy), on(impl, x), offsets, impl=impl, **options)
    assert torch.equal(weight.cpu(), expected[:, :33]) and torch.equal(of_bias.cpu(), expected[:, 33])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("impl", [TRITON])
def test_a_sum_that_shares_cannot_take_is_named(impl, sign, small_shares):
    """Each program's samples fit, and all together do not; nor do those of the bias."""
    offsets, x = on(impl, torch.arange(33)), on(impl, torch.ones(32, 2))
    for weight, bias in ((sign * (2**63 - 2**60), 0), (0, sign * (2**63 - 2**60))):
        totals = torch.full((3, 2), weight), torch.full((3,), bias)
        name = "gradient of bias" if bias else "gradient of weight by sample"
        with pytest.raises(ExactSumError, match=rf"{name}\[") as caught:
            linear_weight_grad(
                on(impl, totals[0]), on(impl, torch.full((32, 3), sign * 2.0**20)), x, offsets,
                bias_accumulator=on(impl, totals[1]), bias_name="bias", impl=impl,
            )  # fmt: skip
        assert 0 <= caught.value.index[0] < 32 and caught.value.index[0] % 8 == 0


@pytest.mark.smoke
@pytest.mark.parametrize("impl", IMPLS)
def test_weight_gradient_error_is_that_of_plain_float32(impl):
    x, weight, _, dy = (on(impl, tensor) for tensor in case("odd_dim"))
    offsets = on(impl, torch.tensor(OFFSETS["empty_samples"]))
    sums = linear_weight_grad(torch.zeros_like(weight, dtype=torch.int64), dy, x, offsets, impl=impl)
    exact = (dy.double().t() @ x.double()).cpu()
    assert_error_at_most_twice(sums * 2.0**-36, dy.t() @ x, exact, "dweight")


@pytest.mark.parametrize("impl", IMPLS)
def test_weight_gradient_does_not_depend_on_split_or_order(impl):
    x, weight, _, dy = (on(impl, tensor) for tensor in case("odd_dim"))
    ends = [0, 1, 1, 8, 22, 40]
    samples = [slice(*pair) for pair in pairwise(ends)]

    def total(micro_batches):
        sums = torch.zeros_like(weight, dtype=torch.int64)
        for members in micro_batches:
            rows = torch.cat([torch.arange(40)[samples[s]] for s in members])
            lengths = torch.tensor([0, *(samples[s].stop - samples[s].start for s in members)])
            some = on(impl, rows)
            linear_weight_grad(sums, dy[some], x[some], on(impl, lengths.cumsum(0)), impl=impl)
        return sums

    whole = total([[0, 1, 2, 3, 4]])
    assert whole.any()
    for split in ([[4, 3, 2, 1, 0]], [[0], [1], [2], [3], [4]], [[3, 1], [0, 4, 2]], [[2], [4, 0], [1, 3]]):
        assert torch.equal(total(split), whole), split


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), r"gradient of item_tower by sample\[2, 33, 0\] = nan is not finite"),
        (float("inf"), r"gradient of item_tower by sample\[2, 33, 0\] = (inf|nan) is not finite"),
        (2.0**27, r"gradient of item_tower by sample\[2, 33, 0\] = .* the end of fixed point"),
    ],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_what_has_no_exact_sum_is_named(impl, value, message):
    dy, x = torch.ones(9, 35), torch.ones(9, 34)
    dy[7, 2] = value  # of sample 3: an earlier row, a later sample
    dy[4, 33] = value
    sums = on(impl, torch.zeros(35, 34, dtype=torch.int64))
    offsets = on(impl, torch.tensor([0, 2, 2, 5, 9]))
    with pytest.raises(ExactSumError, match=message) as caught:
        linear_weight_grad(sums, on(impl, dy), on(impl, x), offsets, name="item_tower", impl=impl)
    assert caught.value.index == (2, 33, 0)


@pytest.mark.parametrize("rows", [31, 32, 33, 63, 64, 65])
def test_blocks_of_rows_are_the_rows(rows):
    """On the CPU rows are multiplied in blocks of 32: as many rows one by one have the same bits."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, 70), (37, 70), (37,)))
    one_by_one = torch.cat([linear(row[None], weight, bias, impl="cpu") for row in x])
    assert torch.equal(linear(x, weight, bias, impl="cpu"), one_by_one)


def wide_gradient(offsets=(0, 3, 3, 7, 12)):
    """Arguments whose accumulator the CPU fills in three blocks of rows, and the offsets of four samples."""
    inputs = 1000
    outputs = 2 * (2**15 // inputs) + 5
    generator = torch.Generator().manual_seed(outputs)
    dy, x = (torch.randn(12, n, generator=generator) + 0.25 for n in (outputs, inputs))
    return torch.zeros(outputs, inputs, dtype=torch.int64), dy, x, torch.tensor(offsets)


def test_blocks_of_an_accumulator_have_the_bits_of_the_reference():
    sums, dy, x, offsets = wide_gradient()
    start = torch.arange(sums.numel()).view_as(sums) * 2**20
    expected = start.clone()
    for first, end in pairwise(offsets.tolist()):
        product = torch.zeros(sums.shape)
        for t in range(first, end):
            product = fused_multiply_add(dy[t].unsqueeze(1), x[t], product)
        expected += (product.double() * 2.0**36).round().long()
    assert torch.equal(linear_weight_grad(start, dy, x, offsets, impl="cpu"), expected)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ([(4, 2), (1, 66)], (0, 66)),  # the earlier sample, in a later block
        ([(4, 66), (8, 2)], (2, 66)),  # the same, with a sample in between that has no token
        ([(4, 66), (4, 2)], (2, 2)),  # one sample: the earlier row
        ([(9, 40), (8, 68), (4, 35), (5, 33)], (2, 33)),
    ],
)
def test_the_first_sample_is_named_whatever_the_blocks(bad, named):
    sums, dy, x, offsets = wide_gradient()
    for place in bad:
        dy[place] = float("inf")
    with pytest.raises(ExactSumError) as caught:
        linear_weight_grad(sums, dy, x, offsets, impl="cpu")
    assert caught.value.index == (*named, 0)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_sum_never_wraps(impl, sign):
    edge = 2**63 - 1 if sign > 0 else -(2**63)
    one = torch.ones(3, 1)
    for room, fits in ((2**36 * 3, True), (2**36 * 3 - 1, False)):
        sums = on(impl, torch.zeros(34, 33, dtype=torch.int64))
        sums[33, 32] = edge - sign * room
        arguments = (
            on(impl, sign * one.expand(3, 34)),
            on(impl, one.expand(3, 33)),
            on(impl, torch.arange(4)),
        )
        if fits:
            assert linear_weight_grad(sums, *arguments, impl=impl)[33, 32] == edge
            continue
        with pytest.raises(
            ExactSumError, match=r"weight by sample\[2, 33, 32\].*element \[33, 32\] of the sum"
        ):
            linear_weight_grad(sums, *arguments, impl=impl)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("inner", [13, 16, 48, 64, 80, 128, 130])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (15, 1), (16, 1), (37, 1), (64, 1), (9, 31), (9, 47), (5, 65)]
)
def test_sums_of_columns_that_fill_no_register_have_one_order(rows, columns, inner):
    """One column has a kernel of its own where vectors are wide, and others are cut by masks."""
    draw = torch.Generator().manual_seed(rows * 1000 + columns * 10 + inner)
    x, weight = torch.randn(rows, inner, generator=draw), torch.randn(columns, inner, generator=draw)
    bias = torch.randn(columns, generator=draw)
    whole = torch.zeros(rows + 2, inner + 3)  # rows further apart than they are long, others around
    whole[1:-1, :inner] = x
    want = bias.expand(rows, -1)
    for first in range(0, inner, 64):
        chain = torch.zeros(rows, columns)
        for i in range(first, min(first + 64, inner)):
            chain = fused_multiply_add(x[:, i : i + 1], weight[:, i], chain)
        want = want + chain
    for rows_here in (x, whole[1:-1, :inner]):
        assert torch.equal(linear(rows_here, weight, bias, impl="cpu"), want)
