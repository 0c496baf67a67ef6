# mypy: ignore-errors
"""Batch-invariant products in Triton: tiles of one fixed shape, no split of a float sum.

    L tokens, B samples, I inputs, O outputs

A tile of the output is one program, which adds its products in ascending blocks of the inner dimension into
one float32 accumulator. More rows mean more programs, never another tile, so a row's bits do not depend on
how many there are. (A BLAS chooses a tile, or splits the inner sum, by the number of rows.)

The weight gradient has tiles of the weight as well. A program walks samples: a float32 product of each,
rounded once, and an int64 sum that stays in registers. A column of programs more adds up the bias's gradient.
Integers have one sum in any grouping. So where tokens are many and tiles are few, several programs share a
tile's samples, and the tokens of the bias; each adds its sums to the accumulators atomically at its end. A
device without int64 atomics (Ascend) has one program for each tile. Behind a norm whose output was not kept,
rows are normalised as they are loaded.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from tritonrec.kernels import dispatch
from tritonrec.kernels.fixed_point.errors import ExactSumError
from tritonrec.kernels.fixed_point.triton_fixed_point import (
    NONE,
    add_atomically,
    add_near,
    any_of,
    is_far,
    magnitude,
    near,
    round_to_fixed_point,
    without_zeros,
)
from tritonrec.kernels.linear.op import no_sum
from tritonrec.kernels.linear.triton_row_products import add_row_products
from tritonrec.kernels.padding import report
from tritonrec.kernels.races import declared
from tritonrec.kernels.triton_jit import jit_kernel

NEVER: tl.constexpr = tl.constexpr(2**31 - 1)  # behind every sample
MOST_PROGRAMS = 65535  # a launch may have no more along an axis
TOKENS_OF_SHARE = 512  # of a weight gradient, whose sums are worth an atomic addition
MOST_SHARED = 1024  # programs that share tiles: enough for the 132 processors of a H100 eight times
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def multiply_add(a, b, total, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """``total + a @ b`` with float32 accumulator whose bits do not depend on the place in the tile.

    PRECISION of float32: ``"ieee"``, a multiply-add for each term, or ``"bf16x6"``. Then a number is the sum
    of three bfloat16, which have its 24 bits; of their nine products the six largest are added in tensor
    cores, small ones first, and `total` outside of them. The others are below 2**-26 of the product.

    The interpreter's `tl.dot` is the host's BLAS, in which bits depend on the place (and it takes bfloat16
    for integers).
    """
    if INTERPRETED:
        return total + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    elif a.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision=PRECISION)
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@jit_kernel
def rows_times_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, x_row, x_column, weight_row, weight_column, tokens, inner, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out (L, O) = x (L, I) @ weight (I, O) + bias (O,)."""
    # tiles of the same rows start one after another, so that x is read from memory once
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64)  # an int64 bound makes the loop's variable int64
    # a grid is bounded, so programs stride over tiles; a tile's bits do not depend on its program
    # not tl.cdiv, which adds before it divides: that sum may pass 2**31
    for tile in range(first, (tokens - 1) // ROWS + 1, tl.num_programs(1)):
        row = tile * ROWS + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(tl.full((), 0, tl.int64), inner, TERMS):
            term = start + tl.arange(0, TERMS)
            # 0 is the identity of the sum, so terms behind the end add nothing
            x = tl.load(
                x_ptr + row[:, None] * x_row + term[None, :] * x_column,
                mask=(row < tokens)[:, None] & (term < inner)[None, :],
                other=0.0,
            )
            weight = tl.load(
                weight_ptr + term[:, None] * weight_row + column[None, :] * weight_column,
                mask=(term < inner)[:, None] & (column < columns)[None, :],
                other=0.0,
            )
            total = multiply_add(x, weight, total, PRECISION, INTERPRETED)
        if bias_ptr is not None:
            # last, where the CPU begins with it: the bits of the two differ anyway, by the order of the sums
            total += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out_ptr + row[:, None] * columns + column[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=(row < tokens)[:, None] & (column < columns)[None, :],
        )


@triton.jit
def load_gradients(first, end, row, outputs, dy_ptr, dy_row, dy_column, BLOCK: tl.constexpr):
    """(tokens, dy): BLOCK tokens from `first` on and their gradients (row, token), 0 from `end` on."""
    token = first + tl.arange(0, BLOCK)
    dy = tl.load(
        dy_ptr + token[None, :] * dy_row + row[:, None] * dy_column,
        mask=(token < end)[None, :] & (row < outputs)[:, None],
        other=0.0,
    )
    return token, dy


@triton.jit
def add_bias_gradient(
    bias_ptr, dy_ptr, dy_row, dy_column, row, outputs, begin, end, scale, limit, near,
    BLOCK: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """bias[row] += sum over tokens [begin, end) of round(dy * scale), in int64.

    NONE, or the first bad token * O + row. Where the sum of a block of tokens leaves int64, it is the
    position of the first one; where that of all tokens does, SHARED, that of `begin`.
    """
    # without tokens the sums are neither read nor written, since other programs own them
    owned = (row < outputs) & (row * 0 + begin < end)
    if SHARED:
        before = tl.zeros((BLOCK,), tl.int64)
    else:
        before = tl.load(bias_ptr + row, mask=owned, other=0)
    sums = tl.zeros((BLOCK, BLOCK), tl.int64)
    most = tl.zeros((BLOCK, BLOCK), tl.int32)
    for first in range(begin, end, BLOCK):
        _, dy = load_gradients(first, end, row, outputs, dy_ptr, dy_row, dy_column, BLOCK)
        most = tl.maximum(most, magnitude(dy))
        sums = add_near(sums, dy, limit)
    blocks = (tl.maximum(end - begin, 0) + (BLOCK - 1)) // BLOCK
    total = before + without_zeros(tl.sum(sums, axis=1), blocks * BLOCK, limit)
    worst = tl.full((), NONE, tl.int64)
    if any_of(most >= magnitude(near)) | any_of(is_far(before)):
        total = before
        bad = tl.full((BLOCK,), NONE, tl.int64)
        for first in range(begin, end, BLOCK):
            token, dy = load_gradients(first, end, row, outputs, dy_ptr, dy_row, dy_column, BLOCK)
            term, fits = round_to_fixed_point(dy, scale, limit)
            place = token[None, :] * outputs + row[:, None]
            bad = tl.minimum(bad, tl.min(tl.where(fits, NONE, place), axis=1))
            # halves of 32 bits, whose sums do not wrap
            low = tl.sum(term & 0xFFFFFFFF, axis=1)
            high = tl.sum(term >> 32, axis=1) + (low >> 32)
            together = (high << 32) + (low & 0xFFFFFFFF)
            after = total + together
            fits = (high >= -(2**31)) & (high < 2**31) & (((total ^ after) & (together ^ after)) >= 0)
            bad = tl.minimum(bad, tl.where(fits, NONE, first * outputs + row))
            total = after
        worst = tl.min(bad, axis=0)
    if SHARED:
        wraps = add_atomically(bias_ptr + row, total, begin * outputs + row, owned)
        return tl.minimum(worst, wraps)
    else:
        # several threads may load one element where rows are few: none may load it changed
        tl.debug_barrier()
        tl.store(bias_ptr + row, total, mask=owned)
        return worst


@triton.jit
def multiply_sample(
    sample, row, column, dy_ptr, x_ptr, means_ptr, rstds_ptr, norm_weight_ptr, norm_bias_ptr, offsets_ptr,
    dy_row, dy_column, x_row, x_column, outputs, inputs,
    BLOCK: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """dy^T x of a sample's tokens, in float32."""
    start = tl.load(offsets_ptr + sample).to(tl.int64)
    stop = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    product = tl.zeros((BLOCK, BLOCK), tl.float32)
    for block in range(start, stop, TERMS):
        token = block + tl.arange(0, TERMS)
        dy = tl.load(
            dy_ptr + token[None, :] * dy_row + row[:, None] * dy_column,
            mask=(token < stop)[None, :] & (row < outputs)[:, None],
            other=0.0,
        )
        x = tl.load(
            x_ptr + token[:, None] * x_row + column[None, :] * x_column,
            mask=(token < stop)[:, None] & (column < inputs)[None, :],
            other=0.0,
        )
        if means_ptr is not None:
            mean = tl.load(means_ptr + token, mask=token < stop, other=0.0)[:, None]
            rstd = tl.load(rstds_ptr + token, mask=token < stop, other=0.0)[:, None]
            # loaded again for each block, which costs less than to keep them in registers
            norm_weight = tl.load(norm_weight_ptr + column, mask=column < inputs, other=0.0)[None, :]
            norm_bias = tl.load(norm_bias_ptr + column, mask=column < inputs, other=0.0)[None, :]
            x = (x.to(tl.float32) - mean) * rstd * norm_weight + norm_bias
            # rounded to the product's dtype, as the norm's output is between the single ops
            x = tl.where((token < stop)[:, None], x, 0.0).to(dy.dtype)
        product = multiply_add(dy, x, product, PRECISION, INTERPRETED)
    return product


# which program sees a sum leave int64 depends on who comes first; without such a sum nothing varies
@declared(varies=("bad_ptr", "value_ptr"))
@jit_kernel
def add_weight_gradients_kernel(
    accumulator_ptr, bias_ptr, dy_ptr, x_ptr, means_ptr, rstds_ptr, norm_weight_ptr, norm_bias_ptr,
    offsets_ptr, bad_ptr, value_ptr, accumulator_row, accumulator_column, dy_row, dy_column, x_row, x_column,
    samples, tokens, samples_of_share, tokens_of_share, outputs, inputs, scale, limit,
    near, BLOCK: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr, SHARED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """accumulator (O, I) += sum over samples of round(dy^T x * scale), bias (O,) += of round(dy * scale).

    With means, x stands for norm(x). A position of bias is that of dy behind all positions of products.
    SHARED: the programs along the third axis share the samples and the tokens. Where the sum of a program's
    samples does not fit, its position is that of the first one behind all other positions.
    """
    lane = tl.arange(0, BLOCK).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK + lane
    column = tl.program_id(1).to(tl.int64) * BLOCK + lane
    share = tl.program_id(2).to(tl.int64)
    if bias_ptr is not None:
        # first, so that its registers are free again; the last programs alone have tokens to add
        last = tl.program_id(1) == tl.num_programs(1) - 1
        first_token = share * tokens_of_share
        end = tl.where(last, tl.minimum(first_token + tokens_of_share, tokens), first_token)
        bad_token = add_bias_gradient(
            bias_ptr,
            dy_ptr,
            dy_row,
            dy_column,
            row,
            outputs,
            first_token,
            end,
            scale,
            limit,
            near,
            BLOCK,
            SHARED,
        )
        bad_token = tl.where(
            bad_token == NONE, NONE, tl.cast(samples, tl.int64) * outputs * inputs + bad_token
        )
    inside = (row < outputs)[:, None] & (column < inputs)[None, :]
    place = row[:, None] * inputs + column[None, :]
    to = accumulator_ptr + row[:, None] * accumulator_row + column[None, :] * accumulator_column
    # an int64 start, since sample * outputs * inputs may pass 2**31
    begin = share * samples_of_share
    end = tl.minimum(begin + samples_of_share, samples)
    total = tl.zeros((BLOCK, BLOCK), tl.int64)
    worst = tl.full((), NONE, tl.int64)
    value = tl.full((), 0.0, tl.float32)
    checked = tl.full((), 0, tl.int32)  # 2: done
    # a second time, with checks, where something passes the bound of sums without; one loop for both, since a
    # product's code is long and its registers many
    while checked < 2:
        if SHARED:
            total = tl.zeros((BLOCK, BLOCK), tl.int64)
        else:
            total = tl.load(to, mask=inside, other=0)
        loud = is_far(total)
        most = tl.zeros((BLOCK, BLOCK), tl.int32)
        # The first time, unchecked: terms rounded by one sum, their largest magnitude noted. The second time,
        # if that or a sum before was too large, each term and each sum is looked at.
        for sample in range(begin, end):
            product = multiply_sample(
                sample, row, column, dy_ptr, x_ptr, means_ptr, rstds_ptr, norm_weight_ptr, norm_bias_ptr,
                offsets_ptr, dy_row, dy_column, x_row, x_column, outputs, inputs, BLOCK, TERMS, PRECISION,
                INTERPRETED,
            )  # fmt: skip
            if checked == 1:
                term, fits = round_to_fixed_point(product, scale, limit)
                after = total + term
                # a wrapped sum has the sign that neither of its operands has
                fits = fits & (((total ^ after) & (term ^ after)) >= 0)
                total = after
                failed = inside & (fits == 0)
                # only the first failure counts: after a wrap a sum means nothing
                if (worst == NONE) & any_of(failed):
                    # places of the tile, whose order is that of the weight, need half of its registers
                    local = tl.arange(0, BLOCK)
                    at = tl.where(failed, local[:, None] * BLOCK + local[None, :], BLOCK * BLOCK)
                    first = tl.min(tl.min(at, axis=1), axis=0)
                    value = tl.sum(tl.sum(tl.where(at == first, product, 0.0), axis=1), axis=0)
                    row_of = tl.program_id(0).to(tl.int64) * BLOCK + first // BLOCK
                    column_of = tl.program_id(1).to(tl.int64) * BLOCK + first % BLOCK
                    worst = (sample * outputs + row_of) * inputs + column_of
            else:
                most = tl.maximum(most, magnitude(product))
                total = add_near(total, product, limit)
        if checked == 0:
            total = without_zeros(total, tl.maximum(end - begin, 0), limit)
        checked = tl.where((checked == 0) & any_of(loud | (most >= magnitude(near))), 1, 2)
    if SHARED:
        behind = tl.cast(samples, tl.int64) * outputs * inputs + tl.cast(tokens, tl.int64) * outputs
        wraps = add_atomically(to, total, behind + begin * outputs * inputs + place, inside)
        worst = tl.minimum(worst, wraps)
    else:
        # loaded in one layout and stored in another: no thread may store before the others have loaded
        tl.debug_barrier()
        tl.store(to, total, mask=inside)
    if bias_ptr is not None:
        worst = tl.minimum(worst, bad_token)
    # The least of all programs' positions is the first: positions of products,
    # of dy, and of sums of samples follow each other in one numbering.
    program = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2)
    program += share
    tl.store(bad_ptr + program, worst)
    tl.store(value_ptr + program, value)


def configuration(x: torch.Tensor, inner: int, columns: int) -> dict[str, Any]:
    """ROWS and COLUMNS of a tile, TERMS of a partial sum, PRECISION, warps and stages: by dtype, GPU and the
    layer's inputs and outputs, never by tokens.

    A tile of 128 x 128 does 64 multiplications for each number that it reads, twice those of 64 x 64, which
    is what tensor cores need to be the limit. Its registers are short where rows cannot be loaded 16 bytes at
    a time. Float32 has tensor cores where they take bfloat16; the larger the tile, the fewer times a number
    is split.
    """
    generation = dispatch.capability(x)[0]
    if x.dtype == torch.bfloat16 and generation >= 8:
        wide = columns > 64 and inner % 16 == 0
        sizes = {"ROWS": 128, "COLUMNS": 128 if wide else 64, "TERMS": 64 if generation >= 9 else 32}
        return {**sizes, "PRECISION": "ieee", "num_warps": 8, "num_stages": 3}
    if x.dtype == torch.float32 and generation >= 8:
        # what the compilers find registers for
        warps, stages = {8: (4, 3), 9: (4, 2)}.get(generation, (8, 3))
        sizes = {"ROWS": 64, "COLUMNS": 64, "TERMS": 32}
        return {**sizes, "PRECISION": "bf16x6", "num_warps": warps, "num_stages": stages}
    return {"ROWS": 32, "COLUMNS": 32, "TERMS": 32, "PRECISION": "ieee", "num_warps": 4}


def grid_of(config: dict[str, Any], tokens: int, columns: int) -> tuple[int, int]:
    """Of a kernel with the tiles of `configuration`."""
    return triton.cdiv(columns, config["COLUMNS"]), min(triton.cdiv(tokens, config["ROWS"]), MOST_PROGRAMS)


def configuration_of_weights(x: torch.Tensor, inputs: int) -> dict[str, Any]:
    """BLOCK, the edge of a tile of the weight, and the others of `configuration`.

    Six products leave registers for int64 sums on Hopper and later only. In bfloat16 these load the next
    tokens of a sample while they multiply; elsewhere a pipeline would spill registers.
    """
    hopper = dispatch.capability(x) >= (9, 0)
    if x.dtype == torch.bfloat16 and hopper:
        # Hopper and later have matrix instructions for tiles of 64 rows
        stages = 3 if inputs % 16 == 0 else 1
        return {"BLOCK": 64, "TERMS": 64, "PRECISION": "ieee", "num_warps": 8, "num_stages": stages}
    if x.dtype == torch.float32 and hopper:
        return {"BLOCK": 64, "TERMS": 32, "PRECISION": "bf16x6", "num_warps": 8, "num_stages": 1}
    return {"BLOCK": 32, "TERMS": 32, "PRECISION": "ieee", "num_warps": 4, "num_stages": 1}


def linear(x, weight, bias, _seq_offsets=None) -> torch.Tensor:
    """See `tritonrec.kernels.linear.op.linear`; x, weight and bias with any strides."""
    (tokens, inner), columns = x.shape, weight.shape[0]
    out = x.new_empty(tokens, columns)
    if out.numel() == 0:
        return out
    config = configuration(x, inner, columns)
    rows_times_kernel[grid_of(config, tokens, columns)](
        x, weight, None if bias is None else bias.contiguous(), out, *x.stride(), *weight.t().stride(),
        tokens, inner, columns, **config, INTERPRETED=INTERPRETED, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def linear_weight_grad(
    accumulator, dy, x, seq_offsets, bits, name, bias_accumulator=None, bias_name="", norm=(None,) * 4
) -> None:
    """See `tritonrec.kernels.linear.op.linear_weight_grad`.

    norm: means and rstds of the rows of x (L,), weight and bias (in,) of a norm between, contiguous.
    """
    if seq_offsets is None:
        add_row_products(accumulator, dy, x, bits, name, bias_accumulator, bias_name)
        return
    outputs, inputs = accumulator.shape
    if outputs == 0 or x.shape[0] == 0 or (inputs == 0 and bias_accumulator is None):
        return
    config = configuration_of_weights(dy, inputs)
    # The further column of programs is for the bias.
    columns = triton.cdiv(inputs, config["BLOCK"]) + (bias_accumulator is not None)
    samples, tiles = len(seq_offsets) - 1, triton.cdiv(outputs, config["BLOCK"])
    shares = _shares(tiles * columns, samples, x)
    programs, shared = (tiles, columns, shares), (triton.cdiv(samples, shares), triton.cdiv(len(x), shares))
    bad = torch.empty(programs, dtype=torch.int64, device=accumulator.device)
    values = torch.empty(programs, dtype=torch.float32, device=accumulator.device)
    add_weight_gradients_kernel[programs](
        accumulator, bias_accumulator, dy, x, *norm, seq_offsets.contiguous(), bad, values,
        *accumulator.stride(), *dy.stride(), *x.stride(), samples, len(x), *shared, outputs,
        inputs, 2.0**bits, 2.0 ** (62 - bits), near(bits, max(shared)), **config,
        SHARED=shares > 1, INTERPRETED=INTERPRETED, enable_fp_fusion=False,
    )  # fmt: skip

    products = samples * outputs * inputs
    behind = products + len(x) * outputs

    def error(code: int, late: bool = False) -> Exception:
        if code > behind:  # the sum of samples from this one on
            sample, place = divmod(code - 1 - behind, outputs * inputs)
            return no_sum((sample, *divmod(place, inputs), None), bits, name)
        if code > products:
            token, row = divmod(code - 1 - products, outputs)
            return ExactSumError(f"gradient of {bias_name}", (token, row), None, bits)
        sample, place = divmod(code - 1, outputs * inputs)
        value = None if late else float(values.view(-1)[int(bad.argmin())])
        return no_sum((sample, *divmod(place, inputs), value), bits, name)

    report(bad.view(-1), None, error, partial(error, late=True))


def _shares(tiles: int, samples: int, x: torch.Tensor) -> int:
    """Programs for each of so many tiles of a weight gradient."""
    if not dispatch.has_int64_atomics(x):
        return 1
    return max(1, min(samples, triton.cdiv(len(x), TOKENS_OF_SHARE), MOST_SHARED // tiles))
