"""Exact int64 rows in the bytes they need, to send between ranks, and added where they arrive.

D dim, N rows, K of them sent, B bytes, S segments. A sum in fixed point takes 8 bytes, but the
rows of a batch are mostly gradients of one occurrence: float32 values, of 24 significant bits.
Each row says in one byte how many bytes its elements take:

    width      bytes   an element is
    0          0       0
    1 to 8     width   an integer in two's complement; the smallest width that holds every element
    FLOAT      4       the float32 that is the integer; where a width would be above 4, and all are exact

A row lies in byte planes, the lowest byte of all elements first. Three rows of D = 2, of which the second is
zero::

    rows      3 -300     0 0     2**40 -2**62
    widths    2          0       FLOAT = 0x84
    packed    03 d4  00 fe       00 00  00 00  80 80  53 de          (B,) = (4 + 0 + 8,)

All implementations give the same bytes. Nothing is lost: adding the packed rows is adding the rows.
"""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.fixed_point.errors import FRACTION_BITS
from tritonrec.kernels.packed_rows.register import ADD_PACKED_ROWS, PACK_ROWS, check_widths


def pack_rows(
    values: torch.Tensor, rows: torch.Tensor, *, impl: Impl = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows ``values[rows[k]]``, each in the bytes it needs.

    Args:
        values: (N, D) int64; row stride arbitrary, so a view of a wider buffer is fine.
        rows: (K,) int64 in [0, N), in the order they are sent; a row may occur many times.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
    Returns:
        ``widths`` (K,) uint8, 0 to 8 or FLOAT, and ``packed`` (B,) uint8, the rows one after another
        (`tritonrec.kernels.packed_rows` draws them). B is read back from an accelerator. ``packed`` may be
        the beginning of a larger buffer: clone it to keep or save it.
    Raises:
        IndexError: a row outside `values` (on an accelerator: an asynchronous device assertion).
        ValueError: an argument of another shape, dtype or device.
    """
    return PACK_ROWS(values, rows, impl=impl)


def add_packed_rows(
    out: torch.Tensor,
    segments: torch.Tensor,
    widths: torch.Tensor,
    packed: torch.Tensor,
    *,
    name: str = "tensor",
    fraction_bits: int = FRACTION_BITS,
    impl: Impl = "auto",
) -> torch.Tensor:
    """``out[segments[k]] += row k`` of what `pack_rows` gave, in place: `segment_sum` of exact terms.

    Args:
        out: (S, D) int64, contiguous rows; mutated.
        segments: (K,) int64 in [0, S), in any order, repeated or not.
        widths: (K,) uint8. packed: (B,) uint8. Both from `pack_rows`, or several of them joined.
        name, fraction_bits: what an error calls the rows, and their fixed point.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
    Returns:
        `out`.
    Raises:
        ExactSumError: a sum leaves int64, or a float among the rows is none. `out` then holds a part of the
            sums and has to be discarded.
        IndexError: a segment outside [0, S) (on an accelerator: an asynchronous device assertion).
        ValueError: an argument of another shape, dtype or device; an invalid width; `packed` is longer or
            shorter than `widths` need; `out` shares memory with another argument. As with an IndexError,
            nothing was added.
    """
    ADD_PACKED_ROWS(out, segments, widths, packed, name, fraction_bits, impl=impl)
    return out


def packed_bytes(widths: torch.Tensor, counts: list[int], dim: int) -> list[int]:
    """Bytes of consecutive groups of packed rows, as the split sizes of an all-to-all need them.

    Args:
        widths: (K,) uint8, as from `pack_rows`; read back from an accelerator.
        counts: rows of each group, K in all. dim: D.
    Raises:
        ValueError: an invalid width, a negative count, or counts of more or fewer than K rows.
    """
    if widths.dim() != 1 or widths.dtype != torch.uint8:
        raise ValueError(f"widths must be 1-D torch.uint8, got {tuple(widths.shape)} {widths.dtype}")
    if dim < 0:
        raise ValueError(f"dim must not be negative, got {dim}")
    if any(count < 0 for count in counts) or sum(counts) != len(widths):
        raise ValueError(f"counts must cut the {len(widths)} rows of widths into groups, got {counts}")
    widths = widths.cpu()
    check_widths(widths, dim)
    ends = np.cumsum(widths.numpy() & 0x7F, dtype=np.int64)
    cuts = np.concatenate([[0], ends])[np.cumsum([0, *counts])]
    return [int(length) for length in np.diff(cuts) * dim]
