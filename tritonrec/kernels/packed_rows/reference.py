"""Packed rows, one element at a time, in Python's unbounded integers."""

from __future__ import annotations

import struct

import torch

from tritonrec.kernels.fixed_point.errors import late_error, sum_error
from tritonrec.kernels.padding import report
from tritonrec.kernels.rows.reference import add_batch

FLOAT = 0x84


def pack_rows(values: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.packed_rows.pack_rows`."""
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
        rows.append([decode(planes[start + d : stop : dim], width) for d in range(dim)])
        start = stop
    return rows


def add_packed_rows(
    out: torch.Tensor,
    segments: torch.Tensor,
    widths: torch.Tensor,
    packed: torch.Tensor,
    name: str,
    fraction_bits: int,
) -> None:
    """See `tritonrec.kernels.packed_rows.add_packed_rows`."""
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
    width = next(w for w in range(1, 9) if all(-(1 << 8 * w - 1) <= x < 1 << 8 * w - 1 for x in elements))
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
