# mypy: ignore-errors
"""Jagged HSTU attention in Triton: a program owns a block of one sequence's rows and walks the rest of it.

    forward   owns query rows, walks keys up to the diagonal       O
    rows      owns query rows, walks keys up to the diagonal       dQ
    columns   owns key rows, walks queries from the diagonal on    dK, dV

SiLU needs no statistics of a row, so dQ and dK, dV can be summed apart: seven matrix products instead of
five, and no lock, no atomic and no output that has to be zero before. Each sum runs along one sequence in
blocks counted from the sequence's start, with block sizes chosen by the head dimensions alone: the bits of a
sequence depend neither on its batch, nor on `max_seq_len`, nor on the schedule.

A walk is cut where the mask changes (t = targets, o = owned, 4 blocks)::

    owns 1:  . o .  .      keys 0 whole, then its own diagonal block
    owns 3:  0 1 2t 3t     keys 0, 1 and the history part of 2, then its own diagonal block; a walk ends
                           where history ends, so pairs of target blocks are never computed

Scores are float32 sums (full float32 products for float32 inputs, never TF32); the weights are rounded to the
input's dtype for the second product, and 1/N is applied to the finished sum.

Dimensions: B sequences, L tokens, H heads, Dqk and Dv features of a head, both padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_PROGRAMS = 65535
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def visible(row, column, length, history):
    """Query `row` sees key `column`: itself, and what comes before it unless that is a target."""
    return (row < length) & ((row == column) | ((column < row) & (column < history)))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def slope(x):
    """The derivative of x * sigmoid(x)."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def product(a, b, WIDEN: tl.constexpr):
    """a b with exact products, summed in float32; the interpreter multiplies bfloat16 only when widened."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def place(tile, num_sequences, num_heads, offsets_ptr, targets_ptr, HAS_TARGETS: tl.constexpr):
    """Block, head, first token, length and length without targets of a tile; blocks change slowest.

    A token's place among all is int64, its place in a sequence int32.
    """
    block = tile // (num_sequences * num_heads)
    sequence = tile // num_heads % num_sequences
    begin = tl.load(offsets_ptr + sequence).to(tl.int64)
    length = (tl.load(offsets_ptr + sequence + 1) - begin).to(tl.int32)
    history = length
    if HAS_TARGETS:
        history = length - tl.load(targets_ptr + sequence).to(tl.int32)
    return block.to(tl.int32), tile % num_heads, begin, length, history


@triton.jit
def tile_of(ptr, strides, begin, head, row, dim, BLOCK_D: tl.constexpr):
    """Addresses (rows, BLOCK_D) of one head of a (L, H, D) tensor, and which of the columns exist."""
    feature = tl.arange(0, BLOCK_D)
    address = ptr + head * strides[1] + (begin + row)[:, None] * strides[0] + feature[None, :] * strides[2]
    return address, (feature < dim)[None, :]


@triton.jit
def load_rows(ptr, strides, begin, head, row, length, dim, BLOCK_D: tl.constexpr):
    address, exists = tile_of(ptr, strides, begin, head, row, dim, BLOCK_D)
    return tl.load(address, mask=(row < length)[:, None] & exists, other=0.0)


@triton.jit
def store_rows(value, ptr, strides, begin, head, row, length, dim, BLOCK_D: tl.constexpr):
    address, exists = tile_of(ptr, strides, begin, head, row, dim, BLOCK_D)
    tl.store(address, value.to(ptr.dtype.element_ty), mask=(row < length)[:, None] & exists)


@triton.jit
def add_output(
    acc, q, k_ptr, k_strides, v_ptr, v_strides, begin, head, row, column, length, history, alpha, dim_qk,
    dim_v, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """acc + silu(alpha q k^T) v for one block of keys."""
    k = load_rows(k_ptr, k_strides, begin, head, column, length, dim_qk, BLOCK_QK)
    v = load_rows(v_ptr, v_strides, begin, head, column, length, dim_v, BLOCK_V)
    x = alpha * product(q, tl.trans(k), WIDEN)
    p = x * sigmoid(x)
    if MASKED:
        p = tl.where(visible(row[:, None], column[None, :], length, history), p, 0.0)
    return acc + product(p.to(v.dtype), v, WIDEN)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_strides, k_strides, v_strides, out_strides, offsets_ptr, targets_ptr,
    num_tiles, num_sequences, num_heads, dim_qk, dim_v, alpha, scale,
    HAS_TARGETS: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr, BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """O = silu(alpha Q K^T) * mask @ V * scale for OWN query rows at a time."""
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        # the last rows have the most keys to walk, so they go first
        block, head, begin, length, history = place(
            num_tiles - 1 - tile, num_sequences, num_heads, offsets_ptr, targets_ptr, HAS_TARGETS
        )
        first = block * OWN
        if first < length:
            row = first + tl.arange(0, OWN)
            q = load_rows(q_ptr, q_strides, begin, head, row, length, dim_qk, BLOCK_QK)
            acc = tl.zeros((OWN, BLOCK_V), tl.float32)
            for start in range(0, tl.minimum(first, history), STEP):
                acc = add_output(
                    acc, q, k_ptr, k_strides, v_ptr, v_strides, begin, head, row, start + tl.arange(0, STEP),
                    length, history, alpha, dim_qk, dim_v, BLOCK_QK, BLOCK_V, HAS_TARGETS, WIDEN,
                )  # fmt: skip
            for start in range(first, tl.minimum(first + OWN, length), STEP):
                acc = add_output(
                    acc, q, k_ptr, k_strides, v_ptr, v_strides, begin, head, row, start + tl.arange(0, STEP),
                    length, history, alpha, dim_qk, dim_v, BLOCK_QK, BLOCK_V, True, WIDEN,
                )  # fmt: skip
            store_rows(acc * scale, out_ptr, out_strides, begin, head, row, length, dim_v, BLOCK_V)


@triton.jit
def add_row_gradient(
    dq, q, do, k_ptr, k_strides, v_ptr, v_strides, begin, head, row, column, length, history, alpha, dim_qk,
    dim_v, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dq + (do v^T * silu'(alpha q k^T)) k for one block of keys."""
    k = load_rows(k_ptr, k_strides, begin, head, column, length, dim_qk, BLOCK_QK)
    v = load_rows(v_ptr, v_strides, begin, head, column, length, dim_v, BLOCK_V)
    x = alpha * product(q, tl.trans(k), WIDEN)
    ds = product(do, tl.trans(v), WIDEN) * slope(x)
    if MASKED:
        ds = tl.where(visible(row[:, None], column[None, :], length, history), ds, 0.0)
    return dq + product(ds.to(k.dtype), k, WIDEN)


@triton.jit
def rows_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, do_strides, q_strides, k_strides, v_strides, dq_strides, offsets_ptr,
    targets_ptr, num_tiles, num_sequences, num_heads, dim_qk, dim_v, alpha, scale,
    HAS_TARGETS: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr, BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dQ = alpha * scale * dS K, the walk of `forward_kernel`."""
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        block, head, begin, length, history = place(
            num_tiles - 1 - tile, num_sequences, num_heads, offsets_ptr, targets_ptr, HAS_TARGETS
        )
        first = block * OWN
        if first < length:
            row = first + tl.arange(0, OWN)
            q = load_rows(q_ptr, q_strides, begin, head, row, length, dim_qk, BLOCK_QK)
            do = load_rows(do_ptr, do_strides, begin, head, row, length, dim_v, BLOCK_V)
            dq = tl.zeros((OWN, BLOCK_QK), tl.float32)
            for start in range(0, tl.minimum(first, history), STEP):
                dq = add_row_gradient(
                    dq, q, do, k_ptr, k_strides, v_ptr, v_strides, begin, head, row,
                    start + tl.arange(0, STEP), length, history, alpha, dim_qk, dim_v, BLOCK_QK, BLOCK_V,
                    HAS_TARGETS, WIDEN,
                )  # fmt: skip
            for start in range(first, tl.minimum(first + OWN, length), STEP):
                dq = add_row_gradient(
                    dq, q, do, k_ptr, k_strides, v_ptr, v_strides, begin, head, row,
                    start + tl.arange(0, STEP), length, history, alpha, dim_qk, dim_v, BLOCK_QK, BLOCK_V,
                    True, WIDEN,
                )  # fmt: skip
            store_rows(dq * (alpha * scale), dq_ptr, dq_strides, begin, head, row, length, dim_qk, BLOCK_QK)


@triton.jit
def add_column_gradients(
    dk, dv, k, v, do_ptr, do_strides, q_ptr, q_strides, begin, head, row, column, length, history, alpha,
    dim_qk, dim_v, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dk + dS^T q and dv + P^T do for one block of queries; keys are the rows of every matrix here."""
    q = load_rows(q_ptr, q_strides, begin, head, row, length, dim_qk, BLOCK_QK)
    do = load_rows(do_ptr, do_strides, begin, head, row, length, dim_v, BLOCK_V)
    x = alpha * product(k, tl.trans(q), WIDEN)
    p = x * sigmoid(x)
    ds = product(v, tl.trans(do), WIDEN) * slope(x)
    if MASKED:
        seen = visible(row[None, :], column[:, None], length, history)
        p = tl.where(seen, p, 0.0)
        ds = tl.where(seen, ds, 0.0)
    return dk + product(ds.to(q.dtype), q, WIDEN), dv + product(p.to(do.dtype), do, WIDEN)


@triton.jit
def columns_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, do_strides, q_strides, k_strides, v_strides, dk_strides,
    dv_strides, offsets_ptr, targets_ptr, num_tiles, num_sequences, num_heads, dim_qk, dim_v, alpha, scale,
    HAS_TARGETS: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr, BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dK = alpha * scale * dS^T Q and dV = scale * P^T dO for OWN key rows at a time."""
    for tile in range(tl.program_id(0).to(tl.int64), num_tiles, tl.num_programs(0)):
        # here the first rows have the longest walk
        block, head, begin, length, history = place(
            tile, num_sequences, num_heads, offsets_ptr, targets_ptr, HAS_TARGETS
        )
        first = block * OWN
        if first < length:
            column = first + tl.arange(0, OWN)
            k = load_rows(k_ptr, k_strides, begin, head, column, length, dim_qk, BLOCK_QK)
            v = load_rows(v_ptr, v_strides, begin, head, column, length, dim_v, BLOCK_V)
            dk = tl.zeros((OWN, BLOCK_QK), tl.float32)
            dv = tl.zeros((OWN, BLOCK_V), tl.float32)
            for start in range(first, tl.minimum(first + OWN, length), STEP):
                dk, dv = add_column_gradients(
                    dk, dv, k, v, do_ptr, do_strides, q_ptr, q_strides, begin, head,
                    start + tl.arange(0, STEP), column, length, history, alpha, dim_qk, dim_v, BLOCK_QK,
                    BLOCK_V, True, WIDEN,
                )  # fmt: skip
            # nobody but a target itself sees it
            for start in range(first + OWN, tl.where(first < history, length, 0), STEP):
                dk, dv = add_column_gradients(
                    dk, dv, k, v, do_ptr, do_strides, q_ptr, q_strides, begin, head,
                    start + tl.arange(0, STEP), column, length, history, alpha, dim_qk, dim_v, BLOCK_QK,
                    BLOCK_V, HAS_TARGETS, WIDEN,
                )  # fmt: skip
            dk *= alpha * scale
            store_rows(dk, dk_ptr, dk_strides, begin, head, column, length, dim_qk, BLOCK_QK)
            store_rows(dv * scale, dv_ptr, dv_strides, begin, head, column, length, dim_v, BLOCK_V)


def configuration(dim_qk: int, dim_v: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes and warps: a function of head dimensions and dtype, so that it cannot change a result."""
    block_qk = max(16, triton.next_power_of_2(dim_qk))
    block_v = max(16, triton.next_power_of_2(dim_v))
    widest = max(block_qk, block_v)
    if dtype == torch.float32:
        # these products run outside the tensor cores and keep their operands in registers
        own, step, warps = (64, 16, 4) if widest <= 64 else (32, 16, 4 if widest <= 128 else 8)
    elif widest <= 64:
        own, step, warps = 64, 64, 4
    else:
        own, step, warps = (64 if widest <= 128 else 32), 32, 8
    return {
        "OWN": own, "STEP": step, "BLOCK_QK": block_qk, "BLOCK_V": block_v,
        "num_warps": warps, "num_stages": 2, "enable_fp_fusion": False,
    }  # fmt: skip


def launch(kernel, tensors, call) -> None:
    """One program per block, head and sequence, counted for `max_seq_len`; those past an end do nothing."""
    q, v = tensors["q"], tensors["v"]
    if q.dtype not in DTYPES:
        raise ValueError(f"hstu_attention in Triton takes float32, bfloat16 or float16, got {q.dtype}")
    if tuple(call.mask) != (1, 0, 0, 0) or any(
        option is not None
        for option in (
            call.num_contexts,
            call.delta_offsets,
            call.attn_scale,
            call.pos_weights,
            call.ts_weights,
        )
    ):
        raise ValueError("hstu_attention in Triton has no such mask or bias yet: take impl='reference'")
    sequences, heads = call.num_sequences, q.shape[1]
    config = configuration(q.shape[2], v.shape[2], q.dtype)
    tiles = triton.cdiv(call.max_seq_len, config["OWN"]) * sequences * heads
    if tiles == 0:
        return
    kernel[(min(tiles, MOST_PROGRAMS),)](
        *tensors.values(), *(tensor.stride() for tensor in tensors.values()), call.seq_offsets.contiguous(),
        call.seq_offsets if call.num_targets is None else call.num_targets.contiguous(), tiles, sequences, heads,
        q.shape[2], v.shape[2], float(call.alpha), 1.0 / call.scaling_seqlen,
        HAS_TARGETS=call.num_targets is not None, WIDEN=q.device.type == "cpu", **config,
    )  # fmt: skip


def forward(q, k, v, call, out) -> None:
    """Overwrite `out` (L, H, Dv), whatever it held."""
    launch(forward_kernel, {"q": q, "k": k, "v": v, "out": out}, call)


def backward(do, q, k, v, call, dq, dk, dv, dpos, dts) -> None:
    """Overwrite dq, dk (L, H, Dqk) and dv (L, H, Dv), whatever they held."""
    launch(rows_kernel, {"do": do, "q": q, "k": k, "v": v, "dq": dq}, call)
    launch(columns_kernel, {"do": do, "q": q, "k": k, "v": v, "dk": dk, "dv": dv}, call)
