"""Products of matrices: mma.sync of a warp, wgmma of four warps.

Products of bfloat16 or float16 are exact in float32. Their sum is taken in float64 and rounded once; the
hardware adds in an order and with a width of its own.
"""
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from tritonrec.kernels.caches import njit

from .. import layout
from .access import bits_of, field, float_of, load2, load4, load8, store4
from .memory import check_shared, note_shared

BFLOAT16, FLOAT16 = range(2)
KINDS = ("bf16", "f16")


@njit(cache=True)
def widened(half, kind):
    """A bfloat16 or float16 as float64."""
    if kind == BFLOAT16:
        return np.float64(float_of(half << 16))
    exponent, digits = (half >> 10) & 31, half & 1023
    sign = -1.0 if half & 0x8000 else 1.0
    if exponent == 0:
        return sign * digits * 2.0**-24
    if exponent == 31:
        return np.float64(float_of((half & 0x8000) << 16 | 0x7F800000 | digits << 13))
    return np.float64(float_of((half & 0x8000) << 16 | (exponent + 112) << 23 | digits << 13))


@njit(cache=True)
def half_at(io, stride, lane, register, k):
    return load2(io + layout.IO_DATA + stride * lane + 4 * register + 2 * (k & 1))


@njit(cache=True)
def multiply(warp, site, lanes, io, kind, out):
    """mma.m16n8k16 with float32 sums. A lane's data: A (4 registers), B (2), C (4)."""
    stride = 40
    a, b = np.empty((16, 16)), np.empty((16, 8))
    for row in range(16):
        for k in range(16):
            lane = (row & 7) * 4 + ((k & 7) >> 1)
            a[row, k] = widened(half_at(io, stride, lane, (row >> 3) + 2 * (k >> 3), k), kind)
    for column in range(8):
        for k in range(16):
            lane = column * 4 + ((k & 7) >> 1)
            b[k, column] = widened(half_at(io, stride, lane, 4 + (k >> 3), k), kind)
    for lane in range(32):
        for i in range(4):
            row, column = (lane >> 2) + 8 * (i >> 1), 2 * (lane & 3) + (i & 1)
            total = np.float64(float_of(load4(io + layout.IO_DATA + stride * lane + 24 + 4 * i)))
            for k in range(16):
                total += a[row, k] * b[k, column]
            store4(io + out + 16 * lane + 4 * i, bits_of(np.float32(total)))
    return 0


@njit(cache=True)
def place_in_shared(descriptor, outer, k, transposed):
    """Byte of element (outer, k) of a matrix of 2-byte elements that a wgmma descriptor describes.

    PTX ISA, "Shared memory matrix layout": start, leading and stride offsets in units of 16 bytes, and a
    swizzle of 128, 64, 32 or 16 bytes in the two highest bits.
    """
    start = (descriptor & 0x3FFF) << 4
    leading, stride = ((descriptor >> 16) & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
    mode = (descriptor >> 62) & 3
    pitch = 128 if mode == 1 else 64 if mode == 2 else 32 if mode == 3 else 16
    per = pitch // 2
    if transposed:
        at = start + (outer // per) * leading + (k // 8) * stride + (k % 8) * pitch + (outer % per) * 2
    else:
        at = start + (outer // 8) * stride + (outer % 8) * pitch + k * 2
    bits = 7 if mode == 1 else 3 if mode == 2 else 1 if mode == 3 else 0
    return at ^ (((at >> 7) & bits) << 4)


@njit(cache=True)
def shared_half(warp, site, lane, at):
    """(value, fault) of 2 bytes of shared memory."""
    launch = field(warp, layout.WARP_LAUNCH)
    if check_shared(warp, launch, site, lane, at, 2):
        return 0, 4
    if field(launch, layout.LAUNCH_CHECKS) and note_shared(warp, site, lane, at, 2, 0, 0):
        return 0, 4
    return load2(field(field(warp, layout.WARP_BLOCK), layout.BLOCK_SHARED) + at), 0


@njit(cache=True)
def multiply_group(warp, site, lanes, io, how, out):
    """wgmma.m64nNk16 with float32 sums, the 16 rows of this warp.

    `how`: N, plus kind << 12, A in registers << 14, A transposed << 15, B transposed << 16, signs of A and B
    << 17 and << 18. A lane's data: whether D counts, descriptors of A and B, A's registers (4), D (N / 2).
    """
    columns, kind, in_registers = how & 0xFFF, (how >> 12) & 3, (how >> 14) & 1
    turn_a, turn_b = (how >> 15) & 1, (how >> 16) & 1
    sign = -1.0 if ((how >> 17) ^ (how >> 18)) & 1 else 1.0
    stride = 4 + 8 + 8 + 16 + 2 * columns
    first = 16 * (field(warp, layout.WARP_INDEX) & 3)
    keep = load4(io + layout.IO_DATA) != 0
    of_a, of_b = load8(io + layout.IO_DATA + 4), load8(io + layout.IO_DATA + 12)
    a, b = np.empty((16, 16)), np.empty((16, columns))
    for row in range(16):
        for k in range(16):
            if in_registers:
                lane = (row & 7) * 4 + ((k & 7) >> 1)
                at = io + layout.IO_DATA + stride * lane + 20 + 4 * ((row >> 3) + 2 * (k >> 3)) + 2 * (k & 1)
                a[row, k] = widened(load2(at), kind)
            else:
                value, wrong = shared_half(warp, site, 0, place_in_shared(of_a, first + row, k, turn_a))
                if wrong:
                    return 4
                a[row, k] = widened(value, kind)
    for column in range(columns):
        for k in range(16):
            value, wrong = shared_half(warp, site, 0, place_in_shared(of_b, column, k, turn_b))
            if wrong:
                return 4
            b[k, column] = sign * widened(value, kind)
    for lane in range(32):
        for i in range(columns // 2):
            row, column = (lane >> 2) + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)
            total = 0.0
            if keep:
                total = np.float64(float_of(load4(io + layout.IO_DATA + stride * lane + 36 + 4 * i)))
            for k in range(16):
                total += a[row, k] * b[k, column]
            store4(io + out + 2 * columns * lane + 4 * i, bits_of(np.float32(total)))
    return 0
