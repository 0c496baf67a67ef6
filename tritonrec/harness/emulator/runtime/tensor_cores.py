"""Products of matrices: mma.sync of a warp, wgmma of four warps.

Products of bfloat16, float16 or TF32 are exact in float32. Their sum is taken in float64 and rounded once;
the hardware adds in an order and with a width of its own. TF32 is a float32 whose lowest 13 bits are ignored.
"""
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from tritonrec.kernels.caches import njit

from .. import layout
from .access import bits_of, field, float_of, load2, load4, load8, store4
from .memory import check_shared, note_shared

BFLOAT16, FLOAT16, TF32 = range(3)
KINDS = ("bf16", "f16", "tf32")
TERMS = {"bf16": "k16", "f16": "k16", "tf32": "k8"}
"""Of one instruction's sum: 32 bytes of a row."""


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
def tf32(word):
    """A TF32 as float64."""
    return np.float64(float_of(word & 0xFFFFE000))


@njit(cache=True)
def half_at(io, stride, lane, register, k):
    return load2(io + layout.IO_DATA + stride * lane + 4 * register + 2 * (k & 1))


@njit(cache=True)
def multiply(warp, site, lanes, io, kind, out):
    """mma.m16n8k16, or m16n8k8 of TF32, with float32 sums. A lane's data: A (4 registers), B (2), C (4)."""
    stride = 40
    terms = 8 if kind == TF32 else 16
    a, b = np.empty((16, terms)), np.empty((terms, 8))
    if kind == TF32:
        data = io + layout.IO_DATA
        for k in range(8):
            for row in range(16):
                register = (row >> 3) + 2 * (k >> 2)
                a[row, k] = tf32(load4(data + stride * ((row & 7) * 4 + (k & 3)) + 4 * register))
            for column in range(8):
                b[k, column] = tf32(load4(data + stride * (column * 4 + (k & 3)) + 16 + 4 * (k >> 2)))
        return add_products(io, a, b, out)
    for row in range(16):
        for k in range(16):
            lane = (row & 7) * 4 + ((k & 7) >> 1)
            a[row, k] = widened(half_at(io, stride, lane, (row >> 3) + 2 * (k >> 3), k), kind)
    for column in range(8):
        for k in range(16):
            lane = column * 4 + ((k & 7) >> 1)
            b[k, column] = widened(half_at(io, stride, lane, 4 + (k >> 3), k), kind)
    return add_products(io, a, b, out)


@njit(cache=True)
def add_products(io, a, b, out):
    """C + A B of a warp, each element rounded once."""
    stride = 40
    for lane in range(32):
        for i in range(4):
            row, column = (lane >> 2) + 8 * (i >> 1), 2 * (lane & 3) + (i & 1)
            total = np.float64(float_of(load4(io + layout.IO_DATA + stride * lane + 24 + 4 * i)))
            for k in range(a.shape[1]):
                total += a[row, k] * b[k, column]
            store4(io + out + 16 * lane + 4 * i, bits_of(np.float32(total)))
    return 0


@njit(cache=True)
def place_in_shared(descriptor, outer, k, transposed, size):
    """Byte of element (outer, k) of a matrix of elements of `size` bytes that a wgmma descriptor describes.

    PTX ISA, "Shared memory matrix layout": start, leading and stride offsets in units of 16 bytes, and a
    swizzle of 128, 64, 32 or 16 bytes in the two highest bits.
    """
    start = (descriptor & 0x3FFF) << 4
    leading, stride = ((descriptor >> 16) & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
    mode = (descriptor >> 62) & 3
    pitch = 128 if mode == 1 else 64 if mode == 2 else 32 if mode == 3 else 16
    per = pitch // size
    if transposed:
        at = start + (outer // per) * leading + (k // 8) * stride + (k % 8) * pitch + (outer % per) * size
    else:
        at = start + (outer // 8) * stride + (outer % 8) * pitch + k * size
    bits = 7 if mode == 1 else 3 if mode == 2 else 1 if mode == 3 else 0
    return at ^ (((at >> 7) & bits) << 4)


@njit(cache=True)
def shared_element(warp, site, lane, at, kind):
    """(value, fault) of an element of shared memory."""
    launch = field(warp, layout.WARP_LAUNCH)
    size = 4 if kind == TF32 else 2
    if check_shared(warp, launch, site, lane, at, size):
        return 0.0, 4
    if field(launch, layout.LAUNCH_CHECKS) and note_shared(warp, site, lane, at, size, 0, 0):
        return 0.0, 4
    place = field(field(warp, layout.WARP_BLOCK), layout.BLOCK_SHARED) + at
    if kind == TF32:
        return tf32(load4(place)), 0
    return widened(load2(place), kind), 0


@njit(cache=True)
def multiply_group(warp, site, lanes, io, how, out):
    """wgmma.m64nNk16, or m64nNk8 of TF32, with float32 sums, the 16 rows of this warp.

    `how`: N, plus kind << 12, A in registers << 14, A transposed << 15, B transposed << 16, signs of A and B
    << 17 and << 18. A lane's data: whether D counts, descriptors of A and B, A's registers (4), D (N / 2).
    """
    columns, kind, in_registers = how & 0xFFF, (how >> 12) & 3, (how >> 14) & 1
    turn_a, turn_b = (how >> 15) & 1, (how >> 16) & 1
    sign = -1.0 if ((how >> 17) ^ (how >> 18)) & 1 else 1.0
    stride = 4 + 8 + 8 + 16 + 2 * columns
    terms, size = (8, 4) if kind == TF32 else (16, 2)
    first = 16 * (field(warp, layout.WARP_INDEX) & 3)
    keep = load4(io + layout.IO_DATA) != 0
    of_a, of_b = load8(io + layout.IO_DATA + 4), load8(io + layout.IO_DATA + 12)
    a, b = np.empty((16, terms)), np.empty((terms, columns))
    for row in range(16):
        for k in range(terms):
            if in_registers:
                # a register has 4 bytes of a row, four lanes have 16
                byte = k * size
                lane = (row & 7) * 4 + ((byte & 15) >> 2)
                register = (row >> 3) + 2 * (byte >> 4)
                at = io + layout.IO_DATA + stride * lane + 20 + 4 * register + (byte & 3)
                a[row, k] = tf32(load4(at)) if kind == TF32 else widened(load2(at), kind)
            else:
                at = place_in_shared(of_a, first + row, k, turn_a, size)
                a[row, k], wrong = shared_element(warp, site, 0, at, kind)
                if wrong:
                    return 4
    for column in range(columns):
        for k in range(terms):
            at = place_in_shared(of_b, column, k, turn_b, size)
            value, wrong = shared_element(warp, site, 0, at, kind)
            if wrong:
                return 4
            b[k, column] = sign * value
    for lane in range(32):
        for i in range(columns // 2):
            row, column = (lane >> 2) + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)
            total = 0.0
            if keep:
                total = np.float64(float_of(load4(io + layout.IO_DATA + stride * lane + 36 + 4 * i)))
            for k in range(terms):
                total += a[row, k] * b[k, column]
            store4(io + out + 2 * columns * lane + 4 * i, bits_of(np.float32(total)))
    return 0
