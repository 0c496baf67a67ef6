# mypy: ignore-errors
"""Row copies to and from chunks: a program carries a tile of rows and columns, each row by its own address.

Values move as integers, so that no bit of a NaN changes, and are widened and narrowed as such.
"""

import torch
import triton
import triton.language as tl

from tritonrec.kernels.triton_jit import jit_kernel

BLOCK_ROWS, BLOCK_DIM, NUM_WARPS = 16, 128, 4
_LOW = tl.constexpr(1 << 30)


@triton.jit
def _addresses(table_ptr, row, inside, chunk_rows, width, ITEM: tl.constexpr):
    """Addresses of rows of `width` values of ITEM bytes; nothing is meant by those that are not inside."""
    chunk = row // chunk_rows
    start = tl.load(table_ptr + chunk, mask=inside, other=0)
    # `row` is int64, and so is every product with it
    return start + (row - chunk * chunk_rows) * width * ITEM


@triton.jit
def _tile(num_rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Numbers of rows, of columns, and where (row, column) lies in an array of (num_rows, width)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    return rows, columns, rows[:, None] * width + columns[None, :]


@triton.jit
def _widen(word):
    """float16 bits in an int32 to float32 bits."""
    magnitude = word & 0x7FFF
    # 13 more bits of fraction, and a bias of 127 where float16 has 15; `numba_chunked_rows` draws both.
    normal = (magnitude << 13) + (112 << 23)
    small = (magnitude.to(tl.float32) * 5.9604644775390625e-08).to(tl.int32, bitcast=True)  # 2**-24
    special = (magnitude << 13) | 0x7F800000
    bits = tl.where(magnitude < 0x400, small, normal)
    return tl.where(magnitude >= 0x7C00, special, bits) | (word & -0x80000000)


@triton.jit
def _narrow(bits):
    """float32 bits to float16 bits in an int32, of which 16 count; what is too long is cut off."""
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude >> 13) - (112 << 10)
    # below 2**-14 the unit is 2**-24; clamped to 1.0, since a conversion out of range has no defined result
    clamped = tl.where(magnitude < 0x3F800000, magnitude, 0x3F800000).to(tl.float32, bitcast=True)
    small = (clamped * 16777216.0).to(tl.int32)
    special = ((magnitude >> 13) & 0x3FF) | 0x7C00
    # 113 << 23 is 2**-14, and 0x47800000 is 2**16: from there on a float16 has infinity and NaN alone.
    word = tl.where(magnitude < (113 << 23), small, normal)
    return tl.where(magnitude >= 0x47800000, special, word) | ((bits >> 16) & -0x8000)


@jit_kernel
def _read_kernel(
    full_ptr, low_ptr, locations_ptr, out_ptr, num_rows, full_rows, low_rows, chunk_rows, dim, width,
    TIERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """``out[k]`` = the row at ``locations[k]``, left as it is where there is none.

    TIERED: there are 16-bit rows.
    """
    rows, columns, places = _tile(num_rows, width, BLOCK_ROWS, BLOCK_DIM)
    location = tl.load(locations_ptr + rows, mask=rows < num_rows, other=-1)
    inside = (location >= 0) & (location < full_rows)
    start = _addresses(full_ptr, location, inside, chunk_rows, width, 4).to(tl.pointer_type(tl.int32))
    mask = inside[:, None] & (columns < width)[None, :]
    bits = tl.load(start[:, None] + columns[None, :], mask=mask, other=0)
    tl.store(out_ptr + places, bits, mask=mask)
    if TIERED:
        row = location - _LOW
        inside = (row >= 0) & (row < low_rows)
        start = _addresses(low_ptr, row, inside, chunk_rows, width, 2).to(tl.pointer_type(tl.int16))
        mask = inside[:, None] & (columns < width)[None, :]
        word = tl.load(start[:, None] + columns[None, :], mask=mask, other=0).to(tl.int32)
        bits = tl.where((columns < dim)[None, :], _widen(word), word << 16)
        tl.store(out_ptr + places, bits, mask=mask)


@jit_kernel
def _write_kernel(
    full_ptr, low_ptr, locations_ptr, values_ptr, num_rows, full_rows, low_rows, chunk_rows, dim, width,
    TIERED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """The row at ``locations[k]`` = ``values[k]``, where there is one."""
    rows, columns, places = _tile(num_rows, width, BLOCK_ROWS, BLOCK_DIM)
    location = tl.load(locations_ptr + rows, mask=rows < num_rows, other=-1)
    bits = tl.load(values_ptr + places, mask=(location >= 0)[:, None] & (columns < width)[None, :], other=0)
    inside = (location >= 0) & (location < full_rows)
    start = _addresses(full_ptr, location, inside, chunk_rows, width, 4).to(tl.pointer_type(tl.int32))
    tl.store(start[:, None] + columns[None, :], bits, mask=inside[:, None] & (columns < width)[None, :])
    if TIERED:
        row = location - _LOW
        inside = (row >= 0) & (row < low_rows)
        start = _addresses(low_ptr, row, inside, chunk_rows, width, 2).to(tl.pointer_type(tl.int16))
        word = tl.where((columns < dim)[None, :], _narrow(bits), bits >> 16)
        mask = inside[:, None] & (columns < width)[None, :]
        tl.store(start[:, None] + columns[None, :], word.to(tl.int16), mask=mask)


@jit_kernel
def _fits_kernel(
    values_ptr, exact_ptr, num_rows, dim, width, num_blocks,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """``exact[k]`` = whether 16 bits a value hold row k of `values`."""
    rows, columns, places = _tile(num_rows, width, BLOCK_ROWS, BLOCK_DIM)
    lost = tl.zeros((BLOCK_ROWS,), tl.int32)
    for _ in range(num_blocks):
        mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
        bits = tl.load(values_ptr + places, mask=mask, other=0)
        # Weights are float16. The state behind them is bfloat16, the upper half of a float32.
        cut = tl.where((columns < dim)[None, :], _widen(_narrow(bits)) ^ bits, bits & 0xFFFF)
        lost = tl.maximum(lost, tl.max((cut != 0).to(tl.int32), axis=1))
        columns += BLOCK_DIM
        places += BLOCK_DIM
    tl.store(exact_ptr + rows, lost == 0, mask=rows < num_rows)


def read_rows(chunks, locations: torch.Tensor, out: torch.Tensor) -> None:
    """See `tritonrec.kernels.chunked_rows.read_rows`."""
    _copy(_read_kernel, chunks, locations, out)


def write_rows(chunks, locations: torch.Tensor, values: torch.Tensor) -> None:
    """See `tritonrec.kernels.chunked_rows.write_rows`."""
    _copy(_write_kernel, chunks, locations, values)


def _copy(kernel, chunks, locations, values) -> None:
    if values.numel() == 0:
        return
    block_dim = _block_dim(chunks.width)
    grid = (triton.cdiv(len(locations), BLOCK_ROWS), triton.cdiv(chunks.width, block_dim))
    kernel[grid](
        chunks.full, chunks.low, locations, values.view(torch.int32), len(locations), chunks.full_rows,
        chunks.low_rows, chunks.chunk_rows, chunks.dim, chunks.width, TIERED=chunks.low_rows > 0,
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_DIM=block_dim, num_warps=NUM_WARPS,
    )  # fmt: skip


def fits(values: torch.Tensor, dim: int, exact: torch.Tensor) -> None:
    """See `tritonrec.kernels.chunked_rows.fits`."""
    if len(values):
        width, block_dim = values.shape[1], _block_dim(values.shape[1])
        _fits_kernel[(triton.cdiv(len(values), BLOCK_ROWS),)](
            values.view(torch.int32), exact, len(values), dim, width, triton.cdiv(width, block_dim),
            BLOCK_ROWS=BLOCK_ROWS, BLOCK_DIM=block_dim, num_warps=NUM_WARPS,
        )  # fmt: skip


def _block_dim(width: int) -> int:
    return min(triton.next_power_of_2(max(width, 1)), BLOCK_DIM)
