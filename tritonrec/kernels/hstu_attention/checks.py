"""What `hstu_attention` refuses: first by shapes and dtypes, then by the values of offsets and counts."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape, check_whole
from tritonrec.kernels.hstu_attention.call import Call
from tritonrec.kernels.offsets import (
    check_lengths,
    check_max_seq_len,
    check_offsets,
    check_offsets_shape,
)

INTEGERS = (torch.int32, torch.int64)
NUMBERS = {  # of the mask, and the least of each
    "target_group_size": 1, "max_attn_len": 0, "min_full_attn_seq_len": 0, "attn_prefix_len": 0,
}  # fmt: skip


def check(q, k, v, *described) -> None:
    """Refuse what does not fit, by shapes, dtypes and numbers: no value of a tensor is read."""
    call = Call(*described)
    check_offsets_shape("seq_offsets", call.seq_offsets)
    three = q.dim() == k.dim() == v.dim() == 3
    if not three or k.shape[1:] != q.shape[1:] or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"q must be (M, H, Dqk), k (L, H, Dqk) and v (L, H, Dv), got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if call.delta_offsets is None and q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q has {len(q)} rows and k {len(k)}: with queries for the last tokens only, give delta_offsets"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    check_whole(max_seq_len=call.max_seq_len, scaling_seqlen=call.scaling_seqlen)
    check_max_seq_len(call.max_seq_len)
    if not 1 <= call.scaling_seqlen < 1 << 63:
        raise ValueError(f"scaling_seqlen must be at least 1 and an int64, got {call.scaling_seqlen}")
    for name, least in NUMBERS.items():
        number = getattr(call, name)
        check_whole(**{name: number})
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    for name, counts in (("num_targets", call.num_targets), ("num_contexts", call.num_contexts)):
        if counts is None:
            continue
        if counts.shape != (call.num_sequences,) or counts.dtype not in INTEGERS:
            raise ValueError(
                f"{name} must be ({call.num_sequences},) int32 or int64, got {tuple(counts.shape)} "
                f"{counts.dtype}"
            )
    scale = call.attn_scale
    if scale is not None:
        if scale.dtype != torch.float32 or (scale.numel() != 1 and scale.shape != q.shape[:1]):
            raise ValueError(
                f"attn_scale must be ({len(q)},) float32 or one element, got {tuple(scale.shape)} "
                f"{scale.dtype}"
            )
        if scale.requires_grad:
            raise ValueError("attn_scale gets no gradient: detach it, or multiply the output instead")
    if call.has_bias or call.timestamps is not None or call.query_timestamps is not None:
        _check_bias(k.shape[0], call)


def _check_bias(tokens: int, call: Call) -> None:
    for name in ("pos_weights", "ts_weights"):
        table = getattr(call, name)
        if table is not None and (table.dim() != 1 or len(table) == 0 or table.dtype != torch.float32):
            raise ValueError(
                f"{name} must be (entries,) float32, one table for all heads, got {tuple(table.shape)} "
                f"{table.dtype}; for a table per head take ops.relative_aggregate"
            )
    if call.pos_weights is not None:
        one_sided, two_sided = call.max_seq_len, 2 * call.max_seq_len - 1
        if len(call.pos_weights) not in (one_sided, two_sided):
            raise ValueError(
                f"pos_weights must have max_seq_len = {one_sided} entries or {two_sided}, "
                f"got {len(call.pos_weights)}"
            )
        if len(call.pos_weights) != two_sided and call.num_contexts is not None:
            raise ValueError(
                "contextual tokens see later tokens: pos_weights must have 2 * max_seq_len - 1 = "
                f"{two_sided} entries, got {len(call.pos_weights)}"
            )
    if (call.ts_weights is None) != (call.timestamps is None):
        raise ValueError("ts_weights and timestamps go together")
    if call.query_timestamps is not None and call.timestamps is None:
        raise ValueError("query_timestamps need ts_weights and timestamps")
    for name in ("timestamps", "query_timestamps"):
        times = getattr(call, name)
        if times is not None and (times.shape != (tokens,) or times.dtype != torch.int64):
            raise ValueError(f"{name} must be ({tokens},) int64, got {tuple(times.shape)} {times.dtype}")


def check_memory(q, k, v, *described) -> None:
    """Refuse offsets and counts that do not fit; on an accelerator the checks are queued on the device."""
    call = Call(*described)
    check_offsets("seq_offsets", call.seq_offsets, len(k))
    check_lengths(call.seq_offsets, call.max_seq_len)
    if call.delta_offsets is call.num_targets is call.num_contexts is None:
        return
    lengths = call.seq_offsets[1:] - call.seq_offsets[:-1]
    if call.delta_offsets is not None:
        check_offsets("delta_offsets", call.delta_offsets, len(q))
        if len(call.delta_offsets) != len(call.seq_offsets):
            raise ValueError(
                f"delta_offsets must be ({len(call.seq_offsets)},), got {tuple(call.delta_offsets.shape)}"
            )
        deltas = call.delta_offsets[1:] - call.delta_offsets[:-1]
        check_counts("number of queries", deltas, lengths)
    if call.num_targets is not None:
        check_counts("num_targets", call.num_targets, lengths)
        lengths = lengths - call.num_targets
    if call.num_contexts is not None:
        check_counts("num_contexts", call.num_contexts, lengths)


def check_backward(do, q, v) -> None:
    """Refuse a `do` that is not like the output."""
    check_shape("do", do, (*q.shape[:2], v.shape[2]), v.dtype)


def check_into(dq, dk, dv, q, k, v) -> None:
    """Refuse dq, dk and dv that are not like q, k and v."""
    for name, to, of in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if to.shape != of.shape or to.dtype != of.dtype or (to.shape[2] > 1 and to.stride(2) != 1):
            raise ValueError(
                f"{name} must be {tuple(of.shape)} {of.dtype} with a contiguous last dimension, got "
                f"{tuple(to.shape)} {to.dtype} with strides {to.stride()}"
            )


def check_counts(name: str, counts: torch.Tensor, most: torch.Tensor) -> None:
    """Refuse counts (B,) that are negative or greater than `most` (B,), naming the first."""
    if counts.device.type != "cpu":
        fits = ((counts >= 0) & (counts <= most)).all()
        torch._assert_async(fits, f"{name} must lie between 0 and what a sequence has left")
        return
    wrong = ((counts < 0) | (counts > most)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(f"{name}[{at}] = {int(counts[at])} for a sequence with {int(most[at])} tokens left")
