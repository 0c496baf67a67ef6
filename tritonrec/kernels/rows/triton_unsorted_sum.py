# mypy: ignore-errors
"""Exact segment sums without a sort: integers have one sum in any order, so each row goes where it belongs.

Two kernels add and look, and a third one has work only where something may not have fitted. It looks itself
where there is little to see::

    add        out[segment] += terms, atomically and unchecked; of a block of rows those of the key that it
               has most often are added up first, so a hot key is not one queue of all its rows
    look       is a sum that was added to beyond 2**62 now?
    resolve    if a bound on all |terms| passes 2**61, or such a sum was seen: takes all terms off again and
               adds them one after another, with checks, as the CPU does

int64 wraps, so what was added can be taken off, whatever it was. Where the terms of a call are 2**61 together
at most, and each sum ends within 2**62, no sum left int64 on its way, in any order of the rows: what is
missing to its end, or was missing before, is too little. So the sums are right, and the third kernel reads
the bounds and ends. Otherwise it finds the position that the CPU finds; one program walks all rows of its
columns, which takes as long as it takes: gradients near the end of fixed point are an error, as a rule.

A device that adds no int64 atomically sorts (`triton_segment_sum`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels.fixed_point.triton_fixed_point import (
    NEAR_BITS,
    NONE,
    add_near,
    any_of,
    is_far,
    magnitude,
    round_to_fixed_point,
    without_zeros,
)
from tritonrec.kernels.rows.triton_walks import load_row, sum_after
from tritonrec.kernels.triton_jit import jit_kernel
from tritonrec.kernels.triton_padding import num_valid

MOST_PROGRAMS = 65535
ROWS, BLOCK_D, NUM_WARPS = 16, 64, 1
FLAGS = 1024
"""Bounds that `resolve_kernel` reads at once."""
LOOKED = 128
"""Sums that it looks at itself, at most: one program takes the blocks of its columns one after another."""
TOO_MUCH = tl.constexpr(1 << 29)
"""2**61 in the units of bounds, 2**32, which are integers: a sum of these has one order."""


@triton.jit
def terms_of(value, unit, limit, near, ADD: tl.constexpr):
    """(terms, bound): int64 of a block of rows, and a bound on the size of each, in units of 2**32."""
    if ADD == "rounded":
        terms = without_zeros(add_near(tl.full(value.shape, 0, tl.int64), value, limit), 1, limit)
        most = tl.max(tl.max(magnitude(value), axis=1), axis=0)
        size = most.to(tl.float32, bitcast=True) * unit
        if most >= magnitude(near):
            terms, fits = round_to_fixed_point(value, unit, limit)
            if any_of(any_of_rows(fits == 0)):
                size = tl.full((), float("inf"), tl.float32)
    else:
        terms = value
        size = tl.max(tl.max(tl.abs(terms.to(tl.float32)), axis=1), axis=0)
    return terms, (tl.minimum(size, 4611686018427387904.0) * 2.3283064365386963e-10).to(tl.int64) + 1


@triton.jit
def bound_of_sums(out_ptr, row, valid, column, dim, out_stride):
    """Too much where a sum of these rows is outside of [-2**62, 2**62), else 0."""
    to = out_ptr + (row * out_stride)[:, None] + column[None, :]
    sums = tl.load(to, mask=valid[:, None] & (column < dim)[None, :], other=0)
    return any_of(any_of_rows(is_far(sums))).to(tl.int64) * TOO_MUCH


@triton.jit
def any_of_rows(flags):
    """Of (rows, columns) whether a row has one."""
    return tl.max(flags.to(tl.int32), axis=1) != 0


@jit_kernel
def add_kernel(
    out_ptr, values_ptr, source_ptr, factors_ptr, segments_ptr, bounds_ptr, out_stride, value_stride,
    num_rows, count_ptr, dim, unit, limit, near, GROUP: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[segments[i]] += the term of occurrence i, and each program's bound on the sum of its |terms|."""
    column = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = num_valid(num_rows, count_ptr)
    first = tl.program_id(0).to(tl.int64)  # an int64 bound makes the loop's variable int64
    bounds = first * 0
    for block in range(first, (tl.cast(num_rows, tl.int64) - 1) // ROWS + 1, tl.num_programs(0)):
        i = block * ROWS + tl.arange(0, ROWS)
        valid = i < end
        inside = valid[:, None] & (column < dim)[None, :]
        segment = tl.load(segments_ptr + i, mask=valid, other=-1)
        row = i
        if source_ptr is not None:
            row = tl.load(source_ptr + i, mask=valid, other=0)
        # 0 is the identity of the sum
        value = tl.load(
            values_ptr + (row // GROUP * value_stride)[:, None] + column[None, :], mask=inside, other=0
        )
        if factors_ptr is not None:
            value = tl.load(factors_ptr + row, mask=valid, other=0.0)[:, None] * value
        terms, bound = terms_of(value, unit, limit, near, ADD)
        bounds += bound * ROWS
        apart = inside
        often = tl.sum(((segment[:, None] == segment[None, :]) & valid[None, :]).to(tl.int32), axis=1)
        most = tl.max(tl.where(valid, often, 0), axis=0)
        if most > 1:
            # the last one, where two keys are as frequent
            hot = tl.max(tl.where(often == most, segment, -1), axis=0)
            together = tl.sum(tl.where((segment == hot)[:, None], terms, 0), axis=0)
            # relaxed: only later kernels read the sums
            tl.atomic_add(out_ptr + hot * out_stride + column, together, mask=column < dim, sem="relaxed")
            apart = inside & (segment != hot)[:, None]
        to = out_ptr + (segment * out_stride)[:, None] + column[None, :]
        # relaxed: only later kernels read the sums
        tl.atomic_add(to, terms, mask=apart, sem="relaxed")
    tl.store(bounds_ptr + first * tl.num_programs(1) + tl.program_id(1), bounds)


@jit_kernel
def look_kernel(
    out_ptr, segments_ptr, bounds_ptr, out_stride, num_rows, count_ptr, dim, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each program's `bound_of_sums`, of the rows of `out`, or of `segments`, if these are fewer."""
    column = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = num_valid(num_rows, count_ptr)
    first = tl.program_id(0).to(tl.int64)  # an int64 bound makes the loop's variable int64
    bounds = first * 0
    for block in range(first, (tl.cast(num_rows, tl.int64) - 1) // ROWS + 1, tl.num_programs(0)):
        row = block * ROWS + tl.arange(0, ROWS)
        valid = row < end
        if segments_ptr is not None:
            row = tl.load(segments_ptr + row, mask=valid, other=0)
        bounds = tl.maximum(bounds, bound_of_sums(out_ptr, row, valid, column, dim, out_stride))
    tl.store(bounds_ptr + first * tl.num_programs(1) + tl.program_id(1), bounds)


@jit_kernel
def resolve_kernel(
    out_ptr, values_ptr, source_ptr, factors_ptr, segments_ptr, bounds_ptr, bad_ptr, num_bounds, out_stride,
    value_stride, num_rows, count_ptr, dim, unit, limit, num_looked, GROUP: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Each program's first position that has no term or leaves int64, or NONE; at once where none can be.

    It looks at the first `num_looked` rows of `out`.
    """
    column = tl.program_id(0).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < dim
    end = num_valid(num_rows, count_ptr)
    some = tl.arange(0, FLAGS)
    zero = tl.full((), 0, tl.int64)  # an int64 bound makes a loop's variable int64
    together = tl.zeros((FLAGS,), tl.int64)
    for at in range(zero, num_bounds, FLAGS):
        together += tl.load(bounds_ptr + at + some, mask=at + some < num_bounds, other=0)
    bound = tl.sum(together, axis=0)
    for at in range(zero, num_looked, ROWS):
        row = at + tl.arange(0, ROWS)
        bound += bound_of_sums(out_ptr, row, row < num_looked, column, dim, out_stride)
    bad = tl.full((BLOCK_D,), NONE, tl.int64)
    if bound >= TOO_MUCH:
        # one turn takes the terms off, the other adds them
        for turn in range(2):
            for i in range(zero, end):
                value, _occurrence = load_row(
                    i, values_ptr, source_ptr, factors_ptr, None, value_stride, 1, column, inside, GROUP,
                    UPPER=False,
                )  # fmt: skip
                term, fits = value, inside | True
                if ADD == "rounded":
                    term, fits = round_to_fixed_point(value, unit, limit)
                to = out_ptr + tl.load(segments_ptr + i) * out_stride + column
                before = tl.load(to, mask=inside, other=0)
                after, worse = sum_after(before, term, fits, bad, i * dim + column)
                bad = tl.where(turn == 1, worse, bad)
                # several threads may load one element where columns are few: none may load it changed
                tl.debug_barrier()
                tl.store(to, tl.where(turn == 1, after, before - term), mask=inside)
                tl.debug_barrier()
    tl.store(bad_ptr + tl.program_id(0), tl.min(bad, axis=0))


def add_unsorted(out, values, source, factors, segments, fraction_bits, count) -> torch.Tensor:
    """out[segments[i]] += terms, as `triton_segment_sum` adds them; the first bad positions (n,) int64."""
    num_rows, dim = len(segments), out.shape[1]
    block = min(BLOCK_D, max(16, triton.next_power_of_2(dim)))
    columns = triton.cdiv(dim, block)
    by_key = len(out) > num_rows
    looked = num_rows if by_key else len(out)
    apart = by_key or looked > LOOKED
    grids = [(min(triton.cdiv(rows, ROWS), MOST_PROGRAMS), columns) for rows in (num_rows, looked)]
    sizes = [grid[0] * columns for grid in grids[: 1 + apart]]
    bounds = torch.empty(sum(sizes), dtype=torch.int64, device=out.device)
    bad = torch.empty(columns, dtype=torch.int64, device=out.device)
    unit, limit, near = 2.0**fraction_bits, 2.0 ** (62 - fraction_bits), 2.0 ** (NEAR_BITS - fraction_bits)
    rows = out, values, source, factors, segments
    strides = out.stride(0), values.stride(0)
    terms = {
        "GROUP": 1 if factors is None else num_rows // len(values),
        "ADD": "terms" if values.dtype == torch.int64 else "rounded", "enable_fp_fusion": False,
    }  # fmt: skip
    add_kernel[grids[0]](
        *rows, bounds, *strides, num_rows, count, dim, unit, limit, near, ROWS=ROWS, BLOCK_D=block,
        num_warps=NUM_WARPS, **terms,
    )  # fmt: skip
    if apart:
        look_kernel[grids[1]](
            out, segments if by_key else None, bounds[sizes[0] :], strides[0], looked,
            count if by_key else None, dim, ROWS=ROWS, BLOCK_D=block, num_warps=NUM_WARPS,
        )  # fmt: skip
    resolve_kernel[(columns,)](
        *rows, bounds, bad, len(bounds), *strides, num_rows, count, dim, unit, limit, 0 if apart else looked,
        ROWS=ROWS, BLOCK_D=block, FLAGS=FLAGS, num_warps=1, **terms,
    )  # fmt: skip
    return bad
