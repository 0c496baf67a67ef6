# mypy: ignore-errors
"""Jagged HSTU attention in Triton: block sizes and launches of the kernels.

Each sum runs along one sequence in blocks counted from the sequence's start, with block sizes chosen by head
dimensions, dtype and architecture alone: the bits of a sequence depend neither on its batch, nor on
`max_seq_len`, nor on the schedule. Blocks that nobody sees are skipped, and blocks that are seen whole
compute no mask.

Scores are float32 sums (full float32 products for float32 inputs, never TF32); the weights are rounded to the
input's dtype for the second product, and the scale is applied to the finished sum, a scale per token in dK
and dV to each term.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from tritonrec.kernels import dispatch
from tritonrec.kernels.head_layout import contiguous_heads
from tritonrec.kernels.hstu_attention.call import Call, is_zero
from tritonrec.kernels.hstu_attention.triton_backward import columns_kernel, rows_kernel
from tritonrec.kernels.hstu_attention.triton_bias import Bias
from tritonrec.kernels.hstu_attention.triton_forward import forward_kernel
from tritonrec.kernels.hstu_attention.triton_mask import Rules
from tritonrec.kernels.hstu_attention.triton_tables import parts_kernel, positions_kernel, times_kernel
from tritonrec.kernels.hstu_attention.triton_tiles import Layout, tiles_of
from tritonrec.kernels.linear.triton_linear import INTERPRETED

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def configuration(
    dim_qk: int, dim_v: int, dtype: torch.dtype, heavy: bool = False, capability: tuple[int, int] = (8, 0)
) -> dict[str, Any]:
    """Block sizes and warps: by what is asked for, so that no batch changes a result.

    Chosen by hand, by what compiles with matrix instructions and without spills, and by the bytes that it
    reads; nothing was timed. A program reads every key that its queries see, so 128 queries read half as much
    as 64, and sm_90 has the registers for them. Its product of 64 x 32 is bound by what it reads of shared
    memory, 64 x 64 is not, and a step of 64 keys waits half as often.
    `heavy`: dO beside Q, two accumulators, or a bias beside the scores.
    `capability`: (0, 0) is an AMD GPU, whose warps have 64 lanes and twice the registers.
    """
    # tl.dot takes no dimension below 16; padded features are zero and add nothing
    block_qk = max(16, triton.next_power_of_2(dim_qk))
    block_v = max(16, triton.next_power_of_2(dim_v))
    widest = max(block_qk, block_v)
    precision = "ieee"
    if dtype == torch.float32 and widest <= 64 and capability >= (8, 0):
        # three bfloat16 of each number on tensor cores; wider heads would spill hundreds of bytes
        precision, block_m = "bf16x6", 64
        num_warps = 8 if heavy and widest == 64 and capability != (9, 0) else 4
        block_n = 32 if widest < 64 or (capability >= (9, 0) and not heavy) else 16
    elif dtype == torch.float32:  # a multiply-add for each term, and twice the bytes: narrow steps
        block_m, block_n, num_warps = (32 if widest > 64 else 64), 16, (8 if widest > 128 else 4)
    elif widest > 128:
        block_m, block_n, num_warps = 32, (16 if heavy and dtype == torch.bfloat16 else 32), 8
    elif capability == (9, 0):
        block_m, block_n, num_warps = 128, (32 if heavy else 64), 8
    elif heavy or widest > 64:
        block_m, block_n, num_warps = 64, 32, 8
    else:
        block_m, block_n, num_warps = 64, 64, 4
    if capability == (0, 0):
        num_warps = 4
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_QK": block_qk, "BLOCK_V": block_v,
        "PRECISION": precision, "num_warps": num_warps, "num_stages": 2, "enable_fp_fusion": False,
    }  # fmt: skip


def rows_configuration(
    config: dict[str, Any], dtype: torch.dtype, has_bias: bool, capability: tuple[int, int]
) -> dict[str, Any]:
    """That of `rows_kernel`, whose one accumulator leaves registers for wider steps."""
    wide = capability == (9, 0) and dtype != torch.float32 and not has_bias and config["BLOCK_M"] == 128
    return config | {"BLOCK_N": 64} if wide else config


def table_configuration(
    dim_qk: int, dim_v: int, dtype: torch.dtype, entries: int, capability: tuple[int, int]
) -> dict[str, Any]:
    """As `configuration`, for the gradients of a table."""
    config = configuration(dim_qk, dim_v, dtype, True, min(capability, (8, 0)))
    own = 32 if dtype == torch.float32 or config["BLOCK_M"] == 32 else 64
    return config | {
        "BLOCK_M": own, "BLOCK_N": min(own, config["BLOCK_N"]), "ENTRIES": triton.next_power_of_2(entries),
        "PRECISION": "ieee",
    }  # fmt: skip


def check(q: torch.Tensor, v: torch.Tensor) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(
            f"hstu_attention in Triton takes float32, bfloat16 or float16, got {q.dtype}: "
            "take impl='reference'"
        )
    if max(q.shape[2], v.shape[2]) > 256:
        raise ValueError(
            f"hstu_attention in Triton takes heads of up to 256 features, got {q.shape[2]} and {v.shape[2]}: "
            "take more heads, or impl='reference'"
        )


class Description:
    """The arguments of kernels that describe a call."""

    def __init__(self, call, queries: int):
        def contiguous(tensor):
            return None if tensor is None else tensor.detach().contiguous()

        offsets = (call.seq_offsets, call.delta_offsets, call.num_targets, call.num_contexts)
        self.layout = Layout(*map(contiguous, offsets))
        mask = call.mask
        self.rules = Rules(
            group=None if mask.target_group_size == 1 else mask.target_group_size,
            window=mask.max_attn_len or None, full=mask.min_full_attn_seq_len, prefix=mask.attn_prefix_len,
            contextual=None if call.num_contexts is None else 1,
        )  # fmt: skip
        pos, ts, times = map(contiguous, (call.pos_weights, call.ts_weights, call.timestamps))
        base, sign = call.position_index
        self.bias = Bias(
            pos_ptr=pos, base=base, sign=sign, most=0 if pos is None else len(pos) - 1,
            ts_ptr=ts, last=0 if ts is None else len(ts) - 1,
            row_times_ptr=times if call.query_timestamps is None else contiguous(call.query_timestamps),
            times_ptr=times, factor=float(call.bias_factor),
        )  # fmt: skip
        self.scales = None
        if call.attn_scale is not None:
            self.scales = call.attn_scale.expand(queries).contiguous()
        self.alpha = float(call.alpha)
        self.scale = 1.0 if self.scales is not None else 1.0 / call.scaling_seqlen


def launch(kernel, tensors, described, tiles, heads, config, **constants) -> None:
    """A program for each tile and head that there can be; `tensors` by the names of their pointers."""
    q, v = tensors["q"], tensors["v"]
    pointers = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
    strides = {
        f"{name}_strides": t.stride()[:2] for name, t in tensors.items() if t.dim() == 3
    }  # of tables none
    kernel[tiles.grid(heads)](
        **pointers, **strides, layout=described.layout, rules=described.rules, bias=described.bias,
        scales_ptr=described.scales, tiles_ptr=tiles.listed, count_ptr=tiles.count, num_heads=q.shape[1],
        dim_qk=q.shape[2], dim_v=v.shape[2], alpha=described.alpha, scale=described.scale,
        PTX=int(dispatch.capability(q) >= (8, 0)), **constants,
        **(config | {"PRECISION": "widened"} if INTERPRETED else config),
    )  # fmt: skip


def forward(q, k, v, call, out) -> None:
    """Overwrite `out` (M, H, Dv), whatever it held."""
    check(q, v)
    q, k, v = map(contiguous_heads, (q, k, v))
    config = configuration(q.shape[2], v.shape[2], q.dtype, call.has_bias, dispatch.capability(q))
    tiles = tiles_of(call, len(q), config["BLOCK_M"], by_query=True)
    tensors = {"q": q, "k": k, "v": v, "out": out}
    launch(forward_kernel, tensors, Description(call, len(q)), tiles, q.shape[1], config)


def backward(do, q, k, v, call, dq, dk, dv, dpos, dts) -> None:
    """Overwrite dq (M, H, Dqk), dk (L, H, Dqk), dv (L, H, Dv) and, zero before, dpos and dts (B, entries).

    Without `call.deterministic` dq is a sum of float32 atomics.
    """
    check(q, v)
    do, q, k, v = map(contiguous_heads, (do, q, k, v))
    heads, dims, described = q.shape[1], (q.shape[2], v.shape[2], q.dtype), Description(call, len(q))
    inputs = {"do": do, "q": q, "k": k, "v": v}
    config = configuration(*dims, True, dispatch.capability(q))
    tiles = tiles_of(call, len(k), config["BLOCK_M"], by_query=False)
    tensors = {**inputs, "dk": dk, "dv": dv, "dq": dq}
    if not call.deterministic:
        # atomics add in float32 for any dtype, and dq is rounded once at the end
        tensors["dq"] = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        launch(columns_kernel, tensors, described, tiles, heads, config, ATOMIC=True)
        dq.copy_(tensors["dq"])
    else:
        by_query = tiles_of(call, len(q), config["BLOCK_M"], by_query=True)
        own = rows_configuration(config, q.dtype, call.has_bias, dispatch.capability(q))
        launch(rows_kernel, {**inputs, "dq": dq}, described, by_query, heads, own)
        # this kernel follows no pointer to dq
        launch(columns_kernel, tensors, described, tiles, heads, config, ATOMIC=False)
    if call.pos_weights is not None:
        # 1: this kernel holds no entries of a table beside the diagonals that it owns
        config = table_configuration(*dims, 1, dispatch.capability(q))
        tiles = tiles_of(call, len(k), config["BLOCK_M"], by_query=False)
        launch(positions_kernel, {**inputs, "dpos": dpos}, described, tiles, 1, config)
    if call.ts_weights is not None:
        config = table_configuration(*dims, dts.shape[1], dispatch.capability(q))
        tiles = tiles_of(call, len(q), config["BLOCK_M"], by_query=True)
        # each sequence may end in a partial block, hence one part more for each
        parts = len(k) // config["BLOCK_M"] + call.num_sequences + 1
        parts = torch.empty(parts, config["ENTRIES"], dtype=torch.float32, device=q.device)
        launch(times_kernel, {**inputs, "parts": parts}, described, tiles, 1, config)
        parts_kernel[(call.num_sequences,)](
            parts, dts, described.layout, dts.shape[1], BLOCK_M=config["BLOCK_M"], ENTRIES=config["ENTRIES"]
        )


def hstu_attention(q, k, v, *described):
    """See `tritonrec.kernels.hstu_attention.op.hstu_attention`; `described` are the fields of a `Call`."""
    shape = (*q.shape[:2], v.shape[2])
    if is_zero(q, v):
        return v.new_zeros(shape)
    out = v.new_empty(shape)
    forward(q, k, v, Call(*described), out)
    return out


def hstu_attention_backward_into(dq, dk, dv, do, q, k, v, *described):
    """Each sequence's gradients of the tables; overwrites dq, dk and dv, of any strides but the last."""
    call = Call(*described)
    dpos, dts = call.new_table_gradients()
    if is_zero(q, v):
        for gradient in (dq, dk, dv):
            gradient.zero_()
    else:
        backward(do, q, k, v, call, dq, dk, dv, dpos, dts)
    return dpos, dts
