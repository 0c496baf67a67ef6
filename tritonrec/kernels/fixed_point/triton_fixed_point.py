"""Rounding to fixed point in Triton.

Adding 1.5 * 2**52 to a float64 below 2**51 in magnitude leaves no bits for a fraction, so the hardware's
round-half-even does the rounding. A larger one came from a float32 of 24 bits: it is a multiple of 2**28, and
adding and subtracting are exact.
Each program writes the first bad position of its block to a place of its own: no atomics, no order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels import deferred
from tritonrec.kernels.fixed_point.errors import report_value
from tritonrec.kernels.triton_jit import jit_kernel

BLOCK, NUM_WARPS = 1024, 4
NONE = tl.constexpr(deferred.NONE)  # the identity of a minimum
NEAR_BITS = 51
"""Terms of at most so many bits are rounded by one sum."""


@triton.jit
def round_to_fixed_point(values, scale, limit):
    """float32 or less to (int64 in fixed point, whether it fits); `scale` and `limit` are powers of two."""
    values = values.to(tl.float32)
    # false for NaN too, which compares with nothing
    fits = tl.abs(values) < limit
    # exact in float64: 24 significant bits times a power of two
    scaled = tl.where(fits, values, 0.0).to(tl.float64) * scale
    # 1.5 * 2**52: the half keeps sums with negative values above 2**52, where the spacing is 1
    magic = tl.full(scaled.shape, 6755399441055744.0, tl.float64)
    return ((scaled + magic) - magic).to(tl.int64), fits


def near(fraction_bits: int, count: int) -> float:
    """A power of two: sums of `count` smaller values are 2**62 at most, and `add_near` rounds each."""
    # (count - 1).bit_length() is ceil(log2(count)): 2**that terms of 2**(62 - that) each are 2**62 together.
    return 2.0 ** (min(NEAR_BITS, 62 - (count - 1).bit_length()) - fraction_bits)


@triton.jit
def rounder_of(limit):
    """1.5 * 2**52 units, among which float64 are a unit apart: what is added to it is rounded to one."""
    return tl.cast(limit, tl.float64) * 0.00146484375  # 1.5 * 2**-10


@triton.jit
def add_near(sums, values, limit):
    """int64 sums of values below `near`, each by the bits of a rounded number; `without_zeros` ends them."""
    # The bits of rounded and of the constant differ by the rounded integer
    # (`numba_fixed_point` draws it). The constant's bits are taken off once, after
    # `count` sums (`without_zeros`): int64 may wrap in between and comes back.
    rounded = values.to(tl.float32).to(tl.float64) + rounder_of(limit)
    return sums + rounded.to(tl.int64, bitcast=True)


@triton.jit
def without_zeros(sums, count, limit):
    """The fixed-point sums of `count` times `add_near`, each of which has brought the bits of 0 along."""
    return sums - count * rounder_of(limit).to(tl.int64, bitcast=True)


@triton.jit
def magnitude(values):
    """int32 that order as |values| of float32 or less do; infinity and NaN are above all numbers."""
    # Exponent above fraction: without the sign, floats and their bits have one order.
    return tl.cast(values, tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def is_far(sums):
    """Whether int64 sums are outside [-2**62, 2**62)."""
    # Outside exactly where the two highest bits differ.
    return (sums ^ (sums << 1)) < 0


@triton.jit
def any_of(flags):
    """Whether one of a block's flags is true, as a number."""
    return tl.max(flags.to(tl.int32)) != 0


@triton.jit
def add_atomically(to, term, position, mask):
    """The least position where int64 terms, added at the pointers `to`, leave int64, or NONE; as a number."""
    # relaxed: only later kernels read the sums
    before = tl.atomic_add(to, term, mask=mask, sem="relaxed")
    after = before + term
    # Overflow: both addends have the other sign than the sum. The atomic
    # returned this addition's own `before`, so one of the programs sees it
    # whatever the order; a later one may wrap back, and the error stays.
    wraps = mask & (((before ^ after) & (term ^ after)) < 0)
    worst = tl.full((), NONE, tl.int64)
    # none does, as a rule, and then no position is compared
    if any_of(wraps):
        worst = tl.min(tl.where(wraps, position, NONE))
    return worst


@jit_kernel
def to_fixed_point_kernel(values_ptr, terms_ptr, bad_ptr, scale, limit, length, BLOCK: tl.constexpr):
    """terms = round(values * scale), and the block's first position that does not fit, or NONE."""
    # int64 before the product, or the positions of tensors of 2**31 values wrap
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # 0.0 in the tail has a fixed-point number, so the tail never counts as bad
    values = tl.load(values_ptr + position, mask=position < length, other=0.0)
    rounded, fits = round_to_fixed_point(values, scale, limit)
    tl.store(terms_ptr + position, rounded, mask=position < length)
    tl.store(bad_ptr + tl.program_id(0), tl.min(tl.where(fits, NONE, position), axis=0))


@jit_kernel
def from_fixed_point_kernel(sums_ptr, values_ptr, divisor_ptr, unit, length, BLOCK: tl.constexpr):
    """values = sums * unit / divisor in float64, rounded to float32 at the end."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.load(sums_ptr + position, mask=position < length, other=0)
    # Loaded, not passed: a Python float reaches a kernel as float32, which holds a power of two but no more.
    divisor = tl.load(divisor_ptr)
    quotient = sums.to(tl.float64) * unit / divisor
    tl.store(values_ptr + position, quotient.to(tl.float32), mask=position < length)


def to_fixed_point(values, fraction_bits, name, status=None) -> torch.Tensor:
    """See `tritonrec.ops.to_fixed_point`; a code is read back only without `status`."""
    values = values.detach().contiguous()
    terms = torch.empty(values.shape, dtype=torch.int64, device=values.device)
    if values.numel() == 0:
        return terms
    programs = triton.cdiv(values.numel(), BLOCK)
    bad = torch.empty(programs, dtype=torch.int64, device=values.device)
    to_fixed_point_kernel[(programs,)](
        values, terms, bad, 2.0**fraction_bits, 2.0 ** (62 - fraction_bits), values.numel(), BLOCK=BLOCK,
        num_warps=NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    report_value(bad, status, name, values, fraction_bits)
    return terms


def from_fixed_point(sums: torch.Tensor, divisor: float, fraction_bits: int) -> torch.Tensor:
    """See `tritonrec.ops.from_fixed_point`."""
    sums = sums.contiguous()
    values = torch.empty(sums.shape, dtype=torch.float32, device=sums.device)
    if sums.numel() == 0:
        return values
    # filled on the device: a copy from the host would be waited for
    on_device = torch.full((1,), divisor, dtype=torch.float64, device=sums.device)
    from_fixed_point_kernel[(triton.cdiv(sums.numel(), BLOCK),)](
        sums, values, on_device, 2.0**-fraction_bits, sums.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return values
