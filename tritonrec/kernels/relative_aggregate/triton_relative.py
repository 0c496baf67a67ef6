# mypy: ignore-errors
"""Relative aggregation in Triton: a program owns rows of a sequence, or entries of the table, and walks.

    forward   owns query rows, walks keys up to the diagonal             out
    values    owns key rows, walks queries from the diagonal on          dv
    table     owns some entries of one sequence's table, walks all pairs of blocks that can fall into them

There are no atomics and no locks. Sums run along one sequence in blocks counted from the sequence's start,
with block sizes chosen by D alone, so the bits of a sequence depend neither on its batch, nor on
`max_seq_len`, nor on the schedule. Products are full float32, never TF32, also of
values of lower precision, which are widened.

Buckets are integers on the way: a difference of two int64 times is read as the uint64 it is, whose sign bit
means 2**63 or more.

A program owns BLOCK_M rows and takes BLOCK_N others at a step.

Dimensions: B sequences, L tokens, H heads, D features of a head (padded to a power of two), R buckets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels import dispatch
from tritonrec.kernels.head_layout import contiguous_heads
from tritonrec.kernels.hstu_attention.triton_forward import product
from tritonrec.kernels.triton_jit import jit_kernel
from tritonrec.kernels.triton_sequences import load_rows, locate, store_rows

MOST_PROGRAMS = 65535  # a launch may have no more along an axis
ENTRIES = 16  # of the table, owned by one program


@triton.jit
def log2_of_difference(late, early):
    """floor(log2(max(1, late - early))) of int64 times, as int32."""
    rest = late - early  # wraps where the difference leaves int64, and is then read as uint64
    huge = (late > early) & (rest < 0)
    rest = tl.where((late > early) & (rest > 0), rest, 1)
    bits = tl.zeros(rest.shape, tl.int32)
    for step in tl.static_range(6):
        shift = 32 >> step
        large = (rest >> shift) > 0
        bits += tl.where(large, shift, 0)
        rest = tl.where(large, rest >> shift, rest)
    return tl.where(huge, 63, bits)


@triton.jit
def load_times(times_ptr, begin, row, length, HAS_TIMES: tl.constexpr):
    """Timestamps of rows of a sequence; anything without timestamps."""
    if HAS_TIMES:
        return tl.load(times_ptr + begin + row, mask=row < length, other=0)
    else:
        return row


@triton.jit
def bucket_of(query, key, query_time, key_time, buckets, HAS_TIMES: tl.constexpr):
    """Buckets of pairs of places in a sequence, of two shapes that broadcast; only for key <= query."""
    if HAS_TIMES:
        bucket = log2_of_difference(query_time, key_time)
    else:
        bucket = query - key
    return tl.minimum(bucket, buckets - 1)


@jit_kernel
def forward_kernel(
    v_ptr, out_ptr, v_row, v_head, out_row, out_head, table_ptr, times_ptr, offsets_ptr, num_tiles,
    num_sequences, num_heads, dim, buckets,
    HAS_TIMES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out for BLOCK_M query rows at a time."""
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        # the last rows have the most keys to walk, so they go first
        block, head, _, begin, length = locate(num_tiles - 1 - tile, num_sequences, num_heads, offsets_ptr)
        first = block * BLOCK_M
        if first < length:
            row = first + tl.arange(0, BLOCK_M)
            row_time = load_times(times_ptr, begin, row, length, HAS_TIMES)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for start in range(0, tl.minimum(first + BLOCK_M, length), BLOCK_N):
                column = start + tl.arange(0, BLOCK_N)
                column_time = load_times(times_ptr, begin, column, length, HAS_TIMES)
                bucket = bucket_of(
                    row[:, None], column[None, :], row_time[:, None], column_time[None, :], buckets, HAS_TIMES
                )
                seen = (column[None, :] <= row[:, None]) & (row < length)[:, None]
                # a hidden pair's bucket may be negative: the mask keeps it from memory and makes its weight 0
                weight = tl.load(table_ptr + head * buckets + bucket, mask=seen, other=0.0)
                v = load_rows(v_ptr, v_row, v_head, begin, head, column, length, dim, BLOCK_D).to(tl.float32)
                acc += product(weight, v, PRECISION)
            store_rows(acc, out_ptr, out_row, out_head, begin, head, row, length, dim, BLOCK_D)


@jit_kernel
def values_kernel(
    do_ptr, dv_ptr, do_row, do_head, dv_row, dv_head, table_ptr, times_ptr, offsets_ptr, num_tiles,
    num_sequences, num_heads, dim, buckets,
    HAS_TIMES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dv for BLOCK_M key rows at a time; keys are the rows of every matrix here."""
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        # the first keys have the most queries to walk, so tiles ascend
        block, head, _, begin, length = locate(tile, num_sequences, num_heads, offsets_ptr)
        first = block * BLOCK_M
        if first < length:
            column = first + tl.arange(0, BLOCK_M)
            column_time = load_times(times_ptr, begin, column, length, HAS_TIMES)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for start in range(first, length, BLOCK_N):
                row = start + tl.arange(0, BLOCK_N)
                row_time = load_times(times_ptr, begin, row, length, HAS_TIMES)
                bucket = bucket_of(
                    row[None, :], column[:, None], row_time[None, :], column_time[:, None], buckets, HAS_TIMES
                )
                seen = (column[:, None] <= row[None, :]) & (row < length)[None, :]
                weight = tl.load(table_ptr + head * buckets + bucket, mask=seen, other=0.0)
                do = load_rows(do_ptr, do_row, do_head, begin, head, row, length, dim, BLOCK_D).to(tl.float32)
                acc += product(weight, do, PRECISION)
            store_rows(acc, dv_ptr, dv_row, dv_head, begin, head, column, length, dim, BLOCK_D)


@jit_kernel
def table_kernel(
    do_ptr, v_ptr, do_row, do_head, v_row, v_head, dtable_ptr, times_ptr, offsets_ptr, num_tiles,
    num_sequences, num_heads, dim, buckets,
    HAS_TIMES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Each sequence's gradient of ENTRIES entries of the table at a time."""
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        block, head, sequence, begin, length = locate(tile, num_sequences, num_heads, offsets_ptr)
        # Entries are owned, not rows: a row's pairs fall into many entries, and adding them from many
        # programs would take atomics, whose order shows in float32.
        first = block * ENTRIES
        entry = first + tl.arange(0, ENTRIES)
        acc = tl.zeros((ENTRIES,), tl.float32)
        for top in range(0, length, BLOCK_M):
            row = top + tl.arange(0, BLOCK_M)
            row_time = load_times(times_ptr, begin, row, length, HAS_TIMES)
            do = load_rows(do_ptr, do_row, do_head, begin, head, row, length, dim, BLOCK_D).to(tl.float32)
            left = 0
            right = tl.minimum(top + BLOCK_M, length)
            if not HAS_TIMES:
                # A diagonal enters a block of rows at top - entry; the last entry has all from its own on.
                right = tl.minimum(right, tl.maximum(top + BLOCK_M - first, 0))
                lowest = tl.maximum(top - first - ENTRIES + 1, 0) // BLOCK_N * BLOCK_N
                left = tl.where(first + ENTRIES >= buckets, 0, lowest)
            for start in range(left, right, BLOCK_N):
                column = start + tl.arange(0, BLOCK_N)
                column_time = load_times(times_ptr, begin, column, length, HAS_TIMES)
                v = load_rows(v_ptr, v_row, v_head, begin, head, column, length, dim, BLOCK_D).to(tl.float32)
                bucket = bucket_of(
                    row[:, None], column[None, :], row_time[:, None], column_time[None, :], buckets, HAS_TIMES
                )
                seen = (column[None, :] <= row[:, None]) & (row < length)[:, None]
                score = product(do, tl.trans(v), PRECISION)
                for e in range(ENTRIES):
                    mine = tl.where(seen & (bucket == first + e), score, 0.0)
                    acc += tl.where(entry == first + e, tl.sum(tl.sum(mine, axis=1), axis=0), 0.0)
        to = dtable_ptr + (sequence * num_heads + head) * buckets + entry
        tl.store(to, acc, mask=entry < buckets)


# Rows that a program owns, rows that it takes at a step, warps; by head dimension, for what compiles without
# spilling. Nothing here was timed.
BLOCKS = {16: (64, 16, 4), 32: (64, 16, 4), 64: (64, 16, 4), 128: (32, 16, 4), 256: (32, 16, 8)}


def configuration(v: torch.Tensor) -> dict[str, int]:
    """Block sizes and warps: a function of D and the device, so that no batch changes a result."""
    # tl.dot takes no dimension below 16
    block_d = max(16, triton.next_power_of_2(v.shape[2]))
    block_m, block_n, num_warps = BLOCKS[min(block_d, 256)]
    precision = "ieee"
    if dispatch.capability(v) >= (8, 0) and block_d <= 128:  # three bfloat16 of a float32, on tensor cores
        precision, block_m = "bf16x6", 64
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "num_warps": num_warps, "num_stages": 2,
        "PRECISION": precision, "enable_fp_fusion": False,
    }  # fmt: skip


def launch(kernel, one, other, table, seq_offsets, timestamps, blocks, config) -> None:
    """One program per block, head and sequence; those past an end do nothing. `table`: read or written."""
    sequences, heads = seq_offsets.shape[0] - 1, one.shape[1]
    tiles = blocks * sequences * heads
    if tiles == 0:
        return
    kernel[(min(tiles, MOST_PROGRAMS),)](
        one, other, *one.stride()[:2], *other.stride()[:2], table,
        seq_offsets if timestamps is None else timestamps.contiguous(), seq_offsets.contiguous(), tiles,
        sequences, heads, one.shape[2], table.shape[-1], HAS_TIMES=timestamps is not None, **config,
    )  # fmt: skip


def forward(v, table, seq_offsets, max_seq_len, timestamps, out) -> None:
    """Overwrite `out` (L, H, D), whatever it held."""
    v, config = contiguous_heads(v), configuration(v)
    blocks = triton.cdiv(max_seq_len, config["BLOCK_M"])
    launch(forward_kernel, v, out, table.contiguous(), seq_offsets, timestamps, blocks, config)


def backward(do, v, table, seq_offsets, max_seq_len, timestamps, dv, dtable) -> None:
    """Overwrite dv (L, H, D) and dtable (B, H, R), whatever they held."""
    do, v, config = contiguous_heads(do), contiguous_heads(v), configuration(v)
    blocks = triton.cdiv(max_seq_len, config["BLOCK_M"])
    launch(values_kernel, do, dv, table.contiguous(), seq_offsets, timestamps, blocks, config)
    config["ENTRIES"] = ENTRIES
    blocks = triton.cdiv(table.shape[1], ENTRIES)
    launch(table_kernel, do, v, dtable, seq_offsets, timestamps, blocks, config)


def relative_aggregate(v, table, seq_offsets, max_seq_len, timestamps) -> torch.Tensor:
    """See `tritonrec.kernels.relative_aggregate.op.relative_aggregate`."""
    if v.numel() == 0:
        return v.new_zeros(v.shape)
    out = v.new_empty(v.shape)
    forward(v, table, seq_offsets, max_seq_len, timestamps, out)
    return out


def relative_aggregate_backward(
    do, v, table, seq_offsets, max_seq_len, timestamps
) -> tuple[torch.Tensor, torch.Tensor]:
    """dv (L, H, D), and each sequence's gradient of the table, (B, H, R), both contiguous."""
    shape = (seq_offsets.shape[0] - 1, *table.shape)
    if v.numel() == 0:
        return v.new_zeros(v.shape), table.new_zeros(shape)
    dv, dtable = v.new_empty(v.shape), table.new_empty(shape)
    backward(do, v, table, seq_offsets, max_seq_len, timestamps, dv, dtable)
    return dv, dtable
