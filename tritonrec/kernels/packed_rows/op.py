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

import struct
from typing import Any

import numpy as np
import torch

from tritonrec.kernels.dispatch import Impl, on_host
from tritonrec.kernels.fixed_point.errors import FRACTION_BITS, check_fraction_bits, late_error, sum_error
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import report
from tritonrec.kernels.row_layout import check_matrix, check_rows
from tritonrec.kernels.rows.op import add_batch


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
    # Where each group begins and ends, in planes of rows; times D they are bytes.
    cuts = np.concatenate([[0], ends])[np.cumsum([0, *counts])]
    return [int(length) for length in np.diff(cuts) * dim]


# Reference: packed rows, one element at a time, in Python's unbounded integers.

FLOAT = 0x84


def pack_rows_reference(values: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `pack_rows`."""
    widths, packed = [], bytearray()
    for row in rows.tolist():
        elements = values[row].tolist()
        width = width_of(elements)
        encoded = [encode(element, width) for element in elements]
        widths.append(width)
        packed += bytes(element[plane] for plane in range(width & 0x7F) for element in encoded)
    on = values.device
    return torch.tensor(widths, dtype=torch.uint8, device=on), torch.tensor(
        list(packed), dtype=torch.uint8, device=on
    )


def unpack_rows(widths: torch.Tensor, packed: torch.Tensor, dim: int) -> list[list[int | float]]:
    """K rows of D elements, as `pack_rows` found them; a float that is no int64 stays one."""
    rows, planes, start = [], bytes(packed.tolist()), 0
    for width in widths.tolist():
        stop = start + (width & 0x7F) * dim
        # Element d is byte d of every plane of D bytes.
        rows.append([decode(planes[start + d : stop : dim], width) for d in range(dim)])
        start = stop
    return rows


def add_packed_rows_reference(out, segments, widths, packed, name, fraction_bits) -> None:
    """See `add_packed_rows`."""
    code = add_batch(out, unpack_rows(widths, packed, out.shape[1]), segments, fraction_bits)
    report_packed_sum(code, name, segments, widths, packed, out.shape[1], fraction_bits)


def report_packed_sum(
    code: torch.Tensor | int,
    name: str,
    segments: torch.Tensor,
    widths: torch.Tensor,
    packed: torch.Tensor,
    dim: int,
    fraction_bits: int,
) -> None:
    """Raise the error of 1 + row * D + column of the first element whose sum leaves int64; 0 is none."""

    def error(code: int) -> Exception:
        row, column = divmod(code - 1, dim)
        start = int((widths[:row] & 0x7F).sum()) * dim
        size = int(widths[row] & 0x7F) * dim
        (terms,) = unpack_rows(widths[row : row + 1], packed[start : start + size], dim)
        return sum_error(name, (row, column), terms[column], int(segments[row]), fraction_bits)

    report(code, None, error, late_error(name, dim, fraction_bits))


def width_of(elements: list[int]) -> int:
    """0, 1 to 8 or FLOAT: see `kernels.packed_rows`."""
    if not any(elements):
        return 0
    # w bytes of two's complement hold -2**(8 w - 1) to 2**(8 w - 1) - 1.
    width = next(w for w in range(1, 9) if all(-(1 << 8 * w - 1) <= x < 1 << 8 * w - 1 for x in elements))
    # FLOAT is one width for a whole row: its planes have D bytes each.
    return FLOAT if width > 4 and all(is_float32(x) for x in elements) else width


def is_float32(integer: int) -> bool:
    return decode(encode(integer, FLOAT), FLOAT) == integer


def encode(integer: int, width: int) -> bytes:
    return struct.pack("<f", integer) if width == FLOAT else integer.to_bytes(width, "little", signed=True)


def decode(element: bytes, width: int) -> int | float:
    if width == FLOAT:
        number = struct.unpack("<f", element)[0]
        return int(number) if -(2**63) <= number < 2**63 else number  # of bytes that `encode` never gives
    return int.from_bytes(element, "little", signed=True)


def _check_list(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dim() != 1 or tensor.dtype != dtype:
        raise ValueError(f"{name} must be 1-D {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")


def check_widths(widths: torch.Tensor, dim: int, packed: torch.Tensor | None = None) -> None:
    """Refuse an invalid width, and bytes of another number than the rows have; waits for the device once."""
    bad: Any
    if on_host(widths):  # a call of numpy takes a fifth of torch's time
        values = widths.numpy()
        bad = (values > 8) & (values != FLOAT)
        wrong, total = bad.any(), int((values & 0x7F).sum(dtype=np.int64))
    else:
        bad = (widths > 8) & (widths != FLOAT)
        wrong, total = torch.stack([bad.any().long(), (widths & 0x7F).sum()]).tolist()
        bad = bad.byte()
    if wrong:
        first = int(bad.argmax())
        raise ValueError(f"widths[{first}] = {int(widths[first])} must be 0 to 8 or {FLOAT}")
    total *= dim
    if packed is not None and len(packed) != total:
        raise ValueError(
            f"packed must have the {total} bytes of rows of these widths and dim {dim}, got {len(packed)}"
        )


def _check_pack(values, rows) -> None:
    check_matrix("values", values, torch.int64)
    _check_list("rows", rows, torch.int64)


def _check_row_numbers(values, rows) -> None:
    check_rows("rows", rows, values.shape[0])


def _fake_pack(values, rows):
    size = torch.library.get_ctx().new_dynamic_size()
    return tuple(values.new_empty(length, dtype=torch.uint8) for length in (rows.shape[0], size))


PACK_ROWS = Op(
    "pack_rows(Tensor values, Tensor rows) -> (Tensor, Tensor)",
    reference=pack_rows_reference, cpu="numba_packed_rows:pack_rows", triton="triton_packed_rows:pack_rows",
    check=_check_pack, check_memory=_check_row_numbers, fake=_fake_pack,
)  # fmt: skip


def _check_add(out, segments, widths, packed, fraction_bits) -> None:
    check_matrix("out", out, torch.int64, in_place=True)
    _check_list("segments", segments, torch.int64)
    _check_list("widths", widths, torch.uint8)
    _check_list("packed", packed, torch.uint8)
    if widths.shape != segments.shape:
        raise ValueError(f"widths must be one for each of {len(segments)} segments, got {len(widths)}")
    check_fraction_bits(fraction_bits)


def _check_bytes(out, segments, widths, packed) -> None:
    check_widths(widths, out.shape[1], packed)
    check_rows("segments", segments, out.shape[0])


ADD_PACKED_ROWS = Op(
    "add_packed_rows(Tensor(a!) out, Tensor segments, Tensor widths, Tensor packed, str name, "
    "int fraction_bits) -> ()",
    reference=add_packed_rows_reference, cpu="numba_packed_rows:add_packed_rows",
    triton="triton_packed_rows:add_packed_rows",
    check=_check_add, check_memory=_check_bytes,
)  # fmt: skip
