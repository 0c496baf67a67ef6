"""Philox4x32-10 and its two users in Triton: one program per block of rows and counter blocks.

Words are uint32 throughout; the high half of a product comes from a 64-bit multiplication, which every
backend and the interpreter have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels.philox import reference
from tritonrec.kernels.philox.reference import derive_seed
from tritonrec.kernels.triton_jit import jit_kernel

# A counter block is four words, so a program draws 1,024 words.
COUNTERS, NUM_WARPS = 256, 4


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox: counter (c0..c3) and key (k0, k1), all uint32, to four uint32 words."""
    for _ in tl.static_range(10):
        product_0 = c0.to(tl.uint64) * 0xD2511F53
        product_1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product_1.to(tl.uint32)
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product_0.to(tl.uint32)
        # widened and cut again: a sum modulo 2**32 on every backend
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def low_word(number):
    return (number & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def high_word(number):
    return ((number >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def signed_unit(word):
    """The 24 high bits of a word as a float32 in [-1, 1), exactly."""
    # a float32 holds 24 bits exactly, and the factor is 2**-23
    return ((word >> 8).to(tl.int32) - 8388608).to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def bounded(word, upper):
    """The high half of word * upper: uniform in [0, upper) up to a bias of upper / 2**32."""
    return ((word.to(tl.uint64) * upper.to(tl.uint64)) >> 32).to(tl.int64)


@jit_kernel
def initial_rows_kernel(
    keys_ptr, rows_ptr, seed, table, tag, scale, num_rows, dim, tables_ptr, dims_ptr, scales_ptr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """rows[k, d] = scale * word d of the stream of (seed, table, keys[k]), as a number in [-1, 1).

    Rows of several tables have their own table and scale, and are 0 from their own dim on.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    block = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    key = tl.load(keys_ptr + row, mask=row < num_rows, other=0)
    drawn = dim
    if tables_ptr is not None:
        table = tl.load(tables_ptr + row, mask=row < num_rows, other=0)
        scale = tl.load(scales_ptr + row, mask=row < num_rows, other=0.0)
        drawn = tl.load(dims_ptr + row, mask=row < num_rows, other=0)
    # Adding a zero of the tile's shape gives all four counter words that shape before the first round.
    zero = row * 0 + block * 0
    w0, w1, w2, w3 = philox4x32(
        low_word(key + zero),
        high_word(key + zero),
        low_word(tag + block + zero),
        low_word(table + zero),
        low_word(seed + zero),
        high_word(seed + zero),
    )
    column = block * 4
    out = rows_ptr + row * dim + column
    # four words for four neighbouring columns, of which a row's last block may lack some
    value = tl.where(column < drawn, signed_unit(w0) * scale, 0.0)
    tl.store(out, value, mask=(row < num_rows) & (column < dim))
    value = tl.where(column + 1 < drawn, signed_unit(w1) * scale, 0.0)
    tl.store(out + 1, value, mask=(row < num_rows) & (column + 1 < dim))
    value = tl.where(column + 2 < drawn, signed_unit(w2) * scale, 0.0)
    tl.store(out + 2, value, mask=(row < num_rows) & (column + 2 < dim))
    value = tl.where(column + 3 < drawn, signed_unit(w3) * scale, 0.0)
    tl.store(out + 3, value, mask=(row < num_rows) & (column + 3 < dim))


@jit_kernel
def random_indices_kernel(
    sample_ids_ptr, positions_ptr, indices_ptr, seed, tag, upper, num_rows, count, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """indices[k, n] in [0, upper) from word n of the stream of (seed, sample_ids[k], positions[k])."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    block = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    sample = tl.load(sample_ids_ptr + row, mask=row < num_rows, other=0)
    position = tl.load(positions_ptr + row, mask=row < num_rows, other=0)
    zero = row * 0 + block * 0
    w0, w1, w2, w3 = philox4x32(
        low_word(sample + zero),
        high_word(sample + zero),
        low_word(tag + block + zero),
        low_word(position + zero),
        low_word(seed + zero),
        high_word(seed + zero),
    )
    # the type of a scalar argument depends on its value; the sum is always int64
    limit = zero + upper
    column = block * 4
    out = indices_ptr + row * count + column
    tl.store(out, bounded(w0, limit), mask=(row < num_rows) & (column < count))
    tl.store(out + 1, bounded(w1, limit), mask=(row < num_rows) & (column + 1 < count))
    tl.store(out + 2, bounded(w2, limit), mask=(row < num_rows) & (column + 2 < count))
    tl.store(out + 3, bounded(w3, limit), mask=(row < num_rows) & (column + 3 < count))


def _tile(out: torch.Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and tile of counter blocks, as wide as the row needs."""
    num_rows, counters = out.shape[0], triton.cdiv(out.shape[1], 4)
    blocks = min(64, triton.next_power_of_2(counters))
    rows = COUNTERS // blocks
    tile = {"ROWS": rows, "BLOCKS": blocks, "num_warps": NUM_WARPS}
    return (triton.cdiv(num_rows, rows), triton.cdiv(counters, blocks)), tile


def initial_rows_of_tables(seed, tables, keys, dims, scales, width) -> torch.Tensor:
    """See `tritonrec.ops.initial_rows_of_tables`."""
    return initial_rows(seed, 0, keys, width, 1.0, *(each.contiguous() for each in (tables, dims, scales)))


def initial_rows(seed, table, keys, dim, scale, tables=None, dims=None, scales=None) -> torch.Tensor:
    """See `tritonrec.ops.initial_rows`; with `tables`, `dims` and `scales` of each row, these count."""
    rows = torch.empty(keys.numel(), dim, dtype=torch.float32, device=keys.device)
    if rows.numel():
        grid, tile = _tile(rows)
        numbers = seed, table, reference.INITIAL_ROWS, scale, *rows.shape
        initial_rows_kernel[grid](keys.contiguous(), rows, *numbers, tables, dims, scales, **tile)
    return rows


def random_indices(seed, stream, step, sample_ids, positions, count, upper) -> torch.Tensor:
    """See `tritonrec.ops.random_indices`."""
    indices = sample_ids.new_empty(sample_ids.numel(), count)
    if indices.numel():
        grid, tile = _tile(indices)
        rows, identity = (sample_ids.contiguous(), positions.contiguous()), derive_seed(seed, stream, step)
        sizes = reference.RANDOM_INDICES, upper, *indices.shape
        random_indices_kernel[grid](*rows, indices, identity, *sizes, **tile)
    return indices
