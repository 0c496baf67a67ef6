"""A fused multiply-add for references, of float32 tensors: torch has none whose rounding is known."""

from __future__ import annotations

import torch


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of float32 tensors that broadcast, rounded once, to the nearest and to even in a tie.

    In float64 the product is exact. Its sum with `c` is rounded to odd there, after which the rounding to
    float32 is that of the exact sum (Boldo and Melquiond, Emulation of FMA, 2008).
    """
    product, term = a.double() * b.double(), c.double()
    total = product + term
    other = total - product
    error = (product - (total - other)) + (term - other)
    odd = total.view(torch.int64) & 1 == 1
    towards = torch.nextafter(total, torch.where(error > 0, torch.inf, -torch.inf).double())
    return torch.where((error == 0) | odd | ~error.isfinite(), total, towards).float()
