# mypy: ignore-errors
"""HSTU attention's output in Triton: a program owns BLOCK_M queries of a head and walks the keys they see."""

import triton
import triton.language as tl

from tritonrec.kernels.hstu_attention.triton_bias import add_bias, load_scales, load_times
from tritonrec.kernels.hstu_attention.triton_mask import block_of, clear_keys, key_blocks, visible
from tritonrec.kernels.hstu_attention.triton_tiles import find_tile, load_rows, open_sequence, store_rows


@triton.jit
def approximate(INSTRUCTION: tl.constexpr, x):
    """An instruction of PTX on float32, `x` that are subnormal taken as 0."""
    return tl.inline_asm_elementwise(
        INSTRUCTION, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def sigmoid(x, PTX: tl.constexpr):
    """1 / (1 + exp(-x)); PTX: what is compiled is for a GPU of NVIDIA's, which has these instructions.

    Beside its products this is most of what attention computes. `tl.exp` and a division are the same two
    instructions among twelve others, which scale numbers near the bounds of float32. None is here: a
    subnormal exp(-x) adds nothing to 1, and the sum is 1 or more.
    """
    # exp is inf for x far below 0, and 1 / inf is the 0 that belongs there
    if PTX:
        power = approximate("ex2.approx.ftz.f32 $0, $1;", x * -1.4426950408889634)  # log2(e)
        return approximate("rcp.approx.ftz.f32 $0, $1;", 1.0 + power)
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b, summed in float32. PRECISION, where a and b are float32, is that of `linear.multiply_add`.

    "widened": the interpreter multiplies bfloat16 only as float32.
    """
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == tl.float32:
        return tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_strides, k_strides, v_strides, out_strides, layout, rules, bias,
    scales_ptr, tiles_ptr, count_ptr, num_heads, dim_qk, dim_v, alpha, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_QK: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """O = silu(alpha Q K^T + factor bias) * mask @ V * scale."""
    # heads change fastest, so programs side by side have walks of one length
    for tile in range(tl.program_id(0), tl.load(count_ptr) * num_heads, tl.num_programs(0)):
        level, sequence = find_tile(tile // num_heads, tiles_ptr)
        head = tile % num_heads
        begin, length, history, contexts, hidden, origin = open_sequence(sequence, layout)
        # blocks count from the sequence's start, so a query's place in its tile is always the same
        first = (level + hidden // BLOCK_M) * BLOCK_M
        row = first + tl.arange(0, BLOCK_M)
        row_stop = tl.minimum(first + BLOCK_M, length)
        # tokens without queries must not widen the walk
        least = tl.maximum(first, hidden)
        row_time = load_times(bias.row_times_ptr, begin, row, length)
        q = load_rows(q_ptr, q_strides, origin, head, row, length, dim_qk, BLOCK_QK, hidden)
        acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
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
                p = x * sigmoid(x, PTX)
                if masked:
                    p = tl.where(visible(row[:, None], column[None, :], history, contexts, rules), p, 0.0)
                acc += product(p.to(v.dtype), v, PRECISION)
        acc = acc * (load_scales(scales_ptr, origin, row, length, hidden) * scale)[:, None]
        store_rows(acc, out_ptr, out_strides, origin, head, row, length, dim_v, BLOCK_V, hidden)
