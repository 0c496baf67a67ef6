"""Instructions that a warp executes as one: shuffles, reductions, votes, matrices in shared memory."""
# mypy: ignore-errors

from __future__ import annotations

from tritonrec.kernels.caches import njit

from .. import layout
from .access import field, load2, load4, load8, store2, store4
from .memory import check_shared, note_shared

SHUFFLES = ("bfly", "up", "down", "idx")
BFLY, UP, DOWN, IDX = range(4)
REDUCTIONS = ("add", "min", "max", "and", "or", "xor")
ADD, MIN, MAX, AND, OR, XOR = range(6)
VOTES = ("ballot", "any", "all", "uni")
BALLOT, ANY, ALL, UNI = range(4)


@njit(cache=True)
def shuffle(warp, site, lanes, io, mode, out):
    """A lane's data: value, lane or distance, clamp and segment mask. Out: value, and if it is in range."""
    for lane in range(32):
        if not (lanes >> lane) & 1:
            continue
        data = io + layout.IO_DATA + 12 * lane
        value, b, c = load4(data), load4(data + 4) & 31, load4(data + 8)
        clamp, segment = c & 31, (c >> 8) & 31
        most = (lane & segment) | (clamp & ~segment & 31)
        if mode == BFLY:
            other = lane ^ b
            inside = other <= most
        elif mode == UP:
            other = lane - b
            inside = other >= most
        elif mode == DOWN:
            other = lane + b
            inside = other <= most
        else:
            other = (lane & segment) | (b & ~segment & 31)
            inside = other <= most
        if inside:
            value = load4(io + layout.IO_DATA + 12 * (other & 31))
        store4(io + out + 8 * lane, value)
        store4(io + out + 8 * lane + 4, inside)
    return 0


@njit(cache=True)
def reduce(warp, site, lanes, io, how, out):
    """`how`: which reduction, plus 8 for signed numbers. A lane's data: value and member mask."""
    operation, is_signed = how & 7, how & 8
    for lane in range(32):
        if not (lanes >> lane) & 1:
            continue
        members = load4(io + layout.IO_DATA + 8 * lane + 4)
        total, first = 0, True
        for other in range(32):
            if not (members >> other) & 1:
                continue
            value = load4(io + layout.IO_DATA + 8 * other)
            if is_signed:
                value = (value ^ (1 << 31)) - (1 << 31)
            if first:
                total, first = value, False
            elif operation == ADD:
                total += value
            elif operation == MIN:
                total = min(total, value)
            elif operation == MAX:
                total = max(total, value)
            elif operation == AND:
                total &= value
            elif operation == OR:
                total |= value
            else:
                total ^= value
        store4(io + out + 4 * lane, total)
    return 0


@njit(cache=True)
def vote(warp, site, lanes, io, how, out):
    """A lane's data: predicate and member mask."""
    for lane in range(32):
        if not (lanes >> lane) & 1:
            continue
        members = load4(io + layout.IO_DATA + 8 * lane + 4)
        ballot = 0
        for other in range(32):
            if (members >> other) & 1 and load4(io + layout.IO_DATA + 8 * other):
                ballot |= 1 << other
        if how == ANY:
            ballot = 1 if ballot else 0
        elif how == ALL:
            ballot = 1 if ballot == members else 0
        elif how == UNI:
            ballot = 1 if ballot == 0 or ballot == members else 0
        store4(io + out + 4 * lane, ballot)
    return 0


@njit(cache=True)
def check_rows(warp, site, io, number, write):
    """Check the rows of 8 x 8 matrices, of 16 bytes each, whose addresses the lanes hold; 0, or a fault."""
    launch = field(warp, layout.WARP_LAUNCH)
    for row in range(8 * number):
        at = load8(io + layout.IO_ADDRESS + 8 * row)
        if check_shared(warp, launch, site, row, at, 16):
            return 4
        if field(launch, layout.LAUNCH_CHECKS) and not write and note_shared(warp, site, row, at, 16, 0, 0):
            return 4
    return 0


@njit(cache=True)
def element(io, matrix, lane, half, transposed):
    """Byte of shared memory of one of the two elements that a lane has of a matrix."""
    row = 2 * (lane % 4) + half if transposed else lane // 4
    column = lane // 4 if transposed else 2 * (lane % 4) + half
    return load8(io + layout.IO_ADDRESS + 8 * (8 * matrix + row)) + 2 * column


@njit(cache=True)
def load_matrix(warp, site, lanes, io, how, out):
    """ldmatrix: `how` is the number of matrices, plus 8 for transposed ones."""
    number, transposed = how & 7, how & 8
    shared = field(field(warp, layout.WARP_BLOCK), layout.BLOCK_SHARED)
    if check_rows(warp, site, io, number, False):
        return 4
    for matrix in range(number):
        for lane in range(32):
            for half in range(2):
                at = element(io, matrix, lane, half, transposed)
                store2(io + out + 4 * (number * lane + matrix) + 2 * half, load2(shared + at))
    return 0


@njit(cache=True)
def store_matrix(warp, site, lanes, io, how, out):
    """stmatrix: as `load_matrix`, the other way."""
    number, transposed = how & 7, how & 8
    launch = field(warp, layout.WARP_LAUNCH)
    shared = field(field(warp, layout.WARP_BLOCK), layout.BLOCK_SHARED)
    if check_rows(warp, site, io, number, True):
        return 4
    for matrix in range(number):
        for lane in range(32):
            for half in range(2):
                at = element(io, matrix, lane, half, transposed)
                data = io + layout.IO_DATA + 4 * (number * lane + matrix) + 2 * half
                if field(launch, layout.LAUNCH_CHECKS) and note_shared(warp, site, lane, at, 2, data, 0):
                    return 4
                store2(shared + at, load2(data))
    return 0
