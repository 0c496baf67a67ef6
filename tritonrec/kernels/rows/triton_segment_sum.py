"""Segment sums in Triton: a stable sort groups the occurrences, and programs add up runs of them in order.

A float sum is the left fold in order of occurrence that the CPU computes: one program walks a whole segment,
and a very hot key bounds the time, since that order is part of the bits. Integers have one sum in any
grouping: where a device adds them atomically, none is sorted (`triton_unsorted_sum`). A device without
int64 atomics (Ascend) sorts for them too, and no program walks more than `PART` rows, whatever the keys.
With PART = 4::

    sorted keys   2 2 2 7 7 7 7 7 7 7 7 7 7 7 9
    parts         0       | 1     | 2     | 3       of PART rows each
    first rows    a a a b b b b             c       a program for each segment: its first PART rows
    the others                  d d d d e e e       a program for each part: what a segment has beyond them

A segment of at most PART rows is never cut: an overflow is met at the occurrence where the CPU meets it. The
sums of parts (here 0, 0, d and e) are written, sorted as their rows are, and the next launch adds them in the
same way, until there is one part; where they leave int64, the position is that of the first row of a part.

Programs stride over pieces to stay below Ascend's 65,535 grid entries. Where there is only one segment, as in
a bias's gradient, nothing is sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonrec.kernels import dispatch
from tritonrec.kernels.fixed_point.errors import late_error, report_sum
from tritonrec.kernels.fixed_point.triton_fixed_point import NONE, any_of, is_far, near
from tritonrec.kernels.padding import padding, report
from tritonrec.kernels.row_layout import contiguous_rows
from tritonrec.kernels.rows.triton_unsorted_sum import add_unsorted
from tritonrec.kernels.rows.triton_walks import add_rows, add_rows_checked, fold_rows
from tritonrec.kernels.triton_jit import jit_kernel
from tritonrec.kernels.triton_padding import num_valid

MOST_PROGRAMS = 65535
BLOCK_D, NUM_WARPS = 128, 1
PART = 128
"""Rows of a segment that a program of an exact sum adds up."""


class Grouped(NamedTuple):
    """Occurrences in order of their segment."""

    keys: torch.Tensor  # (K,) int64, sorted segments; behind the last one what is not added
    order: torch.Tensor  # (K,) int64, which occurrence each is
    starts: torch.Tensor  # (S + 1,) int64, where the occurrences of each segment begin


@triton.jit
def piece_of(
    piece, num_parts, keys_ptr, starts_ptr, num_segments, scale, PART: tl.constexpr, UPPER: tl.constexpr
):
    """(segment, begin, end, whole) of the rows of a piece; without any, `end` is at most `begin`.

    The first `num_parts` pieces are parts: what a segment has there beyond its first PART rows. At most one
    segment has any, and it has the part's first row too. The others are the first PART rows of each segment;
    `whole`: it has no more.

    UPPER: rows are sums of `scale` occurrences; there is one of the others for each row, and it has rows
    where its row is the first one of a segment.
    """
    beyond = piece < num_parts
    row = tl.where(beyond, piece * PART, piece - num_parts)
    if UPPER:
        segment = tl.load(keys_ptr + row * scale)
    else:
        segment = tl.where(beyond, tl.load(keys_ptr + row, mask=beyond, other=0), row)
    # padding is sorted behind the last segment
    start = tl.load(starts_ptr + segment, mask=segment < num_segments, other=0)
    stop = tl.load(starts_ptr + segment + 1, mask=segment < num_segments, other=0)
    if UPPER:
        # a part belongs to the segment of its first row; where that is the segment's first, its sum is 0
        # In units of `scale`, rounded up: the first sum whose first occurrence is in the segment.
        start = (start + scale - 1) // scale
        stop = (stop + scale - 1) // scale
    begin = tl.where(beyond, tl.maximum(row, start + PART), start)
    end = tl.minimum(stop, tl.where(beyond, row, start) + PART)
    if UPPER:
        # There is one of the other pieces for each row; only that of a segment's first row adds anything.
        end = tl.where(beyond | (start == row), end, begin)
    return segment, begin, end, (beyond == 0) & (stop <= start + PART)


@triton.jit
def sum_before(out_ptr, mine, column, dim):
    """(total, owned): the sum so far at the pointers `out_ptr` of a row, and which columns `mine` adds to."""
    # a block, since the interpreter takes a block and a scalar bool for integers
    owned = (column < dim) & (column * 0 < mine.to(tl.int64))
    # one program owns this row's columns, so a plain load and store accumulate into `out`
    return tl.load(out_ptr, mask=owned, other=0), owned


@triton.jit
def put_sum(out_ptr, parts_ptr, total, owned, piece, num_parts, column, dim):
    """Store a piece's sum; those of all pieces but a segment's first are written to `parts`, if given."""
    # several threads may load one element where columns are few: none may load it changed
    tl.debug_barrier()
    tl.store(out_ptr, total, mask=owned)
    if parts_ptr is not None:
        tl.store(
            parts_ptr + piece * dim + column, total, mask=(column < dim) & (column * 0 + piece < num_parts)
        )


@jit_kernel
def segment_sum_kernel(
    out_ptr, parts_ptr, values_ptr, source_ptr, factors_ptr, keys_ptr, order_ptr, starts_ptr, bad_ptr,
    out_stride, value_stride, num_segments, num_parts, num_others, num_rows, count_ptr, scale, dim, unit,
    limit, near, GROUP: tl.constexpr, ADD: tl.constexpr, PART: tl.constexpr, UPPER: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[segment] += values[order[i]] for the rows i of a piece (`piece_of`), in order.

    With `parts` the sums of all pieces but a segment's first are written there. Without `order` there is one
    segment, and a piece is a part or all rows. UPPER: row i is a sum of `scale` occurrences, from i * scale
    on. Floats are not cut: a piece is a segment. With `source` the value of occurrence i is
    values[source[i]]; with `factors` it is factors[i] * values[i // GROUP], a product that is in no memory.
    """
    column = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < dim
    worst = tl.full((), NONE, tl.int64)
    first = tl.program_id(0).to(tl.int64)  # an int64 bound makes the loop's variable int64
    for piece in range(first, tl.cast(num_parts, tl.int64) + num_others, tl.num_programs(0)):
        if order_ptr is None:
            segment = first * 0
            begin = piece * PART
            end = num_valid(num_rows, count_ptr)
            if parts_ptr is not None:
                end = tl.minimum(begin + PART, end)
        elif ADD == "floats":
            segment = piece
            begin = tl.load(starts_ptr + segment)
            end = tl.load(starts_ptr + segment + 1)
        else:
            segment, begin, end, _whole = piece_of(
                piece, num_parts, keys_ptr, starts_ptr, num_segments, scale, PART, UPPER
            )
        to = out_ptr + segment * out_stride + column
        mine = (piece >= num_parts) & (begin < end)
        total, owned = sum_before(to, mine, column, dim)
        if ADD == "floats":
            # the sort is stable, so rows come in order of occurrence and the left fold is the CPU's
            total = fold_rows(
                total, begin, end, values_ptr, source_ptr, factors_ptr, order_ptr, value_stride, scale,
                column, inside, GROUP, UPPER,
            )  # fmt: skip
        else:
            # The walk is not checked. It cannot leave int64 from
            # a total within 2**62 by 128 terms below 2**55.
            far = is_far(total)
            total, loud = add_rows(
                total, begin, end, values_ptr, source_ptr, factors_ptr, order_ptr, value_stride, scale,
                column, inside, limit, near, ADD, GROUP, UPPER,
            )  # fmt: skip
            if any_of(far | loud):
                total, owned = sum_before(to, mine, column, dim)
                total, bad = add_rows_checked(
                    total, begin, end, values_ptr, source_ptr, factors_ptr, order_ptr, value_stride, scale,
                    column, inside, unit, limit, dim, ADD, GROUP, UPPER,
                )  # fmt: skip
                worst = tl.minimum(worst, bad)
        put_sum(to, parts_ptr, total, owned, piece, num_parts, column, dim)
    if ADD != "floats":
        tl.store(bad_ptr + first * tl.num_programs(1) + tl.program_id(1), worst)


def segment_sum_into(
    out, values, segments, num_segments, consistency, fraction_bits, name, count, source, status=None
) -> None:
    """See `tritonrec.ops.segment_sum`, with `out`; a code is read back without `status`."""
    if values.numel() == 0 or out.numel() == 0 or segments.numel() == 0:
        return
    source = None if source is None else source.contiguous()
    bad = _add(out, contiguous_rows(values), source, None, segments, consistency, fraction_bits, count)
    if consistency == "batch":
        report_sum(bad, status, name, values, segments, fraction_bits, source)


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
    bad = _add(out, values, None, factors, segments, consistency, fraction_bits, None)
    if consistency == "batch":
        error = late_error(name, out.shape[1], fraction_bits)  # the value is in no memory
        report(bad, None, error, error)


def _add(out, values, source, factors, segments, consistency, fraction_bits, count) -> torch.Tensor:
    """Add values, those of `source`, or products with `factors`; the first bad position of each program."""
    num_segments = out.shape[0]
    if consistency != "batch":
        add = "floats"
    else:
        add = "terms" if values.dtype == torch.int64 else "rounded"
    few = num_segments == 1 and len(segments) <= PART  # a piece, which needs one launch
    if add != "floats" and dispatch.has_int64_atomics(out) and not few:
        return add_unsorted(out, values, source, factors, segments.contiguous(), fraction_bits, count)
    # (unit of the rounding, limit of a value, bound below which PART values need no check)
    fixed_point = 2.0**fraction_bits, 2.0 ** (62 - fraction_bits), near(fraction_bits, PART)
    # A single segment needs no sort: its rows are in order as they are.
    grouped, keys = None, segments
    if num_segments > 1:
        if count is not None:
            # behind the last segment, so in no program's range; the host does not wait for the count
            keys = torch.where(padding(segments.numel(), count), num_segments, segments)
        grouped, count = by_segment(keys, num_segments), None
    num_parts = parts_of(len(segments)) if add != "floats" else 0
    parts = new_parts(out, num_parts)
    options = num_parts, grouped, len(segments), count, 1, add, fixed_point
    bad = _launch(out, parts, values, source, factors, *options)
    return bad if parts is None else torch.cat([bad, *add_parts(out, parts, grouped)])


def parts_of(rows: int) -> int:
    """Parts of so many rows; 0 where no segment can have more than one."""
    return triton.cdiv(rows, PART) if rows > PART else 0


def new_parts(out: torch.Tensor, num_parts: int) -> torch.Tensor | None:
    """(parts, D) int64 for their sums, unwritten; None where there are none, or atomics take their place."""
    if not num_parts or dispatch.has_int64_atomics(out):
        return None
    return torch.empty(num_parts, out.shape[1], dtype=torch.int64, device=out.device)


def add_parts(out: torch.Tensor, parts: torch.Tensor, grouped: Grouped | None) -> list[torch.Tensor]:
    """Add the sums of parts to their segments; the first bad positions of each launch's programs.

    Args:
        grouped: the occurrences, sorted; None where there is only one segment.
    """
    found, scale = [], 1
    sums: torch.Tensor | None = parts
    while sums is not None:
        # K rows, then K / 128 sums, then K / 128**2, ...: each launch adds the sums of parts that the one
        # before has written, and writes those of its own parts, until all rows of a segment are in one piece.
        values, scale = sums, scale * PART
        num_parts = parts_of(len(values))
        sums = new_parts(out, num_parts)
        options = num_parts, grouped, len(values), None, scale, "terms", (1.0, 1.0, 1.0)
        found.append(_launch(out, sums, values, None, None, *options))
    return found


def _launch(
    out, parts, values, source, factors, num_parts, grouped, rows, count, scale, add, fixed_point
) -> torch.Tensor:
    """Add rows to `out`; what is beyond the first ones of a segment to `parts`, if given; bad positions."""
    num_segments, dim = out.shape
    if grouped is None:
        others = 0 if num_parts else 1
    else:
        # The first PART rows of each segment; of sums one for
        # each row, since no list of their segments is made.
        others = num_segments if scale == 1 else rows
    block = min(BLOCK_D, triton.next_power_of_2(dim))
    grid = (min(num_parts + others, MOST_PROGRAMS), triton.cdiv(dim, block))
    # float sums write no position, but a launch needs a tensor
    bad = torch.empty(1 if add == "floats" else grid[0] * grid[1], dtype=torch.int64, device=out.device)
    # The kernel is compiled anew for None: its branches are gone then.
    keys, order, starts = (None, None, None) if grouped is None else grouped
    sizes = out.stride(0), values.stride(0), num_segments, num_parts, others, rows
    segment_sum_kernel[grid](
        out, parts, values, source, factors, keys, order, starts, bad, *sizes, count, scale, dim,
        *fixed_point, GROUP=1 if factors is None else rows // len(values), ADD=add,
        PART=PART, UPPER=scale > 1, BLOCK_D=block, num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return bad


def by_segment(segments: torch.Tensor, num_segments: int) -> Grouped:
    """The occurrences sorted by segment, equal ones in their order."""
    # Stable: float sums are left folds in order of occurrence.
    keys, order = torch.sort(segments, stable=True)
    return Grouped(
        keys, order, torch.searchsorted(keys, torch.arange(num_segments + 1, device=segments.device))
    )
