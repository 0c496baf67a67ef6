# mypy: ignore-errors
"""HSTU attention's gradients in Triton.

    rows        owns BLOCK_M queries, walks the keys they see          dQ
    columns     owns BLOCK_M keys, walks the queries that see them     dK, dV, and with ATOMIC dQ by atomics
    sequences   owns a head of a sequence, one block of keys at a time     dQ, dK, dV

SiLU needs no statistics of a row, so dQ and dK, dV can be summed apart: rows and columns have seven matrix
products, no lock, no atomic, and no output that has to be zero before. Sequences has five, and as
many programs as there are sequences and heads.
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
    WIDEN: tl.constexpr, PTX: tl.constexpr,
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
                x = alpha * product(q, tl.trans(k), WIDEN)
                x = add_bias(x, row[:, None], column[None, :], row_time[:, None], column_time[None, :], bias)
                ds = product(do, tl.trans(v), WIDEN) * slope(x, PTX)
                if masked:
                    ds = tl.where(visible(row[:, None], column[None, :], history, contexts, rules), ds, 0.0)
                dq += product(ds.to(k.dtype), k, WIDEN)
        # a query's scale is the same in every term of its sum, so one product at the end is enough
        dq = dq * (load_scales(scales_ptr, origin, row, length, hidden) * (alpha * scale))[:, None]
        store_rows(dq, dq_ptr, dq_strides, origin, head, row, length, dim_qk, BLOCK_QK, hidden)


@triton.jit
def block_of_columns(
    first, begin, length, history, contexts, hidden, origin, fresh, head, do_ptr, q_ptr, k_ptr, v_ptr, dk_ptr,
    dv_ptr, dq_ptr, do_strides, q_strides, k_strides, v_strides, dk_strides, dv_strides, dq_strides, rules,
    bias, scales_ptr, dim_qk, dim_v, alpha, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    WIDEN: tl.constexpr, PTX: tl.constexpr, DQ: tl.constexpr,
):  # fmt: skip
    """dK and dV of keys [first, first + BLOCK_M), which are the rows of every matrix here.

    DQ: "" leaves dQ alone, "atomic" adds to it atomically, "in place" by load and store, or by store alone
    where it is `fresh`; with the scale for queries behind the contextual tokens, once they have all terms.
    """
    column = first + tl.arange(0, BLOCK_M)
    column_stop = tl.minimum(first + BLOCK_M, length)
    column_time = load_times(bias.times_ptr, begin, column, length)
    k = load_rows(k_ptr, k_strides, begin, head, column, length, dim_qk, BLOCK_QK)
    v = load_rows(v_ptr, v_strides, begin, head, column, length, dim_v, BLOCK_V)
    dk = tl.zeros((BLOCK_M, BLOCK_QK), tl.float32)
    dv = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    # The transposed walk: this program owns keys, which are the rows of its tiles, and meets queries.
    walk = query_blocks(first, column_stop, length, history, contexts, hidden, rules, BLOCK_N)
    # a second loop is worth its registers where the compiler has them: AMD's would spill hundreds of bytes
    first_clear = walk.count
    if PTX or WIDEN:
        first_clear = masked_queries(column_stop, history, walk, rules, BLOCK_N)
    for clear in tl.static_range(2 if PTX or WIDEN else 1):
        for n in range(first_clear * clear, walk.count if clear else first_clear):
            start = block_of(n, walk) * BLOCK_N
            row = start + tl.arange(0, BLOCK_N)
            q = load_rows(q_ptr, q_strides, origin, head, row, length, dim_qk, BLOCK_QK, hidden)
            do = load_rows(do_ptr, do_strides, origin, head, row, length, dim_v, BLOCK_V, hidden)
            row_time = load_times(bias.row_times_ptr, begin, row, length)
            x = alpha * product(k, tl.trans(q), WIDEN)
            x = add_bias(x, row[None, :], column[:, None], row_time[None, :], column_time[:, None], bias)
            p = x * sigmoid(x, PTX)
            ds = product(v, tl.trans(do), WIDEN) * slope(x, PTX)
            # dQ takes the query's scale once, behind all of its terms; dK and dV take it in each.
            unscaled = ds
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
                unscaled = tl.where(seen, unscaled, 0.0)
            dk += product(ds.to(q.dtype), q, WIDEN)
            dv += product(p.to(do.dtype), do, WIDEN)
            if DQ == "atomic":
                dq = product(tl.trans(ds.to(k.dtype)), k, WIDEN) * (alpha * scale)
                address, exists = tile_of(dq_ptr, dq_strides, origin, head, row, dim_qk, BLOCK_QK)
                mask = ((row >= hidden) & (row < length))[:, None] & exists
                # relaxed: only later kernels read dq; the schedule orders the additions
                tl.atomic_add(address, dq, mask=mask, sem="relaxed")
            elif DQ == "in place":
                # `fresh`: nothing was written yet, and a load from place `length` on gives zeros.
                least = tl.where(fresh, length, hidden)
                dq = load_rows(dq_ptr, dq_strides, origin, head, row, length, dim_qk, BLOCK_QK, least)
                dq += product(tl.trans(unscaled.to(k.dtype)), k, WIDEN)
                of_row = load_scales(scales_ptr, origin, row, length, hidden) * (alpha * scale)
                # behind their own block they see no key
                last = (start >= first) & (start < first + BLOCK_M) & (row >= contexts)
                dq *= tl.where(last, of_row, 1.0)[:, None]
                # the store may have another layout: no thread may load an element that is new already
                tl.debug_barrier()
                store_rows(dq, dq_ptr, dq_strides, origin, head, row, length, dim_qk, BLOCK_QK, hidden)
    store_rows(dk * (alpha * scale), dk_ptr, dk_strides, begin, head, column, length, dim_qk, BLOCK_QK)
    store_rows(dv * scale, dv_ptr, dv_strides, begin, head, column, length, dim_v, BLOCK_V)


@triton.jit
def columns_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, dq_ptr, do_strides, q_strides, k_strides, v_strides,
    dk_strides, dv_strides, dq_strides, layout, rules, bias, scales_ptr, tiles_ptr, count_ptr, num_heads,
    dim_qk, dim_v, alpha, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    WIDEN: tl.constexpr, PTX: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """dK = alpha * scale * dS^T Q and dV = scale * P^T dO."""
    for tile in range(tl.program_id(0), tl.load(count_ptr) * num_heads, tl.num_programs(0)):
        level, sequence = find_tile(tile // num_heads, tiles_ptr)
        head = tile % num_heads
        begin, length, history, contexts, hidden, origin = open_sequence(sequence, layout)
        # here the first blocks have the longest walks
        first = ((length + BLOCK_M - 1) // BLOCK_M - 1 - level) * BLOCK_M
        block_of_columns(
            first, begin, length, history, contexts, hidden, origin, False, head, do_ptr, q_ptr, k_ptr, v_ptr,
            dk_ptr, dv_ptr, dq_ptr, do_strides, q_strides, k_strides, v_strides, dk_strides, dv_strides,
            dq_strides, rules, bias, scales_ptr, dim_qk, dim_v, alpha, scale, BLOCK_M, BLOCK_N, BLOCK_QK,
            BLOCK_V, WIDEN, PTX, "atomic" if ATOMIC else "",
        )  # fmt: skip


@triton.jit
def sequences_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, dq_ptr, do_strides, q_strides, k_strides, v_strides,
    dk_strides, dv_strides, dq_strides, layout, rules, bias, scales_ptr, tiles_ptr, count_ptr, num_heads,
    dim_qk, dim_v, alpha, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    WIDEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of a sequence's head by one program, which adds up dQ, of float32, where it lies.

    A query's terms are added in the order of its keys, as in `rows_kernel`. Where products add along their
    sum in order, as those of float32 without matrix units do, dQ has the bits of that kernel.
    """
    for tile in range(tl.program_id(0), tl.load(count_ptr) * num_heads, tl.num_programs(0)):
        level, sequence = find_tile(tile // num_heads, tiles_ptr)
        head = tile % num_heads
        begin, length, history, contexts, hidden, origin = open_sequence(sequence, layout)
        # a sequence's highest level comes first in the list, longer sequences before shorter ones
        if (level + 1) * BLOCK_M >= length:
            # the first block of keys meets every query, unless a window hides it or there is no history
            met = history > 0
            if rules.window is not None:
                met = False
            if not met:
                for first in range(hidden // BLOCK_M * BLOCK_M, length, BLOCK_M):
                    zero = tl.zeros((BLOCK_M, BLOCK_QK), tl.float32)
                    row = first + tl.arange(0, BLOCK_M)
                    store_rows(zero, dq_ptr, dq_strides, origin, head, row, length, dim_qk, BLOCK_QK, hidden)
                tl.debug_barrier()
            for first in range(0, length, BLOCK_M):
                block_of_columns(
                    first, begin, length, history, contexts, hidden, origin, met & (first == 0), head, do_ptr,
                    q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, dq_ptr, do_strides, q_strides, k_strides, v_strides,
                    dk_strides, dv_strides, dq_strides, rules, bias, scales_ptr, dim_qk, dim_v, alpha, scale,
                    BLOCK_M, BLOCK_N, BLOCK_QK, BLOCK_V, WIDEN, PTX, "in place",
                )  # fmt: skip
                # another thread may load what this one has stored
                tl.debug_barrier()
            if rules.contextual is not None:
                # contextual tokens see later keys, so they have all terms only now
                for first in range(hidden // BLOCK_M * BLOCK_M, contexts, BLOCK_M):
                    row = first + tl.arange(0, BLOCK_M)
                    dq = load_rows(dq_ptr, dq_strides, origin, head, row, contexts, dim_qk, BLOCK_QK, hidden)
                    of_row = load_scales(scales_ptr, origin, row, length, hidden) * (alpha * scale)
                    dq *= of_row[:, None]
                    store_rows(dq, dq_ptr, dq_strides, origin, head, row, contexts, dim_qk, BLOCK_QK, hidden)
