"""Atomics in global and shared memory, the lanes of a warp one after the other in a drawn order."""
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from tritonrec.kernels.caches import njit

from .. import layout
from .access import (
    bits_of,
    bits_of_double,
    double_of,
    fault,
    field,
    float_of,
    increase,
    load4,
    load8,
    spend,
    store4,
    store8,
)
from .memory import check_shared, lane_order, note_global, note_shared, range_of

OPERATIONS = ("add", "min", "max", "exch", "cas", "and", "or", "xor", "inc", "dec")
ADD, MIN, MAX, EXCH, CAS, AND, OR, XOR, INC, DEC = range(10)
KINDS = ("u", "s", "f", "b")
UNSIGNED, SIGNED, FLOAT, PLAIN = range(4)
LOWEST = np.int64(-(2**63))


def code(operation: str, kind: str, size: int, count: int, shared: bool) -> int:
    """The argument `a` of `atomic`."""
    return OPERATIONS.index(operation) | KINDS.index(kind) << 4 | size << 8 | count << 16 | int(shared) << 24


@njit(cache=True)
def signed(value, size):
    return (value ^ (1 << 31)) - (1 << 31) if size == 4 else value


@njit(cache=True)
def less(one, other, kind, size):
    if kind == SIGNED:
        return signed(one, size) < signed(other, size)
    return one < other if size == 4 else (one ^ LOWEST) < (other ^ LOWEST)


@njit(cache=True)
def combined(operation, kind, size, old, value, compared):
    """What memory holds after the atomic."""
    if kind == FLOAT:
        if size == 8:
            return bits_of_double(double_of(old) + double_of(value))
        return bits_of(np.float32(float_of(old) + float_of(value)))
    if operation == ADD:
        return old + value
    if operation == MIN:
        return value if less(value, old, kind, size) else old
    if operation == MAX:
        return value if less(old, value, kind, size) else old
    if operation == EXCH:
        return value
    if operation == CAS:
        return value if old == compared else old
    if operation == AND:
        return old & value
    if operation == OR:
        return old | value
    if operation == XOR:
        return old ^ value
    if operation == INC:
        return old + 1 if less(old, value, UNSIGNED, size) else 0
    return value if old == 0 or less(value, old, UNSIGNED, size) else old - 1


@njit(cache=True)
def atomic(warp, site, lanes, io, how, out):
    """`how` is of `code`. A lane's data: operands, of CAS the value compared first; old values at `out`."""
    launch = field(warp, layout.WARP_LAUNCH)
    checks = field(launch, layout.LAUNCH_CHECKS)
    operation, kind, size = how & 15, (how >> 4) & 15, (how >> 8) & 255
    count, in_shared = (how >> 16) & 255, (how >> 24) & 1
    stride = size * (2 if operation == CAS else count)
    base = field(field(warp, layout.WARP_BLOCK), layout.BLOCK_SHARED) if in_shared else 0
    new, changed, used = io + 8, 0, 0
    lane, step = lane_order(launch)
    for _turn in range(32):
        lane = (lane + step) & 31
        if not (lanes >> lane) & 1:
            continue
        at = load8(io + layout.IO_ADDRESS + 8 * lane)
        place = 0
        if in_shared:
            if check_shared(warp, launch, site, lane, at, size):
                return 4
        else:
            if at % (size * count):
                return fault(warp, layout.MISALIGNED, site, lane, at, size * count, 0, 0)
            place = range_of(launch, at, size * count)
            if place == 0:
                return fault(warp, layout.OUTSIDE, site, lane, at, size * count, 0, 0)
        for each in range(count):
            address = base + at + size * each
            data = io + layout.IO_DATA + stride * lane + size * each
            old = load4(address) if size == 4 else load8(address)
            first = load4(data) if size == 4 else load8(data)
            value = first
            if operation == CAS:
                value = load4(data + size) if size == 4 else load8(data + size)
            result = combined(operation, kind, size, old, value, first)
            store8(new, result)
            if checks:
                if in_shared:
                    if note_shared(warp, site, lane, at + size * each, size, new, layout.ATOMIC):
                        return 4
                elif note_global(warp, site, lane, at + size * each, size, place, new, layout.ATOMIC):
                    return 4
            if size == 4:
                store4(address, result)
                changed |= load4(new) != old
            else:
                store8(address, result)
                changed |= result != old
            if out:
                if size == 4:
                    store4(io + out + size * lane, old)
                else:
                    store8(io + out + size * lane, old)
            used += size
    if not in_shared:
        increase(launch, layout.LAUNCH_BYTES_READ, used)
        increase(launch, layout.LAUNCH_BYTES_WRITTEN, used)
    increase(launch, layout.LAUNCH_PROGRESS, changed)
    return spend(warp)
