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

from tritonrec.kernels.arguments import not_a_tensor
from tritonrec.kernels.dispatch import Impl, implementation, in_plain_eager, written
from tritonrec.kernels.fixed_point import FRACTION_BITS, check_bits
from tritonrec.kernels.overlap import check_no_overlap
from tritonrec.kernels.packed_rows import reference
from tritonrec.kernels.packed_rows.reference import FLOAT
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.row_layout import check_matrix, check_rows, contiguous_rows, flat_rows
from tritonrec.kernels.segment_sum import sum_error

__all__ = ["FLOAT", "add_packed_rows", "pack_rows", "packed_bytes"]


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
    _check_pack(values, rows)
    launch = _launch_pack if in_plain_eager(values, rows) else _pack_rows
    return launch(values, rows, impl)


def add_packed_rows(
    out: torch.Tensor,
    segments: torch.Tensor,
    widths: torch.Tensor,
    packed: torch.Tensor,
    *,
    name: str = "tensor",
    bits: int = FRACTION_BITS,
    impl: Impl = "auto",
) -> torch.Tensor:
    """``out[segments[k]] += row k`` of what `pack_rows` gave, in place: `segment_sum` of exact terms.

    Args:
        out: (S, D) int64, contiguous rows; mutated.
        segments: (K,) int64 in [0, S), in any order, repeated or not.
        widths: (K,) uint8. packed: (B,) uint8. Both from `pack_rows`, or several of them joined.
        name, bits: what an error calls the rows, and the grid they lie on.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
    Returns:
        `out`.
    Raises:
        ExactSumError: a sum leaves int64. `out` then holds a part of the sums and has to be discarded.
        IndexError: a segment outside [0, S) (on an accelerator: an asynchronous device assertion).
        ValueError: an argument of another shape, dtype or device; a width that is none; `packed` is longer or
            shorter than `widths` say; `out` shares memory with another argument. As with an IndexError,
            nothing was added.
    """
    _check_add(out, segments, widths, packed, bits)
    if in_plain_eager(out, segments, widths, packed, name, bits, impl):
        written(out)
        _launch_add(out, segments, widths, packed, name, bits, impl)
    else:
        _add_packed_rows(out, segments, widths, packed, name, bits, impl)
    return out


def _check_pack(values: torch.Tensor, rows: torch.Tensor) -> None:
    check_matrix("values", values, torch.int64)
    _check_list("rows", rows, torch.int64, values)


def _check_add(
    out: torch.Tensor, segments: torch.Tensor, widths: torch.Tensor, packed: torch.Tensor, bits: int
) -> None:
    check_matrix("out", out, torch.int64, in_place=True)
    _check_list("segments", segments, torch.int64, out)
    _check_list("widths", widths, torch.uint8, out)
    _check_list("packed", packed, torch.uint8, out)
    if widths.shape != segments.shape:
        raise ValueError(f"widths must be one for each of {len(segments)} segments, got {len(widths)}")
    check_bits(bits)


def packed_bytes(widths: torch.Tensor, counts: list[int], dim: int) -> list[int]:
    """Bytes of consecutive groups of packed rows, as the split sizes of an all-to-all need them.

    Args:
        widths: (K,) uint8, as from `pack_rows`; read back from an accelerator.
        counts: rows of each group, K in all. dim: D.
    Raises:
        ValueError: a width that is none, a negative count, or counts of more or fewer than K rows.
    """
    if widths.dim() != 1 or widths.dtype != torch.uint8:
        raise ValueError(f"widths must be 1-D torch.uint8, got {tuple(widths.shape)} {widths.dtype}")
    if dim < 0:
        raise ValueError(f"dim must not be negative, got {dim}")
    if any(count < 0 for count in counts) or sum(counts) != len(widths):
        raise ValueError(f"counts must cut the {len(widths)} rows of widths into groups, got {counts}")
    widths = widths.cpu()
    _check_packed(widths, dim)
    return [int((group & 0x7F).sum()) * dim for group in widths.split(counts)]


def _check_list(name: str, tensor: torch.Tensor, dtype: torch.dtype, like: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor(name, tensor)
    if tensor.dim() != 1 or tensor.dtype != dtype:
        raise ValueError(f"{name} must be 1-D {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {tensor.device}")


def _check_packed(widths: torch.Tensor, dim: int, packed: torch.Tensor | None = None) -> None:
    """Refuse a width that is none, and bytes that are not those of the rows; waits for the device once."""
    bad = (widths > 8) & (widths != FLOAT)
    wrong, total = torch.stack([bad.any().long(), (widths & 0x7F).sum()]).tolist()
    if wrong:
        first = int(bad.byte().argmax())
        raise ValueError(f"widths[{first}] = {int(widths[first])} is none of 0 to 8 and {FLOAT}")
    total *= dim
    if packed is not None and len(packed) != total:
        raise ValueError(
            f"packed must have the {total} bytes that widths say for dim {dim}, got {len(packed)}"
        )


def _launch_pack(values: torch.Tensor, rows: torch.Tensor, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = implementation(impl, values)  # type: ignore[arg-type]
    check_rows("rows", rows, values.shape[0])
    if chosen == "reference":
        return reference.pack_rows(values, rows)
    widths = torch.zeros(len(rows), dtype=torch.uint8, device=values.device)
    if rows.numel() == 0 or values.shape[1] == 0:
        return widths, widths[:0].clone()
    values = contiguous_rows(values)
    if chosen == "triton":
        from tritonrec.kernels.packed_rows import triton_packed_rows

        return triton_packed_rows.pack_rows(values, rows)
    from tritonrec.kernels.packed_rows import numba_packed_rows

    # As long as the rows could be at most: each is met once, and memory that nobody writes to costs nothing.
    packed = torch.empty(8 * len(rows) * values.shape[1], dtype=torch.uint8)
    lists = (rows.contiguous().numpy(), np.uintp(values.shape[1]), widths.numpy(), packed.numpy())
    packed.resize_(numba_packed_rows.pack(*flat_rows(values), *lists))
    return widths, packed


def _launch_add(
    out: torch.Tensor,
    segments: torch.Tensor,
    widths: torch.Tensor,
    packed: torch.Tensor,
    name: str,
    bits: int,
    impl: str,
) -> None:
    chosen = implementation(impl, out)  # type: ignore[arg-type]
    dim = out.shape[1]
    check_no_overlap({"out": out}, {"segments": segments, "widths": widths, "packed": packed})
    _check_packed(widths, dim, packed)
    check_rows("segments", segments, out.shape[0])
    if packed.numel() == 0:
        return
    packed = packed.contiguous()
    if chosen == "reference":
        bad = reference.add_packed_rows(out, segments, widths, packed)
    elif chosen == "triton":
        from tritonrec.kernels.packed_rows import triton_packed_rows

        bad = int(triton_packed_rows.add_packed_rows(out, segments, widths, packed)) - 1
    else:
        from tritonrec.kernels.packed_rows import numba_packed_rows

        lists = (segments.contiguous().numpy(), widths.contiguous().numpy(), packed.numpy())
        bad = numba_packed_rows.add(*flat_rows(out), *lists, np.uintp(dim))
    if bad >= 0:
        row, column = divmod(bad, dim)
        start = int((widths[:row] & 0x7F).sum()) * dim
        size = int(widths[row] & 0x7F) * dim
        terms = reference.unpack_rows(widths[row : row + 1], packed[start : start + size], dim)
        raise sum_error(name, (row, column), terms[0, column].item(), int(segments[row]), bits)


@custom_op("tritonrec::pack_rows", mutates_args=())
def _pack_rows(values: torch.Tensor, rows: torch.Tensor, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    _check_pack(values, rows)
    return _launch_pack(values, rows, impl)


@_pack_rows.register_fake
def _(values, rows, impl):
    size = torch.library.get_ctx().new_dynamic_size()
    return tuple(values.new_empty(length, dtype=torch.uint8) for length in (rows.shape[0], size))


@custom_op("tritonrec::add_packed_rows", mutates_args=("out",))
def _add_packed_rows(
    out: torch.Tensor,
    segments: torch.Tensor,
    widths: torch.Tensor,
    packed: torch.Tensor,
    name: str,
    bits: int,
    impl: str,
) -> None:
    _check_add(out, segments, widths, packed, bits)
    _launch_add(out, segments, widths, packed, name, bits, impl)


@_add_packed_rows.register_fake
def _(out, segments, widths, packed, name, bits, impl):
    return None
