"""Segment sums in Triton: a stable sort groups the occurrences, one program walks one segment in order.

There are no atomics, so no result depends on the schedule: a float sum is the left fold in order of
occurrence that the CPU computes, and an int64 sum meets an overflow at the same occurrence. It also is what
Ascend needs, which has no int64 atomic add. A segment is walked by one program per block of columns, so one
very hot key bounds the time; programs stride over segments to stay below Ascend's 65,535 grid entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels import tuned
from tritonrec.kernels.fixed_point.triton_fixed_point import NONE, first_bad, round_to_fixed_point
from tritonrec.kernels.padding import padding

MOST_PROGRAMS = 65535


@triton.jit
def segment_sum_kernel(
    out_ptr,
    values_ptr,
    order_ptr,
    starts_ptr,
    bad_ptr,
    out_stride,
    value_stride,
    num_segments,
    dim,
    scale,
    limit,
    LEVEL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    column = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < dim
    bad = tl.full((BLOCK_D,), NONE, tl.int64)
    first = tl.program_id(0).to(tl.int64)  # an int64 bound makes the loop's variable int64
    for segment in range(first, num_segments, tl.num_programs(0)):
        to = out_ptr + segment * out_stride + column
        total = tl.load(to, mask=inside, other=0)
        for i in range(tl.load(starts_ptr + segment), tl.load(starts_ptr + segment + 1)):
            row = tl.load(order_ptr + i)
            value = tl.load(values_ptr + row * value_stride + column, mask=inside, other=0)
            if LEVEL == "window":
                total += value
            else:
                term = value
                fits = inside | True
                if LEVEL == "round":
                    term, fits = round_to_fixed_point(value, scale, limit)
                after = total + term
                fits = fits & (((total ^ after) & (term ^ after)) >= 0)
                bad = tl.minimum(bad, tl.where(fits, NONE, row * dim + column))
                total = after
        tl.store(to, total, mask=inside)
    if LEVEL != "window":
        tl.store(bad_ptr + first * tl.num_programs(1) + tl.program_id(1), tl.min(bad, axis=0))


def segment_sum(
    out: torch.Tensor, values: torch.Tensor, segments: torch.Tensor, bits: int, count: torch.Tensor | None
) -> torch.Tensor | None:
    """Add into `out`; () int64, 1 + row * D + column of the first value that cannot be added, or 0.

    None at consistency "window", where every value can be.
    """
    num_segments, dim = out.shape
    if count is not None:
        segments = torch.where(padding(segments.numel(), count), num_segments, segments)
    order, starts = by_segment(segments, num_segments)
    block = min(128, triton.next_power_of_2(dim))
    grid = (min(num_segments, MOST_PROGRAMS), triton.cdiv(dim, block))
    exact = out.dtype == torch.int64
    bad = torch.empty(grid[0] * grid[1] if exact else 1, dtype=torch.int64, device=out.device)
    if not exact:
        level = "window"
    elif values.dtype == torch.float32:
        level = "round"
    else:
        level = "terms"
    segment_sum_kernel[grid](
        out,
        values,
        order,
        starts,
        bad,
        out.stride(0),
        values.stride(0),
        num_segments,
        dim,
        2.0**bits,
        2.0 ** (62 - bits),
        LEVEL=level,
        BLOCK_D=block,
        **tuned.config("segment_sum", tuned.row_class(dim, most=128), out.device),
        enable_fp_fusion=False,
    )
    return first_bad(bad) if exact else None


def by_segment(segments: torch.Tensor, num_segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Occurrences in order of their segment, and (S + 1,) where the occurrences of each segment begin."""
    grouped, order = torch.sort(segments, stable=True)
    return order, torch.searchsorted(grouped, torch.arange(num_segments + 1, device=segments.device))
