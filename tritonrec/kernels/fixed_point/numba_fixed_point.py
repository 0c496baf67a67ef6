# mypy: ignore-errors
"""Rounding to fixed point on the CPU.

`x * 2**bits` is exact in float64 (24 significant bits, exponents far from the ends), so `rint`, which rounds
half to even, is the only rounding. But its result has to become an integer, and before AVX-512 no x86 has a
vector instruction for that. Values below ``2**(51 - bits)`` are rounded by a sum instead: the last place of
float64 numbers from ``2**(52 - bits)`` on is ``2**-bits``, so ``x + 1.5 * 2**(52 - bits)`` is rounded there,
half to even, and its bits less those of the constant are the integer.
"""

import numpy as np
import torch

from tritonrec.kernels.fixed_point.errors import report_value

from ..caches import njit
from ..numba_intrinsics import bits_of

# All constants are multiples of ``limit = 2**(62 - bits)``, a power of two, so products with them are exact.
#     a float64         sign | exponent           | fraction, 52 bits
#     rounder           0    | of 2**(52 - bits)  | 1000...000               1.5 = 1 + a half
#     rounder + x       0    | the same           | 1000...000 + round(x * 2**bits)
# The half in front leaves room for a negative x: |x| < 2**(51 - bits) borrows from it and no further.
NEAR = np.float32(2.0**-11)
"""Times the limit ``2**(62 - bits)`` of terms: below it a sum rounds them."""
ROUNDER = 1.5 * 2.0**-10
"""Times the limit: what is added to them."""
CALM = 1024
"""Terms below NEAR, 2**51 each, whose sum moves a total by no more than 2**61."""
ROOM = np.int64(2**61)
HALF = np.int64(2**62)
"""A total between -HALF and HALF stays positive with HALF added; any other one may have left int64."""
FRACTION = np.int64(52)
"""Bits of a float64's fraction."""


def to_fixed_point(values, fraction_bits, name, status=None) -> torch.Tensor:
    """See `tritonrec.ops.to_fixed_point`."""
    values = values.detach().contiguous()
    terms = torch.empty(values.shape, dtype=torch.int64, device="cpu")
    bad = _round(
        values.view(-1).numpy(),
        2.0**fraction_bits,
        np.float32(2.0 ** (62 - fraction_bits)),
        terms.view(-1).numpy(),
    )
    report_value(bad + 1, status, name, values, fraction_bits)
    return terms


def from_fixed_point(sums: torch.Tensor, divisor: float, fraction_bits: int) -> torch.Tensor:
    """See `tritonrec.ops.from_fixed_point`."""
    values = torch.empty(sums.shape, dtype=torch.float32, device="cpu")
    _scale(sums.contiguous().view(-1).numpy(), 2.0**-fraction_bits, float(divisor), values.view(-1).numpy())
    return values


@njit(cache=True, nogil=True)
def _round(values, scale, limit, terms):
    """Position of the first value that is not below `limit` in magnitude, or -1."""
    # Unsigned positions: numba would add a branch for negative ones, which wrap in Python.
    count = np.uintp(values.shape[0])
    if is_near(values, np.uintp(0), count, limit * NEAR):
        rounder = np.float64(limit) * ROUNDER
        zero = bits_of(rounder)
        for i in range(count):
            terms[i] = bits_of(np.float64(values[i]) + rounder) - zero
        return -1
    # A sum of flags instead of an early exit: the loop is a vector loop, and what is outside is rare.
    outside = 0
    for i in range(values.shape[0]):
        outside += not (abs(values[i]) < limit)
    if outside:
        for i in range(values.shape[0]):
            if not (abs(values[i]) < limit):
                return i
    for i in range(values.shape[0]):
        terms[i] = np.int64(np.rint(np.float64(values[i]) * scale))
    return -1


@njit(cache=True, nogil=True, error_model="numpy")
def _scale(sums, unit, divisor, values):
    for i in range(sums.shape[0]):
        values[i] = np.float32(np.float64(sums[i]) * unit / divisor)


@njit(cache=True, nogil=True)
def is_near(values, first, count, near):
    """Whether ``values[first : first + count]`` are below `near` in magnitude."""
    inside = True
    for d in range(count):
        inside = inside & (abs(values[first + d]) < near)
    return inside


@njit(cache=True, nogil=True)
def is_calm(total, start, count):
    """Whether ``total[start : start + count]`` stay in int64 whatever `CALM` terms are added to each."""
    outside = 0
    for d in range(count):
        outside += not (-ROOM < total[start + d] < ROOM)
    return outside == 0


@njit(cache=True, nogil=True)
def are_rounded(differences):
    """Whether sums with the constant are its neighbours: their bits differ from its in the fraction alone.

    `differences` are those bits, of all sums together. A value that is not a number differs in more, too.
    """
    return (differences >> FRACTION) == 0


@njit(cache=True, nogil=True)
def _take_back(total, start, values, first, count, limit):
    """Undo an addition that turned out not to be one of rounded values: subtract the same bits."""
    rounder = np.float64(limit) * ROUNDER
    zero = bits_of(rounder)
    # Modulo 2**64 a sum is taken back exactly, whatever it has become.
    for d in range(count):
        total[start + d] -= bits_of(np.float64(values[first + d]) + rounder) - zero


@njit(cache=True, nogil=True)
def add_near(total, start, values, first, count, limit):
    """`add_rounded` to totals that stay in int64.

    Returns whether the values are below ``limit * NEAR`` in magnitude; otherwise nothing has changed.
    """
    rounder = np.float64(limit) * ROUNDER
    zero = bits_of(rounder)
    # One pass adds and checks. The check of all values is a single
    # OR: were they looked at first, each would be loaded twice.
    differences = np.int64(0)
    for d in range(count):
        bits = bits_of(np.float64(values[first + d]) + rounder)
        differences |= bits ^ zero
        total[start + d] += bits - zero
    if are_rounded(differences):
        return True
    _take_back(total, start, values, first, count, limit)
    return False


@njit(cache=True, nogil=True)
def add_near_rows(total, start, values, first, stride, count, limit):
    """`add_near` of four rows, `stride` apart, to one: a total is read and written once for all."""
    rounder = np.float64(limit) * ROUNDER
    zero = bits_of(rounder)
    second, third, fourth = first + stride, first + np.uintp(2) * stride, first + np.uintp(3) * stride
    differences = np.int64(0)
    for d in range(count):
        bits = bits_of(np.float64(values[first + d]) + rounder)
        # Four rows a pass: the loop is bound by the loads and
        # stores of `total`, which are one each for four values.
        others = bits_of(np.float64(values[second + d]) + rounder)
        more = bits_of(np.float64(values[third + d]) + rounder)
        last = bits_of(np.float64(values[fourth + d]) + rounder)
        differences |= (bits ^ zero) | (others ^ zero) | (more ^ zero) | (last ^ zero)
        # Each `bits` is near 2**62; their sum may wrap and comes back with the four zeros, modulo 2**64.
        total[start + d] += (bits + others) + (more + last) - np.int64(4) * zero
    if are_rounded(differences):
        return True
    for row in range(np.uintp(4)):
        _take_back(total, start, values, first + row * stride, count, limit)
    return False


@njit(cache=True, nogil=True)
def add_rounded(total, start, values, first, count, scale, limit):
    """Round ``values[first : first + count]`` to fixed point, add it to ``total[start : start + count]``.

    `total` (int64) and `values` (float32) are flat, positions and `count` are uintp. Returns -1, or the place
    in the row of the first value that cannot be added; `total` then keeps what it held before the call.
    """
    rounder = np.float64(limit) * ROUNDER
    zero = bits_of(rounder)
    differences, moved = np.int64(0), np.int64(0)
    for d in range(count):
        bits = bits_of(np.float64(values[first + d]) + rounder)
        differences |= bits ^ zero
        after = total[start + d] + (bits - zero)
        total[start + d] = after
        moved |= after + HALF
    # The sign bit of `moved` is that of any after + HALF: set where a total has left [-2**62, 2**62), and so
    # may have wrapped. One such total sends the row to the slow path, which finds out.
    if are_rounded(differences) and moved >= 0:
        return np.int64(-1)
    _take_back(total, start, values, first, count, limit)
    return _add_far(total, start, values, first, count, scale, limit)


@njit(cache=True, nogil=True)
def _add_far(total, start, values, first, count, scale, limit):
    """`add_rounded` of any values, one by one."""
    outside = 0
    for d in range(count):
        outside += not (abs(values[first + d]) < limit)
    if outside:  # what comes before it in the row may have no place either
        for d in range(count):
            if not (abs(values[first + d]) < limit):
                return np.int64(d)
            term = np.int64(np.rint(np.float64(values[first + d]) * scale))
            before = total[start + d]
            after = before + term
            if ((before ^ after) & (term ^ after)) < 0:
                return np.int64(d)
    wrapped = np.int64(0)
    for d in range(count):
        term = np.int64(np.rint(np.float64(values[first + d]) * scale))
        before = total[start + d]
        after = before + term
        total[start + d] = after
        # A sum overflows exactly where both addends have the
        # other sign than the result: the sign bit of this term.
        wrapped |= (before ^ after) & (term ^ after)
    if wrapped < 0:
        offset = np.int64(-1)
        for d in range(count):
            term = np.int64(np.rint(np.float64(values[first + d]) * scale))
            after = total[start + d]
            # The addition is undone modulo 2**64, and the overflow
            # test repeated for the place of the first one.
            before = after - term
            total[start + d] = before
            if offset < 0 and ((before ^ after) & (term ^ after)) < 0:
                offset = np.int64(d)
        return offset
    return np.int64(-1)


@njit(cache=True, nogil=True)
def add_terms(total, start, terms, first, count):
    """`add_rounded` for terms that are in fixed point already (int64)."""
    wrapped = np.int64(0)
    for d in range(count):
        term = terms[first + d]
        before = total[start + d]
        after = before + term
        total[start + d] = after
        wrapped |= (before ^ after) & (term ^ after)
    if wrapped < 0:
        offset = np.int64(-1)
        for d in range(count):
            term = terms[first + d]
            after = total[start + d]
            before = after - term
            total[start + d] = before
            if offset < 0 and ((before ^ after) & (term ^ after)) < 0:
                offset = np.int64(d)
        return offset
    return np.int64(-1)
