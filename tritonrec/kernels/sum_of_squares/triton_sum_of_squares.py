# mypy: ignore-errors
"""Sums of squares in Triton: each program sums its blocks, and one adds up what they found.

No atomics: the first limb stops at 2**50, which an atomic addition would not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels.sum_of_squares import op
from tritonrec.kernels.triton_jit import jit_kernel
from tritonrec.kernels.triton_padding import num_valid

BLOCK, NUM_WARPS = 1024, 4
# so many programs fill every GPU, and 1024 limbs of 2**50 fit into int64
PROGRAMS = 1024
MOST = tl.constexpr(op.MOST)


@jit_kernel
def sum_kernel(values_ptr, limbs_ptr, num_rows, count_ptr, dim, num_parts, BLOCK: tl.constexpr):
    """``limbs[:, p]`` = the limbs of every P-th block of values from block p on."""
    length = tl.cast(num_valid(num_rows, count_ptr), tl.int64) * dim
    high = tl.zeros((BLOCK,), tl.int64)
    middle = tl.zeros((BLOCK,), tl.int64)
    low = tl.zeros((BLOCK,), tl.int64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < length:
        position = start + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + position, mask=position < length, other=0.0).to(tl.float64)
        square = value * value
        # false for NaN, too, which compares with nothing
        fits = square < 1125899906842624.0
        square = tl.where(fits, square, 0.0)
        # conversions to integers cut: floor, as nothing is negative; all differences are exact
        whole = square.to(tl.int64)
        rest = (square - whole.to(tl.float64)) * 4294967296.0
        part = rest.to(tl.int64)
        rest = (rest - part.to(tl.float64)) * 4294967296.0
        # 1.5 * 2**52: what is added to it loses its fraction, half to even
        magic = tl.full((BLOCK,), 6755399441055744.0, tl.float64)
        high = tl.minimum(high + tl.where(fits, whole, MOST), MOST)
        middle += part
        low += ((rest + magic) - magic).to(tl.int64)
        start += num_parts * BLOCK
    limb_ptr = limbs_ptr + tl.program_id(0)
    tl.store(limb_ptr, tl.minimum(tl.sum(high, axis=0), MOST))
    tl.store(limb_ptr + num_parts, tl.sum(middle, axis=0))
    tl.store(limb_ptr + 2 * num_parts, tl.sum(low, axis=0))


@jit_kernel
def join_kernel(limbs_ptr, out_ptr, num_parts, PARTS: tl.constexpr):
    """``out`` = the sums of each row of the limbs, the first one at most 2**50."""
    part = tl.arange(0, PARTS)
    for limb in tl.static_range(3):
        total = tl.sum(tl.load(limbs_ptr + limb * num_parts + part, mask=part < num_parts, other=0), axis=0)
        tl.store(out_ptr + limb, tl.minimum(total, MOST) if limb == 0 else total)


def sum_of_squares(values: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """See `tritonrec.ops.sum_of_squares`."""
    values = values.detach().contiguous()
    if values.numel() == 0:
        return torch.zeros(3, dtype=torch.int64, device=values.device)
    num_rows = values.shape[0] if values.dim() else 1
    parts = min(triton.cdiv(values.numel(), BLOCK), PROGRAMS)
    limbs = torch.empty(3, parts, dtype=torch.int64, device=values.device)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    sizes = num_rows, count, values.numel() // num_rows, parts
    sum_kernel[(parts,)](values, limbs, *sizes, BLOCK=BLOCK, **options)
    if parts == 1:
        return limbs.view(3)
    out = torch.empty(3, dtype=torch.int64, device=values.device)
    join_kernel[(1,)](limbs, out, parts, PARTS=PROGRAMS, **options)
    return out
