# mypy: ignore-errors
"""Batch-invariant products in Triton: tiles of one fixed shape, no split of a sum, no atomics.

    L tokens, B samples, I inputs, O outputs

A tile of the output is one program, which adds its products in ascending blocks of the inner dimension into
one float32 accumulator. More rows mean more programs, never another tile, so a row's bits do not depend on
how many there are. (A BLAS chooses a tile, or splits the inner sum, by the number of rows.)

The weight gradient has one program per tile of the weight. It walks the samples: a float32 product of each,
rounded once, and an int64 sum that stays in registers.
"""

from __future__ import annotations

import os
from functools import partial

import torch
import triton
import triton.language as tl

from tritonrec.kernels import dispatch
from tritonrec.kernels.fixed_point.triton_fixed_point import NONE, round_to_fixed_point
from tritonrec.kernels.linear.reference import no_sum
from tritonrec.kernels.padding import report

MOST_PROGRAMS = 65535  # a launch may have no more along an axis
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def multiply_add(a, b, total, INTERPRETED: tl.constexpr):
    """``total + a @ b`` with float32 accumulator whose bits do not depend on the place in the tile.

    The interpreter's `tl.dot` is the host's BLAS, in which they do (and it takes bfloat16 for integers).
    """
    if INTERPRETED:
        return total + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def rows_times_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, x_row, x_column, weight_row, weight_column, tokens, inner, columns,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out (L, O) = x (L, I) @ weight (I, O) + bias (O,)."""
    lane = tl.arange(0, BLOCK).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + lane
    first = tl.program_id(0).to(tl.int64)  # an int64 bound makes the loop's variable int64
    # a grid is bounded, so programs stride over tiles; a tile's bits do not depend on its program
    # not tl.cdiv, which adds before it divides: that sum may pass 2**31
    for tile in range(first, (tokens - 1) // BLOCK + 1, tl.num_programs(0)):
        row = tile * BLOCK + lane
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for start in range(tl.full((), 0, tl.int64), inner, BLOCK):
            term = start + lane
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
            total = multiply_add(x, weight, total, INTERPRETED)
        if bias_ptr is not None:
            # last, where the CPU begins with it: the bits of the two differ anyway, by the order of the sums
            total += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out_ptr + row[:, None] * columns + column[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=(row < tokens)[:, None] & (column < columns)[None, :],
        )


@triton.jit
def add_weight_gradients_kernel(
    accumulator_ptr, dy_ptr, x_ptr, offsets_ptr, bad_ptr, value_ptr, accumulator_row, accumulator_column,
    dy_row, dy_column, x_row, x_column, samples, outputs, inputs, scale, limit,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """accumulator (O, I) += sum over samples of round(dy^T x * scale), in int64."""
    lane = tl.arange(0, BLOCK).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK + lane
    column = tl.program_id(1).to(tl.int64) * BLOCK + lane
    inside = (row < outputs)[:, None] & (column < inputs)[None, :]
    place = row[:, None] * inputs + column[None, :]
    to = accumulator_ptr + row[:, None] * accumulator_row + column[None, :] * accumulator_column
    total = tl.load(to, mask=inside, other=0)
    bad = tl.full((BLOCK, BLOCK), NONE, tl.int64)
    culprit = tl.zeros((BLOCK, BLOCK), tl.float32)
    # an int64 start, since sample * outputs * inputs may pass 2**31
    for sample in range(tl.full((), 0, tl.int64), samples):
        start = tl.load(offsets_ptr + sample).to(tl.int64)
        stop = tl.load(offsets_ptr + sample + 1).to(tl.int64)
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        for block in range(start, stop, BLOCK):
            token = block + lane
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
            product = multiply_add(dy, x, product, INTERPRETED)
        term, fits = round_to_fixed_point(product, scale, limit)
        after = total + term
        # a wrapped sum has the sign that neither of its operands has
        fits = fits & (((total ^ after) & (term ^ after)) >= 0)
        # only an element's first failure counts: after a wrap its sum means nothing
        failed = inside & (fits == 0) & (bad == NONE)
        bad = tl.where(failed, sample * outputs * inputs + place, bad)
        culprit = tl.where(failed, product, culprit)
        total = after
    # loaded in one layout and stored in another: no thread may store before the others have loaded
    tl.debug_barrier()
    tl.store(to, total, mask=inside)
    worst = tl.min(tl.min(bad, axis=1), axis=0)
    # positions differ, so the sum has one culprit; without a failure all culprits are 0
    value = tl.sum(tl.sum(tl.where(bad == worst, culprit, 0.0), axis=1), axis=0)
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(bad_ptr + program, worst)
    tl.store(value_ptr + program, value)


def configuration(x: torch.Tensor) -> dict[str, int]:
    """BLOCK, edge of every tile and terms of a partial sum, and warps: by dtype, never by tokens.

    Hopper and later have matrix instructions for tiles of 64 rows, which bfloat16 can use.
    """
    if x.dtype == torch.bfloat16 and dispatch.capability(x) >= (9, 0):
        return {"BLOCK": 64, "num_warps": 8}
    return {"BLOCK": 32, "num_warps": 4}


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, _seq_offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """See `tritonrec.kernels.linear.op.linear`; x, weight and bias with any strides."""
    (tokens, inner), columns = x.shape, weight.shape[0]
    out = x.new_empty(tokens, columns)
    if out.numel() == 0:
        return out
    config = configuration(x)
    block = config["BLOCK"]
    grid = (min(triton.cdiv(tokens, block), MOST_PROGRAMS), triton.cdiv(columns, block))
    rows_times_kernel[grid](
        x, weight, None if bias is None else bias.contiguous(), out, *x.stride(), *weight.t().stride(),
        tokens, inner, columns, **config, INTERPRETED=INTERPRETED, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def linear_weight_grad(
    accumulator: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
    bits: int,
    name: str,
) -> None:
    """See `tritonrec.kernels.linear.op.linear_weight_grad`."""
    if accumulator.numel() == 0 or x.shape[0] == 0:
        return
    outputs, inputs = accumulator.shape
    config = configuration(x)
    programs = triton.cdiv(outputs, config["BLOCK"]), triton.cdiv(inputs, config["BLOCK"])
    bad = torch.empty(programs, dtype=torch.int64, device=accumulator.device)
    values = torch.empty(programs, dtype=torch.float32, device=accumulator.device)
    add_weight_gradients_kernel[programs](
        accumulator, dy, x, seq_offsets.contiguous(), bad, values,
        *accumulator.stride(), *dy.stride(), *x.stride(), len(seq_offsets) - 1, outputs, inputs,
        2.0**bits, 2.0 ** (62 - bits), **config, INTERPRETED=INTERPRETED, enable_fp_fusion=False,
    )  # fmt: skip

    def error(code: int, late: bool = False) -> Exception:
        sample, place = divmod(code - 1, outputs * inputs)
        value = None if late else float(values.view(-1)[int(bad.argmin())])
        return no_sum((sample, *divmod(place, inputs), value), bits, name)

    report(bad.view(-1), None, error, partial(error, late=True))
