"""Row copies as loops over rows and bit patterns."""

from __future__ import annotations

import struct

import torch

from tritonrec.kernels.address_table import chunks_behind
from tritonrec.kernels.chunked_rows.op import LOW, Chunks

SIGN, INFINITY = 0x8000, 0x7C00  # of float16


def read_rows(chunks: Chunks, locations: torch.Tensor, out: torch.Tensor) -> None:
    """See `tritonrec.kernels.chunked_rows.read_rows`."""
    to = out.view(torch.int32)
    for k, location in enumerate(locations.tolist()):
        row = _row(chunks, location)
        if location >= LOW:
            to[k] = torch.tensor(
                [_signed(bits) for bits in _widened(row.tolist(), chunks.dim)],
                dtype=torch.int32,
                device="cpu",
            )
        elif location >= 0:
            to[k] = row


def write_rows(chunks: Chunks, locations: torch.Tensor, values: torch.Tensor) -> None:
    """See `tritonrec.kernels.chunked_rows.write_rows`."""
    for k, (location, bits) in enumerate(zip(locations.tolist(), _patterns(values), strict=True)):
        row = _row(chunks, location)
        if location >= LOW:
            row.copy_(
                torch.tensor(_narrowed(bits, chunks.dim), dtype=torch.int64, device="cpu")
            )  # of which 16 bits are kept
        elif location >= 0:
            row.copy_(values[k].view(torch.int32))


def fits(values: torch.Tensor, dim: int, exact: torch.Tensor) -> None:
    """See `tritonrec.kernels.chunked_rows.fits`."""
    for k, bits in enumerate(_patterns(values)):
        exact[k] = _widened(_narrowed(bits, dim), dim) == bits


def _row(chunks: Chunks, location: int) -> torch.Tensor:
    """The row's bits, (width,) int32 or int16, in the chunk's memory; of a negative location nothing."""
    if location < 0:
        return torch.empty(0, dtype=torch.int32, device="cpu")
    table, dtype = (chunks.low, torch.int16) if location >= LOW else (chunks.full, torch.int32)
    number, place = divmod(location % LOW, chunks.chunk_rows)
    return chunks_behind(table)[number].view(-1, chunks.width)[place].view(dtype)


def _patterns(values: torch.Tensor) -> list[list[int]]:
    """Rows of float32 as unsigned integers."""
    return [[bits & 0xFFFFFFFF for bits in row] for row in values.view(torch.int32).tolist()]


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits


def _widened(words: list[int], dim: int) -> list[int]:
    """Bits of float32 of a row of 16-bit values."""
    return [_widen(word) if j < dim else (word & 0xFFFF) << 16 for j, word in enumerate(words)]


def _narrowed(bits: list[int], dim: int) -> list[int]:
    """16-bit values of a row of float32's bits."""
    return [_narrow(each) if j < dim else each >> 16 for j, each in enumerate(bits)]


def _widen(word: int) -> int:
    """float16 to float32, as bits."""
    exponent, fraction = word >> 10 & 31, word & 0x3FF
    if exponent == 0:  # a multiple of 2**-24
        bits = struct.unpack("<I", struct.pack("<f", fraction * 2.0**-24))[0]
    elif exponent == 31:  # infinity, or a NaN with its payload
        bits = 0xFF << 23 | fraction << 13
    else:
        bits = exponent + 127 - 15 << 23 | fraction << 13
    return bits | (word & SIGN) << 16


def _narrow(bits: int) -> int:
    """float32 to float16, as bits; what it cannot hold is cut off."""
    exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent > 127 + 15:  # infinities and NaN keep their kind; a number that is too large becomes one
        word = INFINITY | fraction >> 13
    elif exponent < 127 - 14:
        magnitude = struct.unpack("<f", struct.pack("<I", bits & 0x7FFFFFFF))[0]
        word = int(magnitude * 2.0**24)
    else:
        word = exponent - 127 + 15 << 10 | fraction >> 13
    return word | bits >> 16 & SIGN
