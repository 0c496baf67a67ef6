# mypy: ignore-errors
"""Packed rows on the CPU: tests of bits and moves of byte planes, in loops over columns that vectorise.

A row goes through a buffer of two halves of 32 bits, so that a plane takes its bytes from lanes of 32 bits
and not of 64, and integers and floats share their planes. The request for the row ahead is written out, as in
`segment_sum`: as a function it cost 0 to 13 % of the time of packing and adding 262,144 rows of 64 columns,
and 21 to 32 % of that of 4,096; inlined by numba, 0 to 6 % and 16 to 22 % (one thread).
"""

import numpy as np
import torch

from tritonrec.kernels.fixed_point.numba_fixed_point import add_terms
from tritonrec.kernels.numba_intrinsics import prefetch
from tritonrec.kernels.packed_rows.op import report_packed_sum
from tritonrec.kernels.row_layout import contiguous_rows, flat_rows
from tritonrec.kernels.rows.numba_segment_sum import AHEAD

from ..caches import njit

FLOAT = np.uint8(0x84)
TOO_BIG, LEAST = np.uint8(0x5F), np.int32(-0x21000000)
"""The top byte of 2.0**63, from which on no size is one of int64; and the bits of -2.0**63, which is."""


def pack_rows(values: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.ops.pack_rows`."""
    widths = torch.zeros(len(rows), dtype=torch.uint8, device="cpu")
    if values.shape[1] == 0:
        return widths, widths[:0].clone()
    # As long as the rows could be at most: each is met once, and memory that nobody writes to costs nothing.
    packed = torch.empty(8 * len(rows) * values.shape[1], dtype=torch.uint8, device="cpu")
    lists = (rows.contiguous().numpy(), np.uintp(values.shape[1]), widths.numpy(), packed.numpy())
    packed.resize_(pack(*flat_rows(contiguous_rows(values)), *lists))
    return widths, packed


def add_packed_rows(out, segments, widths, packed, name, fraction_bits) -> None:
    """See `tritonrec.ops.add_packed_rows`."""
    dim, packed = out.shape[1], packed.contiguous()
    lists = (segments.contiguous().numpy(), widths.contiguous().numpy(), packed.numpy())
    bad = add(*flat_rows(out), *lists, np.uintp(dim))
    report_packed_sum(bad + 1, name, segments, widths, packed, dim, fraction_bits)


@njit(cache=True, nogil=True)
def width_of(values, first, dim):
    """Width of the row ``values[first : first + dim]``: 0 to 8 or FLOAT."""
    some, span, wide = np.int64(0), np.int64(0), np.uint64(0)
    for d in range(dim):
        x = values[first + d]
        sign = x >> 63
        some |= x
        span |= x ^ sign
        # of a magnitude, the bits more than 23 above its lowest one: none where float32 holds it
        size = np.uint64((x ^ sign) - sign)
        # size | -size has ones from its lowest set bit up: a
        # bit of size >> 24 among them is 24 places above it.
        wide |= (size >> np.uint64(24)) & (size | (~size + np.uint64(1)))
    if some == 0:
        return np.uint8(0)
    width = np.uint8(1)
    for plane in range(1, 8):
        # `plane` bytes hold a sign and 8 * plane - 1 bits.
        width += np.uint8(span >> (8 * plane - 1) != 0)
    return FLOAT if width > 4 and wide == 0 else width


@njit(cache=True, nogil=True)
def pack(values, stride, rows, dim, widths, packed):
    """Fill `widths`, and `packed` as far as the result says: the bytes of all rows."""
    low, high = np.empty(dim, np.int32), np.empty(dim, np.int32)
    floats = low.view(np.float32)
    place = np.uintp(0)
    count = rows.shape[0]
    for i in range(count):
        if i + AHEAD < count:
            ahead = np.uintp(rows[i + AHEAD]) * stride
            for d in range(np.uintp(0), dim, np.uintp(8)):
                prefetch(values, ahead + d)
        first = np.uintp(rows[i]) * stride
        width = width_of(values, first, dim)
        widths[i] = width
        if width == FLOAT:
            for d in range(dim):
                floats[d] = np.float32(values[first + d])
        else:
            for d in range(dim):
                # The low half of each int64; the high half is made
                # below, where a row needs more than four planes.
                low[d] = np.int32(values[first + d])
        planes = np.int64(width & 0x7F)
        for plane in range(min(planes, 4)):
            for d in range(dim):
                packed[place + d] = np.uint8(low[d] >> (8 * plane))
            place += dim
        if planes > 4:
            for d in range(dim):
                high[d] = np.int32(values[first + d] >> 32)
            for plane in range(planes - 4):
                for d in range(dim):
                    packed[place + d] = np.uint8(high[d] >> (8 * plane))
                place += dim
    return place


@njit(cache=True, nogil=True)
def join(packed, place, dim, planes, words):
    """Fill `words` (int32) from 1 to 4 planes, the last of which has the sign."""
    #     packed    | byte 0 of D elements | byte 1 | byte 2 | byte 3 |
    #               place                  one      two      three
    # The last plane is read as int8: its sign fills the bytes that were not sent.
    one, two, three = place + dim, place + np.uintp(2) * dim, place + np.uintp(3) * dim
    if planes == 4:
        for d in range(dim):
            words[d] = (
                np.int32(packed[place + d])
                | np.int32(packed[one + d]) << np.int32(8)
                | np.int32(packed[two + d]) << np.int32(16)
                | np.int32(packed[three + d]) << np.int32(24)
            )
    elif planes == 3:
        for d in range(dim):
            words[d] = (
                np.int32(packed[place + d])
                | np.int32(packed[one + d]) << np.int32(8)
                | np.int32(np.int8(packed[two + d])) << np.int32(16)
            )
    elif planes == 2:
        for d in range(dim):
            words[d] = np.int32(packed[place + d]) | np.int32(np.int8(packed[one + d])) << np.int32(8)
    else:
        for d in range(dim):
            words[d] = np.int32(np.int8(packed[place + d]))


@njit(cache=True, nogil=True)
def add(out, out_stride, segments, widths, packed, dim):
    """Position (row * dim + column) of the first element whose sum leaves int64, or -1."""
    count = segments.shape[0]
    terms = np.empty(dim, np.int64)
    low, high = np.empty(dim, np.int32), np.empty(dim, np.int32)
    floats = low.view(np.float32)
    place = np.uintp(0)
    for i in range(count):
        if i + AHEAD < count:
            ahead = np.uintp(segments[i + AHEAD]) * out_stride
            for d in range(np.uintp(0), dim, np.uintp(8)):
                prefetch(out, ahead + d)
        width = widths[i]
        planes = np.int64(width & 0x7F)
        if planes == 0:
            continue
        join(packed, place, dim, min(planes, 4), low)
        most = np.uint8(0)
        if width == FLOAT:
            for d in range(dim):
                terms[d] = np.int64(floats[d])
            for d in range(dim):
                # The top byte of a float32 without its sign: 7 of
                # 8 exponent bits, by which it passes 2**63 or not.
                most = max(most, np.uint8(packed[place + np.uintp(3) * dim + d] & np.uint8(0x7F)))
        elif planes <= 4:
            for d in range(dim):
                terms[d] = np.int64(low[d])
        else:
            join(packed, place + np.uintp(4) * dim, dim, planes - 4, high)
            for d in range(dim):
                terms[d] = (np.int64(high[d]) << 32) | np.int64(np.uint32(low[d]))
        column = add_terms(out, np.uintp(segments[i]) * out_stride, terms, np.uintp(0), dim)
        # The int64 of such a float is undefined; what was added is void, and the position is the error's.
        if most >= TOO_BIG:
            for d in range(dim):
                if packed[place + np.uintp(3) * dim + d] & np.uint8(0x7F) >= TOO_BIG and low[d] != LEAST:
                    column = d if column < 0 else min(column, d)
                    break
        if column >= 0:
            return np.int64(i) * np.int64(dim) + column
        place += np.uintp(planes) * dim
    return np.int64(-1)
