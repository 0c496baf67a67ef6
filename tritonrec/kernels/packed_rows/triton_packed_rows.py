# mypy: ignore-errors
"""Packed rows in Triton: widths, then their running sum for the places of rows, then byte planes.

Adding walks pieces of segments as `segment_sum` does; without atomics its kernel adds the sums of parts.
Bytes are handled as int8, of which FLOAT is the only negative width.
"""

import torch
import triton
import triton.language as tl

from tritonrec.kernels.fixed_point.triton_fixed_point import NONE, add_atomically, any_of, is_far
from tritonrec.kernels.packed_rows.op import report_packed_sum
from tritonrec.kernels.races import declared
from tritonrec.kernels.row_layout import contiguous_rows
from tritonrec.kernels.rows import triton_segment_sum
from tritonrec.kernels.rows.triton_segment_sum import (
    MOST_PROGRAMS,
    add_parts,
    by_segment,
    new_parts,
    parts_of,
    piece_of,
    put_sum,
    sum_before,
)
from tritonrec.kernels.rows.triton_walks import sum_after
from tritonrec.kernels.triton_jit import jit_kernel

BLOCK_ROWS, BLOCK_DIM, NUM_WARPS = 4, 128, 8
# Four planes, and the byte's top bit as the mark of a float.
FLOAT = tl.constexpr(0x84)
# Terms of 7 bytes, or floats below 2**55, whose bits these are: 128 move a sum by no more than 2**62.
CALM_PLANES, CALM_SIZE = tl.constexpr(7), tl.constexpr((127 + 55) << 23)
# Bits of 2**63, from which on no size is one of int64, and of -2**63, which is in int64.
TOO_BIG, LEAST = tl.constexpr((127 + 63) << 23), tl.constexpr(-0x21000000)


@jit_kernel
def _widths_kernel(
    values_ptr, rows_ptr, widths_ptr, num_rows, dim, stride, BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """The fewest bytes that hold each element of a row, or FLOAT where float32 is shorter and exact."""
    sent = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = tl.load(rows_ptr + sent, mask=sent < num_rows, other=0)
    some = tl.full((BLOCK_ROWS, BLOCK_DIM), 0, tl.int64)
    span = some
    wide = some
    for first in range(tl.full((), 0, tl.int64), dim, BLOCK_DIM):
        column = first + tl.arange(0, BLOCK_DIM)
        inside = (sent < num_rows)[:, None] & (column < dim)[None, :]
        # 0 has no bits, so lanes outside widen no row
        x = tl.load(values_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0)
        # x ^ sign is x or -x - 1: as many bits as two's complement needs without its sign
        sign = x >> 63
        size = (x ^ sign) - sign
        some |= x
        span |= x ^ sign
        # of a magnitude, the bits more than 23 above its lowest one: none where float32 holds it
        # the mask takes off the sign of 2**63, the one magnitude that wraps
        # size | -size has ones from its lowest set bit up, size >> 24 has the bits 24 places down: where both
        # have one, two bits of the number are 24 places or more apart, which no 24-bit significand spans.
        wide |= ((size >> 24) & 0xFFFFFFFFFF) & (size | -size)
    # 0 bytes for a row of zeros, 1 for any other; more by the bits of the largest.
    width = (some != 0).to(tl.int32)
    for plane in tl.static_range(1, 8):
        # `plane` bytes hold a sign and 8 * plane - 1 bits, and a longer number takes one more
        width += ((span >> (8 * plane - 1)) != 0).to(tl.int32)
    width = tl.max(width, axis=1)
    exact = tl.max((wide != 0).to(tl.int32), axis=1) == 0
    # a float32 has 4 bytes, so it replaces only what is longer
    width = tl.where((width > 4) & exact, FLOAT, width)
    tl.store(widths_ptr + sent, width.to(tl.int8), mask=sent < num_rows)


@jit_kernel
def _pack_kernel(
    values_ptr, rows_ptr, widths_ptr, starts_ptr, packed_ptr, num_rows, dim, stride, BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Byte p of all columns of a row, then byte p + 1, from the row's start in `packed`."""
    sent = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    row = tl.load(rows_ptr + sent, mask=sent < num_rows, other=0)
    width = tl.load(widths_ptr + sent, mask=sent < num_rows, other=0)
    start = tl.load(starts_ptr + sent, mask=sent < num_rows, other=0)
    inside = (sent < num_rows)[:, None] & (column < dim)[None, :]
    x = tl.load(values_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0)
    # Exact for every element where the width is FLOAT; of other rows these bits are not taken.
    bits = x.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    # FLOAT is the one width with the top bit of its byte, so it reads as negative
    x = tl.where((width < 0)[:, None], bits, x)
    # The byte plane p of a row is at start + p * dim.
    planes = tl.where(inside, (width & 0x7F)[:, None], 0)
    place = packed_ptr + start[:, None] + column[None, :]
    # the lowest byte of all columns first, so that a plane's stores are consecutive
    for plane in tl.static_range(8):
        tl.store(place, (x >> (8 * plane)).to(tl.int8), mask=planes > plane)
        place += dim


@triton.jit
def _load_row(i, widths_ptr, places_ptr, packed_ptr, order_ptr, column, inside, dim, MOST: tl.constexpr):
    """(terms, row, planes, bits) of sorted row i; of more than MOST planes the terms are void.

    Bits are those of floats, and 0 of other terms.
    """
    row = tl.load(order_ptr + i)
    one = tl.load(widths_ptr + row).to(tl.int32)
    width = tl.where(inside, one, 0)
    planes = width & 0x7F
    place = packed_ptr + tl.load(places_ptr + row) + column
    bits = tl.full(column.shape, 0, tl.int64)
    for plane in tl.static_range(MOST):
        byte = tl.load(place, mask=planes > plane, other=0)
        # int8 extends its sign, which the mask takes off
        bits |= (byte.to(tl.int64) & 0xFF) << (8 * plane)
        place += dim
    # shifted up and down again, the sign of the last plane fills the bytes that were not sent
    # a row of zeros has no planes: the maximum keeps its shift below 64
    unused = (64 - 8 * tl.maximum(planes, 1)).to(tl.int64)
    float_bits = tl.where(width < 0, bits, 0).to(tl.int32)
    floats = float_bits.to(tl.float32, bitcast=True)
    term = tl.where(width < 0, floats.to(tl.int64), (bits << unused) >> unused)
    return term, row, one & 0x7F, float_bits


# which program sees a sum leave int64 depends on who comes first; without such a sum nothing varies
@declared(varies=("bad_ptr",))
@jit_kernel
def _add_kernel(
    out_ptr, parts_ptr, widths_ptr, places_ptr, packed_ptr, keys_ptr, order_ptr, starts_ptr, bad_ptr,
    out_stride, num_segments, num_parts, dim, ATOMIC: tl.constexpr, PART: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """out[segment] += the unpacked rows of pieces, as `segment_sum_kernel`; the first position that wraps.

    ATOMIC: the pieces of a segment of several are added atomically, and any may see their sum leave int64.
    """
    column = tl.program_id(1).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    inside = column < dim
    worst = tl.full((), NONE, tl.int64)
    first = tl.program_id(0).to(tl.int64)  # an int64 bound makes the loop's variable int64
    for piece in range(first, tl.cast(num_parts, tl.int64) + num_segments, tl.num_programs(0)):
        segment, begin, end, whole = piece_of(
            piece, num_parts, keys_ptr, starts_ptr, num_segments, 1, PART, UPPER=False
        )
        to = out_ptr + segment * out_stride + column
        mine = (piece >= num_parts) & (begin < end)
        if ATOMIC:
            mine = mine & whole
        total, owned = sum_before(to, mine, column, dim)
        # As in `segment_sum_kernel`: one unchecked walk, and a checked one where a total or a term was large.
        far = is_far(total)
        most = tl.zeros((BLOCK_DIM,), tl.int32)
        widest = tl.full((), 0, tl.int32)
        for i in range(begin, end):
            term, row, planes, bits = _load_row(
                i, widths_ptr, places_ptr, packed_ptr, order_ptr, column, inside, dim, CALM_PLANES
            )
            # without the sign, the order of the bits is that of the sizes
            most = tl.maximum(most, bits & 0x7FFFFFFF)
            widest = tl.maximum(widest, planes)
            total += term
        if any_of(far | (most >= CALM_SIZE)) | (widest > CALM_PLANES):
            total, owned = sum_before(to, mine, column, dim)
            bad = tl.full((BLOCK_DIM,), NONE, tl.int64)
            for i in range(begin, end):
                term, row, planes, bits = _load_row(
                    i, widths_ptr, places_ptr, packed_ptr, order_ptr, column, inside, dim, 8
                )
                # A float from 2**63 on is no int64: `pack_rows` writes
                # none, but bytes that came over a link may have it.
                fits = ((bits & 0x7FFFFFFF) < TOO_BIG) | (bits == LEAST)
                total, bad = sum_after(total, term, fits, bad, row * dim + column)
            worst = tl.minimum(worst, tl.min(bad, axis=0))
        put_sum(to, parts_ptr, total, owned, piece, num_parts, column, dim)
        if ATOMIC:  # noqa: SIM102 (known when Triton compiles, and the other one is not)
            if (begin < end) & (whole == 0):
                row = tl.load(order_ptr + begin)
                worst = tl.minimum(worst, add_atomically(to, total, row * dim + column, inside))
    tl.store(bad_ptr + first * tl.num_programs(1) + tl.program_id(1), worst)


def pack_rows(values: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.ops.pack_rows`; the number of bytes is read back."""
    dim, values, rows = values.shape[1], contiguous_rows(values), rows.contiguous()
    widths = torch.zeros(rows.numel(), dtype=torch.int8, device=values.device)
    if rows.numel() == 0 or dim == 0:
        return widths.view(torch.uint8), widths.new_empty(0, dtype=torch.uint8)
    block = min(BLOCK_DIM, triton.next_power_of_2(dim))
    config = {"BLOCK_ROWS": BLOCK_ROWS, "BLOCK_DIM": block, "num_warps": NUM_WARPS}
    grid = (triton.cdiv(rows.numel(), BLOCK_ROWS),)
    sizes = rows.numel(), dim, values.stride(0)
    _widths_kernel[grid](values, rows, widths, *sizes, **config)
    places, size = _places(widths, dim)
    packed = torch.empty(int(size), dtype=torch.int8, device=values.device)
    grid = (*grid, triton.cdiv(dim, block))
    _pack_kernel[grid](values, rows, widths, places, packed, *sizes, **config)
    return widths.view(torch.uint8), packed.view(torch.uint8)


def add_packed_rows(out, segments, widths, packed, name, fraction_bits) -> None:
    """See `tritonrec.ops.add_packed_rows`."""
    num_segments, dim = out.shape
    if packed.numel() == 0:
        return
    places, _ = _places(widths.contiguous().view(torch.int8), dim)
    grouped, num_parts = by_segment(segments, num_segments), parts_of(len(segments))
    parts = new_parts(out, num_parts)
    block = min(BLOCK_DIM, triton.next_power_of_2(dim))
    grid = (min(num_parts + num_segments, MOST_PROGRAMS), triton.cdiv(dim, block))
    bad = torch.empty(grid[0] * grid[1], dtype=torch.int64, device=out.device)
    _add_kernel[grid](
        out, parts, widths.contiguous().view(torch.int8), places, packed.contiguous().view(torch.int8),
        *grouped, bad, out.stride(0), num_segments, num_parts, dim, ATOMIC=num_parts > 0 and parts is None,
        PART=triton_segment_sum.PART, BLOCK_DIM=block, num_warps=1,
    )  # fmt: skip
    if parts is not None:
        bad = torch.cat([bad, *add_parts(out, parts, grouped)])
    report_packed_sum(bad, name, segments, widths, packed, dim, fraction_bits)


def _places(widths: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(K,) int64, where each row of `widths` begins, and () int64, the bytes of all."""
    sizes = (widths & 0x7F).long() * dim
    ends = torch.cumsum(sizes, 0)
    return ends - sizes, ends[-1]
