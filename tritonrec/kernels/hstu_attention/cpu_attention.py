"""HSTU attention on the CPU: arrays and ranges of sequences for the kernels of `numba_attention`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tritonrec.kernels.head_layout import flat_heads
from tritonrec.kernels.hstu_attention import numba_attention
from tritonrec.kernels.hstu_attention.call import Call, is_zero
from tritonrec.kernels.row_layout import flat, flat_int64
from tritonrec.kernels.workers import over_ranges

Tensors = tuple[torch.Tensor, ...]


def hstu_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *described: Any) -> torch.Tensor:
    """See `tritonrec.kernels.hstu_attention.op.hstu_attention`; `described` are the fields of a `Call`."""
    out = v.new_zeros(*q.shape[:2], v.shape[2])
    if not is_zero(q, v):
        _launch(numba_attention.forward, (q, k, v), Call(*described), (out,), 1.0)
    return out


def hstu_attention_backward_into(dq, dk, dv, do, q, k, v, *described) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's gradients of the tables; overwrites dq, dk and dv, of any strides but the last."""
    call = Call(*described)
    dpos, dts = call.new_table_gradients()
    outs = dq.zero_(), dk.zero_(), dv.zero_(), dpos, dts
    if not is_zero(q, v):
        _launch(numba_attention.backward, (do, q, k, v), call, outs, 2.5)
    return dpos, dts


_NO_TIMES, _NO_WEIGHTS = np.empty(0, np.int64), np.empty(0, np.float32)


def _integers(tensor: torch.Tensor | None, absent: np.ndarray) -> np.ndarray:
    return absent if tensor is None else flat_int64(tensor)


def _weights(tensor: torch.Tensor | None) -> np.ndarray:
    return _NO_WEIGHTS if tensor is None else flat(tensor)


@lru_cache(maxsize=8)
def _zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.int64)


def _flat(tensors: Tensors) -> Iterator[np.ndarray | np.uintp]:
    """Arrays for numba: three dimensions flat with two strides, tables as they are."""
    for tensor in tensors:
        yield from flat_heads(tensor) if tensor.dim() == 3 else (tensor.numpy(),)


def _launch(kernel: Callable, inputs: Tensors, call: Call, outs: Tensors, weight: float) -> None:
    """Run a numba kernel on `inputs`, the last three q, k and v; it costs `weight` times a forward."""
    q, _, v = inputs[-3:]
    if q.dtype != torch.float32:
        raise ValueError(
            f"hstu_attention on the CPU takes float32, bfloat16 or float16, got {q.dtype}: convert q, k and "
            "v with .float(), or take impl='reference'"
        )
    offsets = flat_int64(call.seq_offsets)
    row_offsets = _integers(call.delta_offsets, offsets)
    none = _zeros(call.num_sequences)
    if call.attn_scale is None:
        scales = np.array([1 / call.scaling_seqlen], np.float32)
    else:
        scales = flat(call.attn_scale)
    base, sign = call.position_index
    rules = call.mask
    mask = np.array(
        [rules.target_group_size, rules.max_attn_len, rules.min_full_attn_seq_len, rules.attn_prefix_len],
        np.int64,
    )
    times = _integers(call.timestamps, _NO_TIMES)
    described = (
        offsets, row_offsets, _integers(call.num_targets, none), _integers(call.num_contexts, none),
        mask, scales, np.uintp(len(scales) > 1), np.float32(call.alpha),
        _weights(call.pos_weights), base, sign, _weights(call.ts_weights),
        _integers(call.query_timestamps, times), times, np.float32(call.bias_factor),
    )  # fmt: skip
    lengths = (offsets[1:] - offsets[:-1]).astype(np.float64)
    heads, dim_qk, dim_v = q.shape[1], q.shape[2], v.shape[2]
    pairs = lengths @ (row_offsets[1:] - row_offsets[:-1])
    sizes = tuple(map(np.uintp, (heads, dim_qk, dim_v, int(lengths.max()))))
    arguments = (*_flat(inputs), *described, *_flat(outs))

    def run(start: int, stop: int) -> None:
        kernel(*arguments, np.uintp(start), np.uintp(stop), *sizes)

    over_ranges(run, call.num_sequences, weight * float(pairs) * heads * (dim_qk + dim_v))
