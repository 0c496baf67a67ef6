"""Segment sums in Triton: a stable sort groups the occurrences, one program walks one segment in order.

There are no atomics, so no result depends on the schedule: a float sum is the left fold in order of
occurrence that the CPU computes, and an int64 sum meets an overflow at the same occurrence. It also is what
Ascend needs, which has no int64 atomic add. A segment is walked by one program per block of columns, so one
very hot key bounds the time; programs stride over segments to stay below Ascend's 65,535 grid entries. The
only segment of an exact sum is added up in parts, by as many programs: integers have one sum in any grouping.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels.fixed_point.errors import late_error, report_sum
from tritonrec.kernels.fixed_point.triton_fixed_point import NONE, round_to_fixed_point
from tritonrec.kernels.padding import padding, report
from tritonrec.kernels.row_layout import contiguous_rows
from tritonrec.kernels.rows.reference import into_zeros
from tritonrec.kernels.triton_padding import num_valid

MOST_PROGRAMS = 65535
BLOCK_D, NUM_WARPS = 128, 1
PART = 128
"""Rows of one segment that a program adds up where it is the only segment: a bias's gradient has all tokens
in one. Their int64 sums are added up in the same way, so that 100,000 rows are three steps of 128."""


@triton.jit
def segment_sum_kernel(
    out_ptr,
    values_ptr,
    factors_ptr,
    order_ptr,
    starts_ptr,
    bad_ptr,
    out_stride,
    value_stride,
    num_segments,
    num_rows,
    count_ptr,
    part,
    row_scale,
    dim,
    scale,
    limit,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[segment] += values[order[i]] for i in [starts[segment], starts[segment + 1]), in order.

    Without `order` segments are parts of `part` rows, of `row_scale` occurrences each. With `factors` the
    value of occurrence i is factors[i] * values[i // GROUP], a product that is in no memory.
    """
    column = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < dim
    bad = tl.full((BLOCK_D,), NONE, tl.int64)
    first = tl.program_id(0).to(tl.int64)  # an int64 bound makes the loop's variable int64
    for segment in range(first, num_segments, tl.num_programs(0)):
        to = out_ptr + segment * out_stride + column
        # one program owns this row's columns, so a plain load and store accumulate into `out`
        total = tl.load(to, mask=inside, other=0)
        if order_ptr is None:
            begin = segment * part
            end = tl.minimum(begin + part, num_valid(num_rows, count_ptr))
        else:
            begin = tl.load(starts_ptr + segment)
            end = tl.load(starts_ptr + segment + 1)
        for i in range(begin, end):
            if order_ptr is None:
                row = i
            else:
                row = tl.load(order_ptr + i)
            # the sort is stable, so rows come in order of occurrence and the left fold is the CPU's
            if factors_ptr is None:
                value = tl.load(values_ptr + row * value_stride + column, mask=inside, other=0)
            else:
                value = tl.load(values_ptr + row // GROUP * value_stride + column, mask=inside, other=0.0)
                value = tl.load(factors_ptr + row) * value
            if ADD == "floats":
                total += value.to(tl.float32)
            else:
                term = value
                # True in the shape of the block: an int64 term always fits
                fits = inside | True
                if ADD == "rounded":
                    term, fits = round_to_fixed_point(value, scale, limit)
                # a wrapped sum has the sign that neither of its operands has
                after = total + term
                fits = fits & (((total ^ after) & (term ^ after)) >= 0)
                bad = tl.minimum(bad, tl.where(fits, NONE, row * row_scale * dim + column))
                # added all the same: the first bad position is what counts, and the caller discards the sum
                total = after
        # several threads may load one element where columns are few: none may load it changed
        tl.debug_barrier()
        tl.store(to, total, mask=inside)
    if ADD != "floats":
        tl.store(bad_ptr + first * tl.num_programs(1) + tl.program_id(1), tl.min(bad, axis=0))


def segment_sum_into(
    out: torch.Tensor,
    values: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    consistency: str,
    fraction_bits: int,
    name: str,
    count: torch.Tensor | None,
    status: torch.Tensor | None = None,
) -> None:
    """See `tritonrec.kernels.rows.segment_sum`, with `out`; a code is read back without `status`."""
    if values.numel() == 0 or out.numel() == 0:
        return
    bad = _add(out, contiguous_rows(values), None, segments, consistency, fraction_bits, count)
    if consistency == "batch":
        report_sum(bad, status, name, values, segments, fraction_bits)


def add_products(
    out: torch.Tensor, values: torch.Tensor, factors: torch.Tensor, segments: torch.Tensor, consistency: str,
    fraction_bits: int, name: str,
) -> None:  # fmt: skip
    """out[segments[i]] += factors[i] * values[i // G] for K = G n occurrences i, without the (K, D) products.

    `segment_sum_into` of the products, rounded to float32 each; values are (n, D) float32, factors (K,).
    """
    if factors.numel() == 0 or out.numel() == 0:
        return
    values, factors = contiguous_rows(values), factors.contiguous()
    bad = _add(out, values, factors, segments, consistency, fraction_bits, None)
    if consistency == "batch":
        error = late_error(name, out.shape[1], fraction_bits)  # the value is in no memory
        report(bad, None, error, error)


def _add(out, values, factors, segments, consistency, fraction_bits, count) -> torch.Tensor:
    """Add values, or products with `factors`, to their segments; the first bad position of each program."""
    num_segments = out.shape[0]
    if consistency != "batch":
        add = "floats"
    else:
        add = "terms" if values.dtype == torch.int64 else "rounded"
    fixed_point = 2.0**fraction_bits, 2.0 ** (62 - fraction_bits)
    if num_segments == 1:
        return _sum_all(out, values, factors, count, add, fixed_point)
    keys = segments
    if count is not None:
        # behind the last segment, so in no program's range; the host does not wait for the count
        keys = torch.where(padding(segments.numel(), count), num_segments, segments)
    order, starts = by_segment(keys, num_segments)
    return _launch(out, values, factors, order, starts, None, len(segments), 1, add, fixed_point)


def _sum_all(out, values, factors, count, add, fixed_point) -> torch.Tensor:
    """Add all rows to the only row of `out`: float32 in order, integers in parts; the bad positions.

    Where the sum of a part of the parts leaves int64, the position is that of its first row.
    """
    found, row_scale = [], 1
    rows = len(values) if factors is None else len(factors)
    while add != "floats" and rows > PART:
        parts = torch.zeros(triton.cdiv(rows, PART), out.shape[1], dtype=torch.int64, device=out.device)
        found.append(_launch(parts, values, factors, None, None, count, PART, row_scale, add, fixed_point))
        values, factors, count, add, row_scale = parts, None, None, "terms", row_scale * PART
        rows = len(parts)
    found.append(_launch(out, values, factors, None, None, count, rows, row_scale, add, fixed_point))
    return torch.cat(found) if len(found) > 1 else found[0]


def _launch(out, values, factors, order, starts, count, part, row_scale, add, fixed_point) -> torch.Tensor:
    """Add rows to `out`, by segment or by part; the first bad position of each program."""
    num_segments, dim = out.shape
    block = min(BLOCK_D, triton.next_power_of_2(dim))
    grid = (min(num_segments, MOST_PROGRAMS), triton.cdiv(dim, block))
    # float sums write no position, but a launch needs a tensor
    bad = torch.empty(1 if add == "floats" else grid[0] * grid[1], dtype=torch.int64, device=out.device)
    rows = len(values) if factors is None else len(factors)
    sizes = out.stride(0), values.stride(0), num_segments, rows
    segment_sum_kernel[grid](
        out, values, factors, order, starts, bad, *sizes, count, part, row_scale, dim, *fixed_point,
        GROUP=rows // len(values), ADD=add, BLOCK_D=block, num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return bad


segment_sum = into_zeros(segment_sum_into)


def by_segment(segments: torch.Tensor, num_segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Occurrences in order of their segment, and (S + 1,) where the occurrences of each segment begin."""
    grouped, order = torch.sort(segments, stable=True)
    return order, torch.searchsorted(grouped, torch.arange(num_segments + 1, device=segments.device))
