# mypy: ignore-errors
"""Gradients of the relative bias's tables in Triton: one sequence at a time, in fixed orders, no atomics.

    positions   owns BLOCK_M diagonals of a sequence and walks down along them: two blocks of pairs hold the
                part of BLOCK_M diagonals that BLOCK_M rows have, and a gather turns diagonals into columns
    times       owns BLOCK_M queries of a sequence, walks the keys they see, and adds up the buckets that a
                block of pairs really has: far from the diagonal these are one or two
    parts       adds up the sums of a sequence's blocks of queries

Every program takes all heads, in order, because they share the tables.
"""

import triton
import triton.language as tl

from tritonrec.kernels.hstu_attention.triton_backward import slope
from tritonrec.kernels.hstu_attention.triton_bias import add_bias, bucket_of, load_scales, load_times
from tritonrec.kernels.hstu_attention.triton_forward import product
from tritonrec.kernels.hstu_attention.triton_mask import block_of, key_blocks, visible
from tritonrec.kernels.hstu_attention.triton_tiles import find_tile, load_rows, open_sequence


@triton.jit
def score_gradients(
    q, do, row, row_time, of_row, column, k_ptr, v_ptr, k_strides, v_strides, begin, head, length, history,
    contexts, rules, bias, dim_qk, dim_v, alpha,
    BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """dS of a block of pairs, zero where a query does not see a key."""
    k = load_rows(k_ptr, k_strides, begin, head, column, length, dim_qk, BLOCK_QK, 0)
    v = load_rows(v_ptr, v_strides, begin, head, column, length, dim_v, BLOCK_V, 0)
    column_time = load_times(bias.times_ptr, begin, column, length)
    x = alpha * product(q, tl.trans(k), PRECISION)
    x = add_bias(x, row[:, None], column[None, :], row_time[:, None], column_time[None, :], bias)
    ds = product(do, tl.trans(v), PRECISION) * slope(x, PTX) * of_row[:, None]
    seen = visible(row[:, None], column[None, :], history, contexts, rules) & (column >= 0)[None, :]
    return tl.where(seen, ds, 0.0), column_time


@triton.jit
def positions_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, dpos_ptr, do_strides, q_strides, k_strides, v_strides, layout, rules, bias,
    scales_ptr, tiles_ptr, count_ptr, num_heads, dim_qk, dim_v, alpha, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """dpos[sequence, base + sign (j - i)] for BLOCK_M distances i - j at a time, (B, entries) zero before."""
    for tile in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        level, sequence = find_tile(tile, tiles_ptr)
        begin, length, history, contexts, hidden, origin = open_sequence(sequence, layout)
        # the diagonals near distance 0 are the longest, so they come first
        block = (length + BLOCK_M - 1) // BLOCK_M - 1 - level
        sides = 1
        if rules.contextual is not None:
            sides = 2
        for side in range(0, sides):
            # side 1 has the negative distances, from a query to later keys
            distance = tl.where(side == 0, block, -1 - block) * BLOCK_M
            stop = length
            if rules.contextual is not None:  # only they see later tokens
                stop = tl.where(side == 0, length, contexts)
            acc = tl.zeros((BLOCK_M,), tl.float32)
            for head in range(tl.full((), 0, tl.int64), num_heads):
                for first in range(tl.maximum(distance, hidden // BLOCK_M * BLOCK_M), stop, BLOCK_M):
                    row = first + tl.arange(0, BLOCK_M)
                    row_time = load_times(bias.row_times_ptr, begin, row, length)
                    of_row = load_scales(scales_ptr, origin, row, length, hidden) * scale
                    q = load_rows(q_ptr, q_strides, origin, head, row, length, dim_qk, BLOCK_QK, hidden)
                    do = load_rows(do_ptr, do_strides, origin, head, row, length, dim_v, BLOCK_V, hidden)
                    for half in range(0, 2):
                        # key i - d of row i lies in one of two blocks, since both i and d vary by BLOCK_M
                        left = first - distance - half * BLOCK_M
                        if (left > -BLOCK_M) & (left < length):
                            ds, _times = score_gradients(
                                q, do, row, row_time, of_row, left + tl.arange(0, BLOCK_M), k_ptr, v_ptr,
                                k_strides, v_strides, begin, head, length, history, contexts, rules, bias,
                                dim_qk, dim_v, alpha, BLOCK_QK, BLOCK_V, PRECISION, PTX,
                            )  # fmt: skip
                            # Element (r, c) of the block is on the diagonal r
                            # - c + half * BLOCK_M of this program's BLOCK_M.
                            at = (
                                tl.arange(0, BLOCK_M)[:, None]
                                - tl.arange(0, BLOCK_M)[None, :]
                                + half * BLOCK_M
                            )
                            # tl.gather takes no mask: a place outside reads place 0 and is dropped
                            inside = (at >= 0) & (at < BLOCK_M)
                            along = tl.gather(ds, tl.where(inside, at, 0), 1)
                            acc += tl.sum(tl.where(inside, along, 0.0), axis=0)
            entry = bias.base - bias.sign * (distance + tl.arange(0, BLOCK_M))
            to = dpos_ptr + sequence * (bias.most + 1) + entry
            tl.store(to, acc * bias.factor, mask=(entry >= 0) & (entry <= bias.most))


@triton.jit
def times_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, parts_ptr, do_strides, q_strides, k_strides, v_strides, layout, rules, bias,
    scales_ptr, tiles_ptr, count_ptr, num_heads, dim_qk, dim_v, alpha, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Sums of dS by bucket for BLOCK_M queries at a time, to the part of the block (see `parts_kernel`)."""
    entry = tl.arange(0, ENTRIES)
    for tile in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        level, sequence = find_tile(tile, tiles_ptr)
        begin, length, history, contexts, hidden, origin = open_sequence(sequence, layout)
        # Blocks in which no token has a query have no level.
        first = (level + hidden // BLOCK_M) * BLOCK_M
        row = first + tl.arange(0, BLOCK_M)
        row_time = load_times(bias.row_times_ptr, begin, row, length)
        of_row = load_scales(scales_ptr, origin, row, length, hidden) * scale
        walk = key_blocks(
            tl.maximum(first, hidden), tl.minimum(first + BLOCK_M, length), history, contexts, rules, BLOCK_N
        )
        acc = tl.zeros((ENTRIES,), tl.float32)
        for head in range(tl.full((), 0, tl.int64), num_heads):
            q = load_rows(q_ptr, q_strides, origin, head, row, length, dim_qk, BLOCK_QK, hidden)
            do = load_rows(do_ptr, do_strides, origin, head, row, length, dim_v, BLOCK_V, hidden)
            for n in range(0, walk.count):
                column = block_of(n, walk) * BLOCK_N + tl.arange(0, BLOCK_N)
                ds, column_time = score_gradients(
                    q, do, row, row_time, of_row, column, k_ptr, v_ptr, k_strides, v_strides, begin, head,
                    length, history, contexts, rules, bias, dim_qk, dim_v, alpha, BLOCK_QK, BLOCK_V,
                    PRECISION, PTX,
                )  # fmt: skip
                # only the buckets from the lowest to the highest are visited: one or two, as a rule
                bucket = bucket_of(row_time[:, None], column_time[None, :], bias)
                used = ds != 0.0
                lowest = tl.min(tl.min(tl.where(used, bucket, bias.last), axis=1), axis=0)
                highest = tl.max(tl.max(tl.where(used, bucket, 0), axis=1), axis=0)
                for e in range(lowest, highest + 1):
                    part = tl.sum(tl.sum(tl.where(bucket == e, ds, 0.0), axis=1), axis=0)
                    acc += tl.where(entry == e, part, 0.0)
        # a partial block at a sequence's end has a part of its own, for which `sequence` makes room
        part = begin // BLOCK_M + sequence + first // BLOCK_M
        tl.store(parts_ptr + part * ENTRIES + entry, acc * bias.factor)


@triton.jit
def parts_kernel(parts_ptr, dts_ptr, layout, entries, BLOCK_M: tl.constexpr, ENTRIES: tl.constexpr):
    """dts[sequence] = sum of its blocks' parts, in order; block n has begin // BLOCK_M + sequence + n."""
    sequence = tl.program_id(0).to(tl.int64)
    begin, length, _, _, hidden, _ = open_sequence(sequence, layout)
    entry = tl.arange(0, ENTRIES)
    acc = tl.zeros((ENTRIES,), tl.float32)
    # a sequence without queries has no tiles, so nobody wrote its parts
    stop = tl.where(hidden < length, (length + BLOCK_M - 1) // BLOCK_M, 0)
    for block in range(hidden // BLOCK_M, stop):
        part = begin // BLOCK_M + sequence + block
        acc += tl.load(parts_ptr + part * ENTRIES + entry)
    tl.store(dts_ptr + sequence * entries + entry, acc, mask=entry < entries)
