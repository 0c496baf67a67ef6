# mypy: ignore-errors
"""Exact sums of outer products in Triton, one float64 fused multiply-add for each product.

    accumulator[o, i] += sum over rows t of round(dy[t, o] * x[t, i] * 2**bits)

The arithmetic is that of `numba_row_products`, whose first lines explain it: a sum that begins at
1.5 * 2**52 units rounds what is added to it, and the last bit of x keeps ties from the parity of the sum.
A program owns a tile of the accumulator and walks a share of the rows; shares are added atomically.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from tritonrec.kernels import dispatch
from tritonrec.kernels.fixed_point.triton_fixed_point import (
    NONE,
    add_atomically,
    any_of,
    is_far,
    magnitude,
    rounder_of,
)
from tritonrec.kernels.linear.op import no_sum
from tritonrec.kernels.padding import report
from tritonrec.kernels.races import declared
from tritonrec.kernels.row_terms import add_rows
from tritonrec.kernels.triton_jit import jit_kernel

BLOCK, NUM_WARPS = 64, 8  # edge of a tile: 32 registers of float64 sums and as many of integers a thread
ROWS = 64  # whose sum stays below 2**51 units; see `room`
ROWS_OF_SHARE = 512  # which are worth an atomic addition
MOST_SHARED = 1024  # programs that share tiles: enough for the 132 processors of a H100 eight times
ROOM = 2.0**-12  # times the limit 2**(62 - bits): half of what ROWS products may add up to


@triton.jit
def load_row(row_ptr, stride, place, size):
    """Elements of a row of float32 or less, 0 from `size` on."""
    return tl.load(row_ptr + place * stride, mask=place < size, other=0.0)


@triton.jit
def add_products(total, dy, x):
    """``total + dy (O, 1) * x (1, I)``, each rounded to a unit of `total`, ties away from zero."""
    x = x.to(tl.float64)
    # zeros stay, whose products are zeros
    x = tl.where(x == 0.0, x, (x.to(tl.int64, bitcast=True) | 1).to(tl.float64, bitcast=True))
    left, right = tl.broadcast(dy.to(tl.float64)[:, None], x[None, :])
    return tl.fma(left, right, total)


@triton.jit
def round_away(values, scale):
    """float64 below 2**62 units to int64 units, half away from zero; `scale` is a power of two."""
    units = tl.floor(tl.abs(values) * scale + 0.5).to(tl.int64)
    return tl.where(values < 0.0, -units, units)


# which program sees a sum leave int64 depends on who comes first; without such a sum nothing varies
@declared(varies=("bad_ptr", "value_ptr"))
@jit_kernel
def add_row_products_kernel(
    accumulator_ptr, dy_ptr, x_ptr, bad_ptr, value_ptr, accumulator_row, accumulator_column, dy_row,
    dy_column, x_row, x_column, rows, rows_of_share, outputs, inputs, scale, limit, room,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """accumulator (O, I) += sum over rows of round(dy^T x * scale).

    SHARED: the programs along the third axis share the rows. Where the sum of a program's rows does not fit,
    its position is that of the first one behind all other positions.
    """
    lane = tl.arange(0, BLOCK).to(tl.int64)
    output = tl.program_id(0).to(tl.int64) * BLOCK + lane
    column = tl.program_id(1).to(tl.int64) * BLOCK + lane
    inside = (output < outputs)[:, None] & (column < inputs)[None, :]
    to = accumulator_ptr + output[:, None] * accumulator_row + column[None, :] * accumulator_column
    share = tl.program_id(2).to(tl.int64)
    begin = share * rows_of_share
    end = tl.minimum(begin + rows_of_share, rows)
    if SHARED:
        before = tl.zeros((BLOCK, BLOCK), tl.int64)
    else:
        before = tl.load(to, mask=inside, other=0)
    rounder = rounder_of(limit)
    zero = rounder.to(tl.int64, bitcast=True)
    sums = before
    loud = any_of(is_far(before)).to(tl.int32)
    for first in range(begin, end, ROWS):
        # Each block of ROWS rows begins again at 1.5 * 2**52 units; its sum is taken over to int64 below.
        total = tl.zeros((BLOCK, BLOCK), tl.float64) + rounder
        most_dy, most_x = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
        for row in range(first, tl.minimum(first + ROWS, end)):
            dy = load_row(dy_ptr + row * dy_row, dy_column, output, outputs)
            x = load_row(x_ptr + row * x_row, x_column, column, inputs)
            most_dy = tl.maximum(most_dy, magnitude(dy))
            most_x = tl.maximum(most_x, magnitude(x))
            total = add_products(total, dy, x)
        sums += total.to(tl.int64, bitcast=True) - zero
        of_dy = tl.max(most_dy, axis=0).to(tl.float32, bitcast=True).to(tl.float64)
        of_x = tl.max(most_x, axis=0).to(tl.float32, bitcast=True).to(tl.float64)
        # NaN is below nothing; infinity times 0 is NaN
        loud = loud | ((of_dy * of_x * ROWS <= room) == 0).to(tl.int32)
    worst = tl.full((), NONE, tl.int64)
    value = tl.full((), 0.0, tl.float64)
    if loud != 0:  # again, with checks
        sums = before
        for row in range(begin, end):
            dy = load_row(dy_ptr + row * dy_row, dy_column, output, outputs).to(tl.float64)
            x = load_row(x_ptr + row * x_row, x_column, column, inputs).to(tl.float64)
            product = dy[:, None] * x[None, :]  # exact
            fits = tl.abs(product) < limit  # false for NaN too
            term = round_away(tl.where(fits, product, 0.0), scale)
            after = sums + term
            # a wrapped sum has the sign that neither of its operands has
            fits = fits & (((sums ^ after) & (term ^ after)) >= 0)
            sums = after
            failed = inside & (fits == 0)
            # only the first failure counts: after a wrap a sum means nothing
            if (worst == NONE) & any_of(failed):
                place = output[:, None] * inputs + column[None, :]
                at = tl.min(tl.min(tl.where(failed, place, NONE), axis=1), axis=0)
                value = tl.sum(tl.sum(tl.where(place == at, product, 0.0), axis=1), axis=0)
                worst = row * outputs * inputs + at
    if SHARED:
        behind = tl.cast(rows, tl.int64) * outputs * inputs
        place = output[:, None] * inputs + column[None, :]
        wraps = add_atomically(to, sums, behind + begin * outputs * inputs + place, inside)
        worst = tl.minimum(worst, wraps)
    else:
        # loaded in one layout and stored in another: no thread may store before the others have loaded
        tl.debug_barrier()
        tl.store(to, sums, mask=inside)
    program = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2)
    program += share
    tl.store(bad_ptr + program, worst)
    tl.store(value_ptr + program, value)


def add_row_products(
    accumulator: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, bits: int, name: str,
    bias_accumulator: torch.Tensor | None, bias_name: str,
) -> None:  # fmt: skip
    """`tritonrec.kernels.linear.op.linear_weight_grad` without offsets; tensors of any strides."""
    (rows, outputs), inputs = dy.shape, x.shape[1]
    if rows and inputs and outputs:
        _add(accumulator, dy, x, bits, name)
    if bias_accumulator is not None:
        add_rows(bias_accumulator, dy, bits, bias_name, "triton")


def _add(accumulator: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, bits: int, name: str) -> None:
    (rows, outputs), inputs = dy.shape, x.shape[1]
    tiles = triton.cdiv(outputs, BLOCK), triton.cdiv(inputs, BLOCK)
    shares = 1
    if dispatch.has_int64_atomics(x):
        shares = max(1, min(triton.cdiv(rows, ROWS_OF_SHARE), MOST_SHARED // (tiles[0] * tiles[1])))
    programs = (*tiles, shares)
    bad = torch.empty(programs, dtype=torch.int64, device=accumulator.device)
    values = torch.empty(programs, dtype=torch.float64, device=accumulator.device)
    limit, of_share = 2.0 ** (62 - bits), triton.cdiv(rows, shares)
    room = limit * min(ROOM, 1 / triton.cdiv(of_share, ROWS))  # so that a share's sum is below 2**62, too
    add_row_products_kernel[programs](
        accumulator, dy, x, bad, values, *accumulator.stride(), *dy.stride(), *x.stride(), rows,
        of_share, outputs, inputs, 2.0**bits, limit, room, BLOCK=BLOCK, ROWS=ROWS, SHARED=shares > 1,
        num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    products = rows * outputs * inputs

    def error(code: int, late: bool = False) -> Exception:
        row, place = divmod((code - 1) % products, outputs * inputs)
        known = code <= products and not late  # else the sum of rows from this one on
        value = float(values.view(-1)[int(bad.argmin())]) if known else None
        return no_sum((row, *divmod(place, inputs), value), bits, name)

    report(bad.view(-1), None, error, partial(error, late=True))
