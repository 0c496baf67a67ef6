# mypy: ignore-errors
"""Softmax attention in Triton: a program owns rows of a sequence and walks the others.

    forward   owns query rows, walks keys, carries maximum and sum of exponentials (online softmax)   out
    queries   owns query rows, walks keys                                                             dq
    keys      owns key rows, walks queries                                                            dk, dv

There are no atomics and no locks. Sums run along one sequence in blocks counted from the sequence's start,
with block sizes chosen by the head's dimension alone, so the bits of a sequence depend neither on its batch,
nor on `max_seq_len`, nor on the schedule. Products of float32 are full, never TF32. In lower precision the
weights are rounded to the dtype of the values for the second product, and every sum is float32.

A program owns BLOCK_M rows and takes BLOCK_N others at a step.

Dimensions: B sequences, M queries, L keys, H heads, D and E features (padded to powers of two).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonrec.kernels import dispatch
from tritonrec.kernels.head_layout import contiguous_heads
from tritonrec.kernels.hstu_attention.triton_forward import product
from tritonrec.kernels.linear.triton_linear import INTERPRETED
from tritonrec.kernels.philox.reference import DROPOUT
from tritonrec.kernels.philox.triton_philox import high_word, low_word, philox4x32
from tritonrec.kernels.softmax_attention.op import Call
from tritonrec.kernels.triton_float import exp
from tritonrec.kernels.triton_jit import jit_for_any_alignment
from tritonrec.kernels.triton_sequences import load_rows, locate, store_rows

MOST_PROGRAMS = 65535  # a launch may have no more along an axis


@triton.jit
def other_sequence(sequence, offsets_ptr):
    """First row and length of a sequence of the other side."""
    begin = tl.load(offsets_ptr + sequence).to(tl.int64)
    length = (tl.load(offsets_ptr + sequence + 1) - begin).to(tl.int32)
    return begin, length


@triton.jit
def mask_scores(
    s, bias_ptr, bias_sequence, bias_head, bias_row, bias_column, sequence, head, row, column, queries, keys,
    causal: tl.constexpr,
):  # fmt: skip
    """Scores with the bias added, -inf where query `row` does not see key `column`; all of one shape."""
    seen = (row < queries) & (column < keys)
    if causal:
        seen = seen & (column <= row)
    if bias_ptr is not None:
        place = sequence * bias_sequence + head * bias_head
        # widened first: a place times a stride may pass 2**31
        place = place + row.to(tl.int64) * bias_row + column.to(tl.int64) * bias_column
        s = s + tl.load(bias_ptr + place, mask=seen, other=0.0)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def exponential(s, most):
    """exp(s - most), 0 for -inf, NaN for NaN."""
    # `exp` ends at e**-87 and knows no NaN
    return tl.where(s == float("-inf"), 0.0, tl.where(s == s, exp(s - most), s))


@triton.jit
def draw_pairs(samples_ptr, sequence, head, row, block, seed, tag, threshold, factor, M: tl.constexpr,
               N: tl.constexpr):  # fmt: skip
    """(M, N): `factor` where a pair's weight survives, else 0; row (M, 1), and Philox blocks (1, N // 4)."""
    sample = tl.load(samples_ptr + sequence)
    # Zeros of the shape (M, N // 4): each word of counter and key is widened to it.
    zero = (row + block).to(tl.int64) * 0
    #     counter    sample, 64 bits | tag + block of four keys | query       key    seed + (head << 32)
    of_head = seed + (head.to(tl.int64) << 32)
    w0, w1, w2, w3 = philox4x32(
        low_word(sample + zero),
        high_word(sample + zero),
        low_word(tag + (block + zero)),
        low_word(row + zero),
        low_word(of_head + zero),
        high_word(of_head + zero),
    )
    # join puts its arguments innermost: (w0, w2) with (w1, w3) flattens to w0, w1, w2, w3
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (M, N))
    return tl.where(words.to(tl.int64) >= threshold, factor, 0.0)


@jit_for_any_alignment
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, most_ptr, total_ptr, q_row, q_head, k_row, k_head, v_row, v_head, out_row,
    out_head, q_offsets_ptr, k_offsets_ptr, bias_ptr, bias_sequence, bias_head, bias_row, bias_column,
    samples_ptr, seed, tag, threshold, factor, num_tiles, num_sequences, num_heads, dim, dim_v, scale,
    CAUSAL: tl.constexpr, DROPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """out, most and total for BLOCK_M query rows at a time; with LAST the queries stand at the last keys."""
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        # the last rows have the most keys to walk, so they go first
        block, head, sequence, begin, queries = locate(
            num_tiles - 1 - tile, num_sequences, num_heads, q_offsets_ptr
        )
        k_begin, keys = other_sequence(sequence, k_offsets_ptr)
        hidden = None
        if LAST:
            # blocks count from the first key all the same, so a row has its place among others
            hidden = keys - queries
            block += hidden // BLOCK_M
            begin -= hidden
            queries = keys
        first = block * BLOCK_M
        if first < queries:
            row = first + tl.arange(0, BLOCK_M)
            q = load_rows(q_ptr, q_row, q_head, begin, head, row, queries, dim, BLOCK_D, hidden)
            acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
            most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            stop = keys
            # No row of this block sees a key behind its last row.
            if CAUSAL:
                stop = tl.minimum(first + BLOCK_M, keys)
            for start in range(0, stop, BLOCK_N):
                column = start + tl.arange(0, BLOCK_N)
                k = load_rows(k_ptr, k_row, k_head, k_begin, head, column, keys, dim, BLOCK_D)
                s = product(q, tl.trans(k), PRECISION) * scale
                s = mask_scores(
                    s, bias_ptr, bias_sequence, bias_head, bias_row, bias_column, sequence, head,
                    row[:, None], column[None, :], queries, keys, CAUSAL,
                )  # fmt: skip
                # what was summed below the old maximum is brought below the new one; -inf is below all
                higher = tl.maximum(most, tl.max(s, axis=1))
                above = tl.where(higher == float("-inf"), 0.0, higher)
                shrink = tl.where(most == float("-inf"), 0.0, exp(most - above))
                p = exponential(s, above[:, None])
                total = total * shrink + tl.sum(p, axis=1)
                if DROPS:
                    # A Philox block has the draws of four neighbouring keys.
                    four = start // 4 + tl.arange(0, BLOCK_N // 4)
                    p = p * draw_pairs(
                        samples_ptr, sequence, head, row[:, None], four[None, :], seed, tag, threshold,
                        factor, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
                v = load_rows(v_ptr, v_row, v_head, k_begin, head, column, keys, dim_v, BLOCK_E)
                acc = acc * shrink[:, None] + product(p.to(v.dtype), v, PRECISION)
                most = higher
            most = tl.where(most == float("-inf"), 0.0, most)
            # A row that sees no key has weights of 0 / 1.
            total = tl.where(total == 0.0, 1.0, total)
            out = tl.div_rn(acc, tl.zeros((BLOCK_M, BLOCK_E), tl.float32) + total[:, None])
            store_rows(out, out_ptr, out_row, out_head, begin, head, row, queries, dim_v, BLOCK_E, hidden)
            to, own = (begin + row) * num_heads + head, row < queries
            if LAST:
                own = own & (row >= hidden)
            tl.store(most_ptr + to, most, mask=own)
            tl.store(total_ptr + to, total, mask=own)


@jit_for_any_alignment
def queries_kernel(
    do_ptr, result_ptr, most_ptr, total_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, do_row, do_head, result_row,
    result_head, q_row, q_head, k_row, k_head, v_row, v_head, dq_row, dq_head, q_offsets_ptr, k_offsets_ptr,
    bias_ptr, bias_sequence, bias_head, bias_row, bias_column, samples_ptr, seed, tag, threshold, factor,
    num_tiles, num_sequences, num_heads, dim, dim_v, scale,
    CAUSAL: tl.constexpr, DROPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq for BLOCK_M query rows at a time; `result` is the output of forward."""
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        block, head, sequence, begin, queries = locate(
            num_tiles - 1 - tile, num_sequences, num_heads, q_offsets_ptr
        )
        first = block * BLOCK_M
        if first < queries:
            k_begin, keys = other_sequence(sequence, k_offsets_ptr)
            row = first + tl.arange(0, BLOCK_M)
            q = load_rows(q_ptr, q_row, q_head, begin, head, row, queries, dim, BLOCK_D)
            do = load_rows(do_ptr, do_row, do_head, begin, head, row, queries, dim_v, BLOCK_E)
            result = load_rows(result_ptr, result_row, result_head, begin, head, row, queries, dim_v, BLOCK_E)
            # sum_j p_j dp_j = <do, out>, so that ds = p (dp - along) needs no second walk over the keys.
            along = tl.sum(do.to(tl.float32) * result.to(tl.float32), axis=1)
            at = (begin + row) * num_heads + head
            most = tl.load(most_ptr + at, mask=row < queries, other=0.0)
            total = tl.load(total_ptr + at, mask=row < queries, other=1.0)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            stop = keys
            if CAUSAL:
                stop = tl.minimum(first + BLOCK_M, keys)
            for start in range(0, stop, BLOCK_N):
                column = start + tl.arange(0, BLOCK_N)
                k = load_rows(k_ptr, k_row, k_head, k_begin, head, column, keys, dim, BLOCK_D)
                v = load_rows(v_ptr, v_row, v_head, k_begin, head, column, keys, dim_v, BLOCK_E)
                s = product(q, tl.trans(k), PRECISION) * scale
                s = mask_scores(
                    s, bias_ptr, bias_sequence, bias_head, bias_row, bias_column, sequence, head,
                    row[:, None], column[None, :], queries, keys, CAUSAL,
                )  # fmt: skip
                p = tl.div_rn(
                    exponential(s, most[:, None]), tl.zeros((BLOCK_M, BLOCK_N), tl.float32) + total[:, None]
                )
                slope = product(do, tl.trans(v), PRECISION)
                if DROPS:
                    four = start // 4 + tl.arange(0, BLOCK_N // 4)
                    slope = slope * draw_pairs(
                        samples_ptr, sequence, head, row[:, None], four[None, :], seed, tag, threshold,
                        factor, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
                ds = p * (slope - along[:, None]) * scale
                acc += product(ds.to(k.dtype), k, PRECISION)
            store_rows(acc, dq_ptr, dq_row, dq_head, begin, head, row, queries, dim, BLOCK_D)


@jit_for_any_alignment
def keys_kernel(
    do_ptr, result_ptr, most_ptr, total_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, do_row, do_head, result_row,
    result_head, q_row, q_head, k_row, k_head, v_row, v_head, dk_row, dk_head, dv_row, dv_head, q_offsets_ptr,
    k_offsets_ptr, bias_ptr, bias_sequence, bias_head, bias_row, bias_column, samples_ptr, seed, tag,
    threshold, factor, num_tiles, num_sequences, num_heads, dim, dim_v, scale,
    CAUSAL: tl.constexpr, DROPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv for BLOCK_M key rows at a time; keys are the rows of every matrix of pairs here."""
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        # the first keys have the most queries to walk, so tiles ascend
        block, head, sequence, begin, keys = locate(tile, num_sequences, num_heads, k_offsets_ptr)
        first = block * BLOCK_M
        if first < keys:
            q_begin, queries = other_sequence(sequence, q_offsets_ptr)
            column = first + tl.arange(0, BLOCK_M)
            k = load_rows(k_ptr, k_row, k_head, begin, head, column, keys, dim, BLOCK_D)
            v = load_rows(v_ptr, v_row, v_head, begin, head, column, keys, dim_v, BLOCK_E)
            dk = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            dv = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
            lowest = 0
            if CAUSAL:
                # Queries before the first key do not see it. Rounded down, so that blocks still count from
                # the sequence's start.
                lowest = first // BLOCK_N * BLOCK_N
            for start in range(lowest, queries, BLOCK_N):
                row = start + tl.arange(0, BLOCK_N)
                q = load_rows(q_ptr, q_row, q_head, q_begin, head, row, queries, dim, BLOCK_D)
                do = load_rows(do_ptr, do_row, do_head, q_begin, head, row, queries, dim_v, BLOCK_E)
                result = load_rows(
                    result_ptr, result_row, result_head, q_begin, head, row, queries, dim_v, BLOCK_E
                )  # fmt: skip
                # As in the kernel of the queries, computed again for each block of keys: nothing lies in
                # memory between them.
                along = tl.sum(do.to(tl.float32) * result.to(tl.float32), axis=1)
                at = (q_begin + row) * num_heads + head
                most = tl.load(most_ptr + at, mask=row < queries, other=0.0)
                total = tl.load(total_ptr + at, mask=row < queries, other=1.0)
                s = product(k, tl.trans(q), PRECISION) * scale
                s = mask_scores(
                    s, bias_ptr, bias_sequence, bias_head, bias_row, bias_column, sequence, head,
                    row[None, :], column[:, None], queries, keys, CAUSAL,
                )  # fmt: skip
                p = tl.div_rn(
                    exponential(s, most[None, :]), tl.zeros((BLOCK_M, BLOCK_N), tl.float32) + total[None, :]
                )
                slope = product(v, tl.trans(do), PRECISION)
                weight = p
                if DROPS:
                    four = first // 4 + tl.arange(0, BLOCK_M // 4)
                    kept = draw_pairs(
                        samples_ptr, sequence, head, row[:, None], four[None, :], seed, tag, threshold,
                        factor, BLOCK_N, BLOCK_M,
                    )  # fmt: skip
                    # four keys share a Philox block, so they lie side by side until here
                    kept = tl.trans(kept)
                    slope = slope * kept
                    weight = p * kept
                ds = p * (slope - along[None, :]) * scale
                dk += product(ds.to(q.dtype), q, PRECISION)
                dv += product(weight.to(do.dtype), do, PRECISION)
            store_rows(dk, dk_ptr, dk_row, dk_head, begin, head, column, keys, dim, BLOCK_D)
            store_rows(dv, dv_ptr, dv_row, dv_head, begin, head, column, keys, dim_v, BLOCK_E)


# Rows that a program owns, rows that it takes at a step, warps; by the head's dimension. Nothing was timed.
BLOCKS = {16: (32, 32, 4), 32: (32, 32, 4), 64: (32, 16, 4), 128: (32, 16, 8), 256: (16, 16, 8)}
SPLIT_BLOCKS = {16: (64, 32, 4), 32: (64, 32, 4)}
"""Where a float32 is three bfloat16 on tensor cores; wider heads would spill."""


def configuration(q: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    """Block sizes and warps: a function of D and E, so that no batch changes a result."""
    # tl.dot takes no dimension below 16
    block_d, block_e = (max(16, triton.next_power_of_2(each.shape[2])) for each in (q, v))
    widest, capability = min(max(block_d, block_e), 256), dispatch.capability(q)
    splits = q.dtype == torch.float32 and widest in SPLIT_BLOCKS and capability >= (8, 0)
    block_m, block_n, num_warps = (SPLIT_BLOCKS if splits else BLOCKS)[widest]
    precision = "bf16x6" if splits else "ieee"
    if capability == (0, 0):
        num_warps = 4  # of 64 lanes, on an AMD GPU
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "BLOCK_E": block_e,
        "PRECISION": "widened" if INTERPRETED else precision, "num_warps": num_warps, "num_stages": 2,
        "enable_fp_fusion": False,
    }  # fmt: skip


def launch(kernel, tensors, strided, q, v, call: Call, config, last=None) -> None:
    """One program per block, head and sequence; those past an end do nothing."""
    sequences, heads = len(call.q_offsets) - 1, q.shape[1]
    blocks = triton.cdiv(call.max_seq_len, config["BLOCK_M"])
    if last:  # they may begin within a block
        blocks = min(blocks, triton.cdiv(len(q), config["BLOCK_M"]) + 1)
    if last is not None:
        config = config | {"LAST": last}
    tiles = blocks * sequences * heads
    if tiles == 0:
        return
    bias = call.bias if call.bias is not None and call.bias.numel() else None
    samples = call.q_offsets if call.sample_ids is None else call.sample_ids.contiguous()
    kernel[(min(tiles, MOST_PROGRAMS),)](
        *tensors, *(n for each in strided for n in each.stride()[:2]), call.q_offsets.contiguous(),
        call.k_offsets.contiguous(), bias, *((0, 0, 0, 0) if bias is None else bias.stride()), samples,
        call.seed, DROPOUT, int(call.p * 2**32), 1 / (1 - call.p), tiles, sequences, heads, q.shape[2],
        v.shape[2], call.scale, CAUSAL=call.causal, DROPS=call.p > 0, **config,
    )  # fmt: skip


def forward(q, k, v, call: Call, out, most, total, last=False) -> None:
    """Overwrite out (M, H, E), most and total (M, H), whatever they held."""
    q, k, v = map(contiguous_heads, (q, k, v))
    launch(
        forward_kernel, (q, k, v, out, most, total), (q, k, v, out), q, v, call, configuration(q, v), last
    )  # fmt: skip


def backward(do, out, most, total, q, k, v, call: Call, dq, dk, dv) -> None:
    """Overwrite dq, dk and dv, whatever they held."""
    do, out, q, k, v = map(contiguous_heads, (do, out, q, k, v))
    config, given = configuration(q, v), (do, out, most.contiguous(), total.contiguous(), q, k, v)
    launch(queries_kernel, (*given, dq), (do, out, q, k, v, dq), q, v, call, config)
    if config["PRECISION"] == "bf16x6":
        config = config | {"BLOCK_N": 16}  # two accumulators leave no registers for more
    launch(keys_kernel, (*given, dk, dv), (do, out, q, k, v, dk, dv), q, v, call, config)


def softmax_attention(q, k, v, *described, last=False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out (M, H, E), and for each query and head its greatest score and the sum of exponentials, (M, H).

    Where they are the `last`, queries stand at the last places of their sequence's keys.
    """
    out = v.new_empty(*q.shape[:2], v.shape[2])
    most, total = (torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
    forward(q, k, v, Call(*described), out, most, total, last)
    return out, most, total


def softmax_attention_backward(
    do, out, most, total, q, k, v, *described
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, contiguous."""
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
    backward(do, out, most, total, q, k, v, Call(*described), dq, dk, dv)
    return dq, dk, dv
