"""Loads, stores and asynchronous copies of a warp, in global and in shared memory.

A call gets (warp, site, lanes, io, a, b): the number of the instruction, a bit for each lane that takes part,
and a buffer with an address of each lane (`IO_ADDRESS`) and the lanes' data one after the other (`IO_DATA`).
It returns CONTINUE, PREEMPTED or FAULTED.
"""
# mypy: ignore-errors

from __future__ import annotations

from tritonrec.kernels.caches import njit

from .. import layout
from .access import (
    draw,
    fault,
    field,
    increase,
    load1,
    load2,
    load4,
    load8,
    put,
    spend,
    store1,
    store2,
    store4,
)
from .shadow import note_read, note_write


@njit(cache=True)
def copy_bytes(to, source, size):
    if size >= 4:
        for i in range(0, size, 4):
            store4(to + i, load4(source + i))
    elif size == 2:
        store2(to, load2(source))
    else:
        store1(to, load1(source))


@njit(cache=True)
def equal_bytes(one, other, size):
    if size >= 4:
        different = 0
        for i in range(0, size, 4):
            different |= load4(one + i) ^ load4(other + i)
        return different == 0
    if size == 2:
        return load2(one) == load2(other)
    return load1(one) == load1(other)


@njit(cache=True)
def range_of(launch, address, size):
    """The range of global memory around an access, or 0."""
    ranges = field(launch, layout.LAUNCH_RANGES)
    for i in range(field(launch, layout.LAUNCH_NUM_RANGES)):
        each = ranges + 8 * layout.RANGE_WORDS * i
        if address >= field(each, layout.RANGE_BEGIN) and address + size <= field(each, layout.RANGE_END):
            return each
    return 0


@njit(cache=True)
def note_global(warp, site, lane, address, size, at, value, flags):
    """Check an access inside the range `at`; `value` is the address of the bytes to be written, or 0."""
    if field(at, layout.RANGE_FLAGS) & layout.UNCHECKED:
        return 0
    block = field(warp, layout.WARP_BLOCK)
    number, epoch, own = (
        field(block, layout.BLOCK_LINEAR) + 1,
        field(block, layout.BLOCK_EPOCH),
        field(warp, layout.WARP_INDEX),
    )
    shift = field(at, layout.RANGE_SHIFT)
    step = 1 << shift
    cell = (
        field(at, layout.RANGE_SHADOW)
        + ((address - field(at, layout.RANGE_BEGIN)) >> shift) * layout.CELL_BYTES
    )
    done = 0
    while done < size:
        if value == 0:
            how = note_read(cell, number, epoch, own, False)
        else:
            part = min(step, size - done)
            changes = not equal_bytes(value + done, address + done, part)
            how = note_write(cell, number, epoch, own, changes, flags)
        if how:
            return fault(warp, layout.RACE, site, lane, address + done, size, cell, how)
        cell += layout.CELL_BYTES
        done += step
    return 0


@njit(cache=True)
def note_shared(warp, site, lane, at, size, value, flags):
    """Check an access of shared memory, as `note_global` does; `value` -1: bytes that a copy will bring."""
    block, launch = field(warp, layout.WARP_BLOCK), field(warp, layout.WARP_LAUNCH)
    epoch, own = field(block, layout.BLOCK_EPOCH), field(warp, layout.WARP_INDEX)
    first, shared = field(block, layout.BLOCK_FIRST_EPOCH), field(block, layout.BLOCK_SHARED)
    shift = field(launch, layout.LAUNCH_SHARED_SHIFT)
    step = 1 << shift
    cell = field(block, layout.BLOCK_SHADOW) + (at >> shift) * layout.CELL_BYTES
    for i in range(0, size, step):
        if value == 0:
            if load4(cell + layout.CELL_WRITER) == 0 or load4(cell + layout.CELL_WRITE_EPOCH) < first:
                return fault(warp, layout.UNINITIALISED, site, lane, at + i, size, 0, 0)
            how = note_read(cell, 1, epoch, own, False)
        else:
            changes = value < 0 or not equal_bytes(value + i, shared + at + i, step)
            how = note_write(cell, 1, epoch, own, changes, flags)
        if how:
            return fault(warp, layout.RACE, site, lane, at + i, size, cell, how)
        cell += layout.CELL_BYTES
    return 0


@njit(cache=True)
def check_shared(warp, launch, site, lane, at, size):
    """Whether a shared access has a good address; 0, or a fault."""
    if at % size:
        return fault(warp, layout.MISALIGNED, site, lane, at, size, 0, 1)
    if at < 0 or at + size > field(launch, layout.LAUNCH_SHARED_BYTES):
        return fault(warp, layout.OUTSIDE_SHARED, site, lane, at, size, 0, 0)
    return 0


@njit(cache=True)
def lane_order(launch):
    """(start, step): lanes in the order start, start + step, ... modulo 32; the hardware leaves it open."""
    number = draw(launch, layout.LAUNCH_RANDOM)
    return number & 31, ((number >> 5) & 31) | 1


@njit(cache=True)
def global_load(warp, site, lanes, io, size, _):
    launch = field(warp, layout.WARP_LAUNCH)
    checks = field(launch, layout.LAUNCH_CHECKS)
    poison = field(launch, layout.LAUNCH_POISON)
    at, begin, end, count = 0, 0, 0, 0
    for lane in range(32):
        if not (lanes >> lane) & 1:
            continue
        address = load8(io + layout.IO_ADDRESS + 8 * lane)
        if address % size:
            return fault(warp, layout.MISALIGNED, site, lane, address, size, 0, 0)
        if address < begin or address + size > end:
            at = range_of(launch, address, size)
            if at == 0:
                return fault(warp, layout.OUTSIDE, site, lane, address, size, 0, 0)
            begin, end = field(at, layout.RANGE_BEGIN), field(at, layout.RANGE_END)
        if checks and note_global(warp, site, lane, address, size, at, 0, 0):
            return 4
        if poison and size >= 2 and field(at, layout.RANGE_FLAGS) & layout.FRESH:
            # the poison is a word of 4 bytes, of which a value of 2 bytes is half
            for word in range(address & ~3, address + size, 4):
                if word >= begin and word + 4 <= end and load4(word) == layout.POISON:
                    return fault(warp, layout.UNINITIALISED, site, lane, max(word, address), size, 0, 1)
        copy_bytes(io + layout.IO_DATA + size * lane, address, size)
        count += size
    increase(launch, layout.LAUNCH_BYTES_READ, count)
    return spend(warp)


@njit(cache=True)
def global_store(warp, site, lanes, io, size, _):
    launch = field(warp, layout.WARP_LAUNCH)
    checks = field(launch, layout.LAUNCH_CHECKS)
    at, begin, end, count, changed = 0, 0, 0, 0, 0
    lane, step = lane_order(launch)
    for _turn in range(32):
        lane = (lane + step) & 31
        if not (lanes >> lane) & 1:
            continue
        address = load8(io + layout.IO_ADDRESS + 8 * lane)
        if address % size:
            return fault(warp, layout.MISALIGNED, site, lane, address, size, 0, 0)
        if address < begin or address + size > end:
            at = range_of(launch, address, size)
            if at == 0:
                return fault(warp, layout.OUTSIDE, site, lane, address, size, 0, 0)
            begin, end = field(at, layout.RANGE_BEGIN), field(at, layout.RANGE_END)
        data = io + layout.IO_DATA + size * lane
        if checks and note_global(warp, site, lane, address, size, at, data, 0):
            return 4
        if not equal_bytes(address, data, size):
            copy_bytes(address, data, size)
            changed = 1
        count += size
    increase(launch, layout.LAUNCH_BYTES_WRITTEN, count)
    increase(launch, layout.LAUNCH_PROGRESS, changed)
    return spend(warp)


@njit(cache=True)
def shared_load(warp, site, lanes, io, size, _):
    launch = field(warp, layout.WARP_LAUNCH)
    shared = field(field(warp, layout.WARP_BLOCK), layout.BLOCK_SHARED)
    checks = field(launch, layout.LAUNCH_CHECKS)
    for lane in range(32):
        if not (lanes >> lane) & 1:
            continue
        at = load8(io + layout.IO_ADDRESS + 8 * lane)
        if check_shared(warp, launch, site, lane, at, size):
            return 4
        if checks and note_shared(warp, site, lane, at, size, 0, 0):
            return 4
        copy_bytes(io + layout.IO_DATA + size * lane, shared + at, size)
    return spend(warp)


@njit(cache=True)
def shared_store(warp, site, lanes, io, size, _):
    launch = field(warp, layout.WARP_LAUNCH)
    shared = field(field(warp, layout.WARP_BLOCK), layout.BLOCK_SHARED)
    checks = field(launch, layout.LAUNCH_CHECKS)
    lane, step = lane_order(launch)
    for _turn in range(32):
        lane = (lane + step) & 31
        if not (lanes >> lane) & 1:
            continue
        at = load8(io + layout.IO_ADDRESS + 8 * lane)
        data = io + layout.IO_DATA + size * lane
        if check_shared(warp, launch, site, lane, at, size):
            return 4
        if checks and note_shared(warp, site, lane, at, size, data, 0):
            return 4
        copy_bytes(shared + at, data, size)
    return spend(warp)


@njit(cache=True)
def land(warp, copy, site, lane):
    """An asynchronous copy reaches shared memory."""
    launch, block = field(warp, layout.WARP_LAUNCH), field(warp, layout.WARP_BLOCK)
    to, source, size, given = field(copy, 0), field(copy, 1), field(copy, 2), field(copy, 3)
    if field(launch, layout.LAUNCH_CHECKS):
        if note_shared(warp, site, lane, to, size, -1, 0):
            return 4
        if given:
            at = range_of(launch, source, given)
            if note_global(warp, site, lane, source, given, at, 0, 0):
                return 4
    shared = field(block, layout.BLOCK_SHARED)
    if given:
        copy_bytes(shared + to, source, given)
    for i in range(given, size):
        store1(shared + to + i, 0)
    return 0


@njit(cache=True)
def copy_async(warp, site, lanes, io, size, _):
    """cp.async: from the global address to the shared one, at the latest at the wait for its group."""
    launch = field(warp, layout.WARP_LAUNCH)
    for lane in range(32):
        if not (lanes >> lane) & 1:
            continue
        source = load8(io + layout.IO_ADDRESS + 8 * lane)
        to, given = (
            load4(io + layout.IO_DATA + 8 * lane),
            min(size, load4(io + layout.IO_DATA + 8 * lane + 4)),
        )
        if check_shared(warp, launch, site, lane, to, size):
            return 4
        if given:
            if source % size:
                return fault(warp, layout.MISALIGNED, site, lane, source, size, 0, 0)
            if range_of(launch, source, given) == 0:
                return fault(warp, layout.OUTSIDE, site, lane, source, given, 0, 0)
        number = field(warp, layout.WARP_NUM_COPIES)
        if number == field(launch, layout.LAUNCH_MAX_COPIES):
            return fault(warp, layout.TOO_MANY, site, lane, to, size, 0, 0)
        if field(launch, layout.LAUNCH_CHECKS) and note_shared(warp, site, lane, to, size, -1, layout.ASYNC):
            return 4
        copy = field(warp, layout.WARP_COPIES) + 8 * layout.COPY_WORDS * number
        put(copy, 0, to)
        put(copy, 1, source)
        put(copy, 2, size)
        put(copy, 3, given)
        put(copy, 4, field(warp, layout.WARP_GROUP))
        put(warp, layout.WARP_NUM_COPIES, number + 1)
        if not field(launch, layout.LAUNCH_LATE_COPIES) and given:
            copy_bytes(field(field(warp, layout.WARP_BLOCK), layout.BLOCK_SHARED) + to, source, given)
        increase(launch, layout.LAUNCH_BYTES_READ, given)
    return spend(warp)


@njit(cache=True)
def commit_copies(warp, site, lanes, io, _a, _b):
    increase(warp, layout.WARP_GROUP, 1)
    return 0


@njit(cache=True)
def wait_copies(warp, site, lanes, io, pending, _):
    """Copies land but those of the last `pending` groups."""
    ready = field(warp, layout.WARP_GROUP) - pending
    kept, copies = 0, field(warp, layout.WARP_COPIES)
    for i in range(field(warp, layout.WARP_NUM_COPIES)):
        copy = copies + 8 * layout.COPY_WORDS * i
        if field(copy, 4) < ready:
            if land(warp, copy, site, 0):
                return 4
        else:
            for word in range(layout.COPY_WORDS):
                put(copies + 8 * layout.COPY_WORDS * kept, word, field(copy, word))
            kept += 1
    put(warp, layout.WARP_NUM_COPIES, kept)
    return 0
