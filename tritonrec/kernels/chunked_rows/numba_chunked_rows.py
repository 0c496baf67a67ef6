# mypy: ignore-errors
"""Row copies to and from chunks, which lie anywhere in memory: one pass, whatever their number and form.

A row number below 2**30 is one of the float32 chunks, others of the 16-bit chunks, whose rows hold `dim`
float16 weights and bfloat16 state. Widening is exact. Narrowing cuts off bits, and is for rows that `fits`
says lose none.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from tritonrec.kernels.caches import njit
from tritonrec.kernels.numba_float import float_of_bits
from tritonrec.kernels.numba_intrinsics import copy, prefetch

AHEAD = 8
"""Rows from one that is copied to one whose first two cache lines are prefetched; the hardware sees a stream
after them. Both kernels do so in place: a function with these arrays as arguments would count references,
which takes longer than the copy."""
_HALF = np.int64(1 << 30)
_WORDS = np.empty(0, np.int16)  # tells the kernels the type of a 16-bit value


def read_rows(chunks, locations: torch.Tensor, out: torch.Tensor) -> None:
    """See `tritonrec.kernels.chunked_rows.read_rows`."""
    _copy(_read_rows, chunks, locations, out)


def write_rows(chunks, locations: torch.Tensor, values: torch.Tensor) -> None:
    """See `tritonrec.kernels.chunked_rows.write_rows`."""
    _copy(_write_rows, chunks, locations, values)


def _copy(kernel, chunks, locations, values) -> None:
    full, low = chunks.full.numpy().view(np.uint64), chunks.low.numpy().view(np.uint64)
    kernel(
        full, low, chunks.chunk_rows, chunks.dim, chunks.width, locations.numpy(), values.view(-1).numpy(),
        _WORDS,
    )  # fmt: skip


def fits(values: torch.Tensor, dim: int, exact: torch.Tensor) -> None:
    """See `tritonrec.kernels.chunked_rows.fits`."""
    _fits(values.view(-1).numpy(), dim, values.shape[1], exact.numpy())


@intrinsic
def _pointer_to(typingctx, address, like):
    """`address` as a pointer to elements of the array `like`."""
    result = types.CPointer(like.dtype)

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(result))

    return result(types.uint64, like), codegen


@intrinsic
def _bits(typingctx, value):
    """The bit pattern of a float32 as int32."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@njit(inline="always")
def _row(addresses, row, chunk_rows, width, like):
    """The row as an array (width,) that shares its memory."""
    chunk = np.int64(np.uint32(row) // np.uint32(chunk_rows))  # of 64 bits it takes longer than the copy
    address = addresses[chunk] + np.uint64((row - chunk * chunk_rows) * width * like.itemsize)
    return carray(_pointer_to(address, like), (width,))


@njit(inline="always")
def _widen(word):
    """float16 bits in an int16 to a float32; the same numbers, without leaning on subnormal arithmetic."""
    wide = np.int32(word)
    sign = wide & np.int32(-0x80000000)
    magnitude = wide & np.int32(0x7FFF)
    #     float16    sign | 5 bits of exponent, bias 15  | 10 of fraction
    #     float32    sign | 8 bits of exponent, bias 127 | 23 of fraction      13 more; 127 - 15 = 112
    # Below 2**-14 a float16 is a multiple of 2**-24, whatever its bits look like.
    # Infinity and NaN keep their exponent of ones.
    normal = (magnitude << np.int32(13)) + np.int32(112 << 23)
    small = _bits(np.float32(magnitude) * np.float32(2.0**-24))
    special = (magnitude << np.int32(13)) | np.int32(0x7F800000)
    bits = small if magnitude < np.int32(0x400) else normal
    bits = special if magnitude >= np.int32(0x7C00) else bits
    return float_of_bits(bits | sign)


@njit(inline="always")
def _narrow(value):
    """float16 bits of a float32 that is a float16 number; of others, some other number's."""
    bits = _bits(value)
    magnitude = bits & np.int32(0x7FFFFFFF)
    normal = (magnitude >> np.int32(13)) - np.int32(112 << 10)
    # below 2**-14 the unit is 2**-24; clamped, since a conversion out of range has no defined result
    small = np.int32(min(abs(value), np.float32(1.0)) * np.float32(2.0**24))
    word = small if magnitude < np.int32(113 << 23) else normal
    special = np.int32(0x7C00) | ((magnitude >> np.int32(13)) & np.int32(0x3FF))
    word = special if magnitude >= np.int32(0x47800000) else word
    return np.int16(word | ((bits >> np.int32(16)) & np.int32(-0x8000)))


@njit(cache=True, nogil=True)
def _fits(values, dim, width, exact):
    """``exact[i]`` = whether 16 bits a value hold row i of `values`, flat (K * width,), bit by bit."""
    for i in range(len(exact)):
        lost = np.int32(0)
        for j in range(i * width, i * width + dim):
            # There and back: any bit that differs is lost.
            lost |= _bits(_widen(_narrow(values[j]))) ^ _bits(values[j])
        for j in range(i * width + dim, (i + 1) * width):
            # bfloat16 is the upper half of a float32.
            lost |= _bits(values[j]) & np.int32(0xFFFF)
        exact[i] = lost == 0


@njit(cache=True, nogil=True)
def _read_rows(full, half, chunk_rows, dim, width, rows, out, words):
    """``out[i]`` = row ``rows[i]``, left as it is where that is negative; `out` is flat, (K * width,).

    `full` and `half` are addresses of chunks; `words` is any int16 array.
    """
    for i in range(len(rows)):
        ahead = rows[i + AHEAD] if i + AHEAD < len(rows) else np.int64(-1)
        if ahead >= _HALF:
            line = _row(half, ahead - _HALF, chunk_rows, width, words)
            prefetch(line, np.uint64(0))
            prefetch(line, np.uint64(min(32, width - 1)))
        elif ahead >= 0:
            line = _row(full, ahead, chunk_rows, width, out)
            prefetch(line, np.uint64(0))
            prefetch(line, np.uint64(min(16, width - 1)))
        first = i * width
        if rows[i] >= _HALF:
            stored = _row(half, rows[i] - _HALF, chunk_rows, width, words)
            for j in range(dim):
                out[first + j] = _widen(stored[j])
            for j in range(dim, width):
                out[first + j] = float_of_bits(np.int32(stored[j]) << np.int32(16))
        elif rows[i] >= 0:
            row = _row(full, rows[i], chunk_rows, width, out)
            copy(out, np.uint64(first), row, np.uint64(0), np.uint64(width))


@njit(cache=True, nogil=True)
def _write_rows(full, half, chunk_rows, dim, width, rows, values, words):
    """Row ``rows[i]`` = ``values[i]``, where that is not negative; `values` is flat, (K * width,)."""
    for i in range(len(rows)):
        ahead = rows[i + AHEAD] if i + AHEAD < len(rows) else np.int64(-1)
        if ahead >= _HALF:
            line = _row(half, ahead - _HALF, chunk_rows, width, words)
            prefetch(line, np.uint64(0))
            prefetch(line, np.uint64(min(32, width - 1)))
        elif ahead >= 0:
            line = _row(full, ahead, chunk_rows, width, values)
            prefetch(line, np.uint64(0))
            prefetch(line, np.uint64(min(16, width - 1)))
        first = i * width
        if rows[i] >= _HALF:
            stored = _row(half, rows[i] - _HALF, chunk_rows, width, words)
            for j in range(dim):
                stored[j] = _narrow(values[first + j])
            for j in range(dim, width):
                stored[j] = np.int16(_bits(values[first + j]) >> np.int32(16))
        elif rows[i] >= 0:
            row = _row(full, rows[i], chunk_rows, width, values)
            copy(row, np.uint64(0), values, np.uint64(first), np.uint64(width))


@njit(cache=True, nogil=True)
def first_outside(rows, full_rows, half_rows):
    """Position of the first row number beyond the rows there are, or -1; negative ones are inside."""
    for i in range(len(rows)):
        if rows[i] >= (_HALF + half_rows if rows[i] >= _HALF else full_rows):
            return i
    return -1
