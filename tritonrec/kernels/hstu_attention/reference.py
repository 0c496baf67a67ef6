"""HSTU attention one sequence and head at a time, with mask and bias spelled out; any float dtype."""

from __future__ import annotations

from typing import Any

import torch

from tritonrec.kernels.hstu_attention.call import Call
from tritonrec.kernels.hstu_attention.masks import visible


def buckets(row_times: list[int], times: list[int], count: int) -> torch.Tensor:
    """(rows, columns) int64: floor(log2(max(1, t_row - t_column))), at most ``count - 1``."""
    powers = [[max(1, late - early).bit_length() - 1 for early in times] for late in row_times]
    return torch.tensor(powers, dtype=torch.int64).view(len(row_times), len(times)).clamp(max=count - 1)


class _Sequence:
    """One sequence of a call: its rows of q and of k, its mask times scale, its bias and places in tables."""

    def __init__(self, call: Call, b: int, q: torch.Tensor):
        device, dtype = q.device, torch.promote_types(q.dtype, torch.float32)
        start, stop = int(call.seq_offsets[b]), int(call.seq_offsets[b + 1])
        first, last = (start, stop) if call.delta_offsets is None else call.delta_offsets[b : b + 2].tolist()
        self.rows, self.columns = slice(first, last), slice(start, stop)
        length, hidden = stop - start, (stop - start) - (last - first)
        targets = 0 if call.num_targets is None else int(call.num_targets[b])
        contexts = 0 if call.num_contexts is None else int(call.num_contexts[b])
        seen = visible(length, targets, contexts, call.mask)[hidden:].to(device)
        if call.attn_scale is None:
            self.scale = seen.to(dtype) / call.scaling_seqlen
        elif call.attn_scale.numel() == 1:
            self.scale = seen * call.attn_scale
        else:
            self.scale = seen * call.attn_scale[self.rows, None]
        self.bias: torch.Tensor | None = None
        self.places: dict[str, torch.Tensor] = {}
        if call.pos_weights is not None:
            base, sign = call.position_index
            ahead = torch.arange(length)[None, :] - torch.arange(hidden, length)[:, None]
            self.places["pos"] = (base + sign * ahead).clamp(0, len(call.pos_weights) - 1).to(device)
            self.bias = call.pos_weights[self.places["pos"]].to(dtype)
        if call.ts_weights is not None:
            assert call.timestamps is not None
            row_times = call.timestamps if call.query_timestamps is None else call.query_timestamps
            self.places["ts"] = buckets(
                row_times[start + hidden : stop].tolist(), call.timestamps[start:stop].tolist(),
                len(call.ts_weights),
            ).to(device)  # fmt: skip
            by_time = call.ts_weights[self.places["ts"]].to(dtype)
            self.bias = by_time if self.bias is None else self.bias + by_time

    def scores(self, call: Call, q: torch.Tensor, k: torch.Tensor, h: int) -> torch.Tensor:
        s = call.alpha * (q[self.rows, h] @ k[self.columns, h].t())
        return s if self.bias is None else s + (call.bias_factor * self.bias).to(s.dtype)


def hstu_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *described: Any) -> torch.Tensor:
    """See `tritonrec.kernels.hstu_attention.op.hstu_attention`; `described` are the fields of a `Call`."""
    call = Call(*described)
    out = v.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for b in range(call.num_sequences):
        sequence = _Sequence(call, b, q)
        for h in range(q.shape[1]):
            s = sequence.scores(call, q, k, h)
            p = s / (1 + torch.exp(-s)) * sequence.scale
            out[sequence.rows, h] = p.to(v.dtype) @ v[sequence.columns, h]
    return out


def hstu_attention_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *described: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, and each sequence's gradients of the tables, (B, entries)."""
    dq, dk, dv = (each.new_empty(each.shape) for each in (q, k, v))
    return dq, dk, dv, *hstu_attention_backward_into(dq, dk, dv, do, q, k, v, *described)


def hstu_attention_backward_into(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, do: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, *described: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Each sequence's gradients of the tables; overwrites dq, dk and dv."""
    call = Call(*described)
    for gradient in (dq, dk, dv):
        gradient.zero_()
    dpos, dts = call.new_table_gradients(q.dtype if q.dtype == torch.float64 else torch.float32)
    for b in range(call.num_sequences):
        sequence = _Sequence(call, b, q)
        for h in range(q.shape[1]):
            rows, columns = sequence.rows, sequence.columns
            s = sequence.scores(call, q, k, h)
            sigmoid = 1 / (1 + torch.exp(-s))
            p = (s * sigmoid * sequence.scale).to(v.dtype)
            ds = (do[rows, h] @ v[columns, h].t()) * sigmoid * (1 + s * (1 - sigmoid)) * sequence.scale
            dv[columns, h] = p.t() @ do[rows, h]
            dq[rows, h] = (call.alpha * ds).to(k.dtype) @ k[columns, h]
            dk[columns, h] = (call.alpha * ds).to(q.dtype).t() @ q[rows, h]
            for name, table in (("pos", dpos), ("ts", dts)):
                if name in sequence.places:
                    terms = (call.bias_factor * ds).flatten().to(table.dtype)
                    table[b].index_add_(0, sequence.places[name].flatten(), terms)
    return dpos, dts
