"""What `hstu_attention` refuses: first by shapes and dtypes, then by the values of offsets and counts."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape, check_tensors, check_whole
from tritonrec.kernels.hstu_attention.call import Call
from tritonrec.kernels.hstu_attention.masks import Mask
from tritonrec.kernels.offsets import (
    check_lengths,
    check_max_seq_len,
    check_offsets,
    check_offsets_shape,
)
from tritonrec.kernels.overlap import check_no_overlap

INTEGERS = (torch.int32, torch.int64)
OPTIONAL = (
    "num_targets", "num_contexts", "delta_offsets", "attn_scale", "pos_weights", "ts_weights", "timestamps",
    "query_timestamps",
)  # fmt: skip


def check_arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, contextual_seq_len: int = 0
) -> None:
    """Refuse what does not fit, by shapes, dtypes and numbers: no value of a tensor is read."""
    check_tensors(
        OPTIONAL, q=q, k=k, v=v, seq_offsets=call.seq_offsets, num_targets=call.num_targets,
        num_contexts=call.num_contexts, delta_offsets=call.delta_offsets, attn_scale=call.attn_scale,
        pos_weights=call.pos_weights, ts_weights=call.ts_weights, timestamps=call.timestamps,
        query_timestamps=call.query_timestamps,
    )  # fmt: skip
    check_offsets_shape("seq_offsets", call.seq_offsets)
    three = q.dim() == k.dim() == v.dim() == 3
    if not three or k.shape[1:] != q.shape[1:] or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"q must be (M, H, Dqk), k (L, H, Dqk) and v (L, H, Dv), got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if call.delta_offsets is None and len(q) != len(k):
        raise ValueError(
            f"q has {len(q)} rows and k {len(k)}: with queries for the last tokens only, give delta_offsets"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    check_whole(max_seq_len=call.max_seq_len, scaling_seqlen=call.scaling_seqlen)
    check_max_seq_len(call.max_seq_len)
    if not 1 <= call.scaling_seqlen < 1 << 63:
        raise ValueError(f"scaling_seqlen must be at least 1 and an int64, got {call.scaling_seqlen}")
    if len(call.mask_numbers) != len(Mask._fields):
        raise ValueError(f"mask_numbers must be {len(Mask._fields)}, {Mask._fields}, got {call.mask_numbers}")
    check_whole(**dict(zip(Mask._fields, call.mask_numbers, strict=True)))
    if call.mask_numbers[0] < 1 or min(*call.mask_numbers, contextual_seq_len) < 0:
        numbers = {**call.mask._asdict(), "contextual_seq_len": contextual_seq_len}
        name = next(n for n, count in numbers.items() if count < (n == "target_group_size"))
        raise ValueError(f"{name} must be at least {int(name == 'target_group_size')}, got {numbers[name]}")
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
        _check_bias(len(k), call)


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


def check_values(q: torch.Tensor, k: torch.Tensor, call: Call) -> None:
    """Refuse offsets and counts that do not fit; on an accelerator the checks are queued on the device."""
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
        _check_counts("number of queries", deltas, lengths)
    if call.num_targets is not None:
        _check_counts("num_targets", call.num_targets, lengths)
        lengths = lengths - call.num_targets
    if call.num_contexts is not None:
        _check_counts("num_contexts", call.num_contexts, lengths)


def check_backward(do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
    """As `check_arguments` and `check_values`, and `do` like the output."""
    check_arguments(q, k, v, call)
    check_tensors(q=q, do=do)
    check_shape("do", do, (*q.shape[:2], v.shape[2]), v.dtype)
    check_values(q, k, call)


def check_into(
    into: dict[str, torch.Tensor], do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    call: Call,
) -> None:  # fmt: skip
    """Refuse tensors for dq, dk and dv that do not fit q, k and v, or share memory with an argument."""
    check_tensors(q=q, **into)
    for (name, to), of in zip(into.items(), (q, k, v), strict=True):
        if to.shape != of.shape or to.dtype != of.dtype or (to.shape[2] > 1 and to.stride(2) != 1):
            raise ValueError(
                f"{name} must be {tuple(of.shape)} {of.dtype} with a contiguous last dimension, got "
                f"{tuple(to.shape)} {to.dtype} with strides {to.stride()}"
            )
    tensors = {n: x for n, x in call._asdict().items() if isinstance(x, torch.Tensor)}
    check_no_overlap(into, {"do": do, "q": q, "k": k, "v": v, **tensors})


def _check_counts(name: str, counts: torch.Tensor, most: torch.Tensor) -> None:
    if counts.device.type != "cpu":
        fits = ((counts >= 0) & (counts <= most)).all()
        torch._assert_async(fits, f"{name} must lie between 0 and what a sequence has left")
        return
    wrong = ((counts < 0) | (counts > most)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(f"{name}[{at}] = {int(counts[at])} for a sequence with {int(most[at])} tokens left")
