# mypy: ignore-errors
"""HSTU attention's gradients in Triton.

    rows        owns BLOCK_M queries, walks the keys they see          dQ
    columns     owns BLOCK_M keys, walks the queries that see them     dK, dV, and with ATOMIC dQ by atomics

SiLU needs no statistics of a row, so dQ and dK, dV can be summed apart: rows and columns have seven matrix
products, no lock, no atomic, and no output that has to be zero before.
"""

import triton
import triton.language as tl

from tritonrec.kernels.hstu_attention.triton_bias import add_bias, load_scales, load_times
from tritonrec.kernels.hstu_attention.triton_forward import product, sigmoid
from tritonrec.kernels.hstu_attention.triton_mask import (
    block_of,
    clear_keys,
    key_blocks,
    masked_queries,
    query_blocks,
    visible,
)
from tritonrec.kernels.hstu_attention.triton_tiles import (
    find_tile,
    load_rows,
    open_sequence,
    store_rows,
    tile_of,
)


@triton.jit
def slope(x, PTX: tl.constexpr):
    """The derivative of x * sigmoid(x)."""
    s = sigmoid(x, PTX)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def rows_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, do_strides, q_strides, k_strides, v_strides, dq_strides, layout,
    rules, bias, scales_ptr, tiles_ptr, count_ptr, num_heads, dim_qk, dim_v, alpha, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """dQ = alpha * scale * dS K, the walk of the forward kernel."""
    for tile in range(tl.program_id(0), tl.load(count_ptr) * num_heads, tl.num_programs(0)):
        level, sequence = find_tile(tile // num_heads, tiles_ptr)
        head = tile % num_heads
        begin, length, history, contexts, hidden, origin = open_sequence(sequence, layout)
        first = (level + hidden // BLOCK_M) * BLOCK_M
        row = first + tl.arange(0, BLOCK_M)
        row_stop = tl.minimum(first + BLOCK_M, length)
        least = tl.maximum(first, hidden)
        row_time = load_times(bias.row_times_ptr, begin, row, length)
        q = load_rows(q_ptr, q_strides, origin, head, row, length, dim_qk, BLOCK_QK, hidden)
        do = load_rows(do_ptr, do_strides, origin, head, row, length, dim_v, BLOCK_V, hidden)
        dq = tl.zeros((BLOCK_M, BLOCK_QK), tl.float32)
        walk = key_blocks(least, row_stop, history, contexts, rules, BLOCK_N)
        clear = clear_keys(least, history, rules, BLOCK_N)
        for masked in tl.static_range(2):
            for n in range(clear * masked, walk.count if masked else clear):
                start = block_of(n, walk) * BLOCK_N
                column = start + tl.arange(0, BLOCK_N)
                k = load_rows(k_ptr, k_strides, begin, head, column, length, dim_qk, BLOCK_QK)
                v = load_rows(v_ptr, v_strides, begin, head, column, length, dim_v, BLOCK_V)
                column_time = load_times(bias.times_ptr, begin, column, length)
                x = alpha * product(q, tl.trans(k), PRECISION)
                x = add_bias(x, row[:, None], column[None, :], row_time[:, None], column_time[None, :], bias)
                ds = product(do, tl.trans(v), PRECISION) * slope(x, PTX)
                if masked:
                    ds = tl.where(visible(row[:, None], column[None, :], history, contexts, rules), ds, 0.0)
                dq += product(ds.to(k.dtype), k, PRECISION)
        # a query's scale is the same in every term of its sum, so one product at the end is enough
        dq = dq * (load_scales(scales_ptr, origin, row, length, hidden) * (alpha * scale))[:, None]
        store_rows(dq, dq_ptr, dq_strides, origin, head, row, length, dim_qk, BLOCK_QK, hidden)


@triton.jit
def columns_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, dq_ptr, do_strides, q_strides, k_strides, v_strides,
    dk_strides, dv_strides, dq_strides, layout, rules, bias, scales_ptr, tiles_ptr, count_ptr, num_heads,
    dim_qk, dim_v, alpha, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """dK = alpha * scale * dS^T Q and dV = scale * P^T dO."""
    for tile in range(tl.program_id(0), tl.load(count_ptr) * num_heads, tl.num_programs(0)):
        level, sequence = find_tile(tile // num_heads, tiles_ptr)
        head = tile % num_heads
        begin, length, history, contexts, hidden, origin = open_sequence(sequence, layout)
        # here the first blocks have the longest walks
        first = ((length + BLOCK_M - 1) // BLOCK_M - 1 - level) * BLOCK_M
        column = first + tl.arange(0, BLOCK_M)
        column_stop = tl.minimum(first + BLOCK_M, length)
        column_time = load_times(bias.times_ptr, begin, column, length)
        k = load_rows(k_ptr, k_strides, begin, head, column, length, dim_qk, BLOCK_QK)
        v = load_rows(v_ptr, v_strides, begin, head, column, length, dim_v, BLOCK_V)
        dk = tl.zeros((BLOCK_M, BLOCK_QK), tl.float32)
        dv = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        # The transposed walk: this program owns keys, which are the rows of its tiles, and meets queries.
        walk = query_blocks(first, column_stop, length, history, contexts, hidden, rules, BLOCK_N)
        first_clear = masked_queries(column_stop, history, walk, rules, BLOCK_N)
        for clear in tl.static_range(2):
            for n in range(first_clear * clear, walk.count if clear else first_clear):
                start = block_of(n, walk) * BLOCK_N
                row = start + tl.arange(0, BLOCK_N)
                q = load_rows(q_ptr, q_strides, origin, head, row, length, dim_qk, BLOCK_QK, hidden)
                do = load_rows(do_ptr, do_strides, origin, head, row, length, dim_v, BLOCK_V, hidden)
                row_time = load_times(bias.row_times_ptr, begin, row, length)
                x = alpha * product(k, tl.trans(q), PRECISION)
                x = add_bias(x, row[None, :], column[:, None], row_time[None, :], column_time[:, None], bias)
                p = x * sigmoid(x, PTX)
                ds = product(v, tl.trans(do), PRECISION) * slope(x, PTX)
                # a scale per token differs along the sums of dK and dV, so it goes into each term
                if scales_ptr is not None:
                    of_row = load_scales(scales_ptr, origin, row, length, hidden)[None, :]
                    p *= of_row
                    ds *= of_row
                # rows without a query have q and dO of 0, so their terms of dK and dV are 0 without a mask
                if not clear:
                    seen = visible(row[None, :], column[:, None], history, contexts, rules)
                    p = tl.where(seen, p, 0.0)
                    ds = tl.where(seen, ds, 0.0)
                dk += product(ds.to(q.dtype), q, PRECISION)
                dv += product(p.to(do.dtype), do, PRECISION)
                if ATOMIC:
                    dq = product(tl.trans(ds.to(k.dtype)), k, PRECISION) * (alpha * scale)
                    address, exists = tile_of(dq_ptr, dq_strides, origin, head, row, dim_qk, BLOCK_QK)
                    mask = ((row >= hidden) & (row < length))[:, None] & exists
                    # relaxed: only later kernels read dq; the schedule orders the additions
                    tl.atomic_add(address, dq, mask=mask, sem="relaxed")
        store_rows(dk * (alpha * scale), dk_ptr, dk_strides, begin, head, column, length, dim_qk, BLOCK_QK)
        store_rows(dv * scale, dv_ptr, dv_strides, begin, head, column, length, dim_v, BLOCK_V)
