"""Jagged HSTU attention: pointwise SiLU instead of softmax, over sequences stored end to end.

    S = alpha * Q K^T + factor * bias,   P = silu(S) * mask * scale,   O = P V
    dV = P^T dO,   dS = (dO V^T) * sigmoid(S) * (1 + S * (1 - sigmoid(S))) * mask * scale
    dQ = alpha * dS K,   dK = alpha * dS^T Q,   d table[r] = factor * sum of dS over pairs that use entry r

    bias(i, j) = pos_weights[position of j relative to i] + ts_weights[floor(log2(max(1, t_i - t_j)))]

Source: Zhai et al., "Actions speak louder than words", ICML 2024, equation 2. Two sequences of lengths 3 and
2 and an empty one between them, seq_offsets = [0, 3, 3, 5]; the last one has one target (t), which sees
history and itself::

    L = 5 rows     0 1 2 | 3 4        mask    1 . . | . .
                   a a a | b t                1 1 . | . .
                                              1 1 1 | . .
                                              . . . | 1 .
                                              . . . | 1 1

`masks` draws what contextual tokens, target groups, a window and a prefix do to it, together.

The normaliser is an argument and never the longest sequence of the batch, and a sum runs along one sequence
in a fixed order: a sequence's output and gradients do not depend, bit for bit, on what it is batched with.
Gradients of the tables leave the kernel one sequence at a time, (B, entries), for a caller who rounds each of
them once to fixed point. There are no atomics and no locks, unless ``deterministic=False`` asks for them:
dQ is summed by query rows, dK and dV by key rows. Only the inputs are kept for backward; scores are computed
again, and no (L, L) matrix exists at any moment.

Dimensions: B sequences, L tokens, M queries (= L without `delta_offsets`), H heads, Dqk and Dv features of a
head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tritonrec.kernels.autocast import FLOAT32, LOWER
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.hstu_attention import checks
from tritonrec.kernels.hstu_attention.call import Call, HSTUBias, HSTUMask, describe
from tritonrec.kernels.hstu_attention.masks import visible
from tritonrec.kernels.op import Op
from tritonrec.kernels.row_terms import RowTerms


def hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    alpha: float,
    scaling_seqlen: int | None = None,
    attn_scale: torch.Tensor | None = None,
    mask: HSTUMask | None = None,
    bias: HSTUBias | None = None,
    delta_offsets: torch.Tensor | None = None,
    deterministic: bool = True,
    impl: Impl = "auto",
) -> torch.Tensor:
    """HSTU attention, causal with the diagonal included, over jagged sequences.

    Args:
        q: (M, H, Dqk). k: (L, H, Dqk). v: (L, H, Dv). One dtype: float32, bf16 or fp16. The
            last dimension contiguous, other strides free (slices of one projection will do). In Triton no
            head has more than 256 features.
        seq_offsets: (B + 1,) int32 or int64, sequence b owns rows seq_offsets[b] : seq_offsets[b + 1].
        max_seq_len: no sequence is longer, at most 2**27. It sizes the launch and the bias of positions, and
            changes no value else.
        alpha: factor of the scores.
        scaling_seqlen: the normaliser N >= 1, the same for every batch: scale = 1 / N. Or, instead,
        attn_scale: (M,) float32, the scale of each query's row, or one element for all; not differentiated.
        mask: targets, contextual tokens and windows; None: causal alone.
        bias: of relative position and time; None: none.
        delta_offsets: (B + 1,): sequence b has queries for its last delta_offsets[b + 1] - delta_offsets[b]
            tokens only, for serving with cached keys and values. Output rows have the bits of the full call.
        deterministic: False lets Triton's backward add dq by float32 atomics, five products instead of seven:
            faster, and not the same bits each time. The CPU is deterministic anyway.
    Returns:
        (M, H, Dv) of v's dtype. Differentiable in q, k, v and the weights of the bias.
    Raises:
        ValueError: shapes, dtypes, offsets, lengths or numbers of tokens that do not fit.
    """
    if (scaling_seqlen is None) == (attn_scale is None):
        raise ValueError("give the normaliser: scaling_seqlen or attn_scale, one of the two")
    call = describe(
        seq_offsets, max_seq_len, alpha=alpha, scaling_seqlen=scaling_seqlen, attn_scale=attn_scale,
        mask=mask, bias=bias, delta_offsets=delta_offsets, deterministic=deterministic,
    )  # fmt: skip
    return HSTU_ATTENTION(q, k, v, *call, impl=impl)


# Reference: one sequence and head at a time, with mask and bias spelled out; any float dtype.


def buckets(row_times: list[int], times: list[int], count: int) -> torch.Tensor:
    """(rows, columns) int64: floor(log2(max(1, t_row - t_column))), at most ``count - 1``."""
    # An integer's bit_length - 1 is floor(log2), without a rounding.
    powers = [[max(1, late - early).bit_length() - 1 for early in times] for late in row_times]
    return torch.tensor(powers, dtype=torch.int64).view(len(row_times), len(times)).clamp(max=count - 1)


class _Sequence:
    """One sequence of a call: its rows of q and of k, its mask times scale, its bias and places in tables."""

    def __init__(self, call: Call, b: int, q: torch.Tensor):
        device, dtype = q.device, torch.promote_types(q.dtype, torch.float32)
        start, stop = int(call.seq_offsets[b]), int(call.seq_offsets[b + 1])
        first, last = (start, stop) if call.delta_offsets is None else call.delta_offsets[b : b + 2].tolist()
        self.rows, self.columns = slice(first, last), slice(start, stop)
        # `hidden`: tokens without a query, at the beginning of the sequence.
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


def hstu_attention_reference(q, k, v, *described) -> torch.Tensor:
    """See `hstu_attention`; `described` are the fields of a `Call`."""
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
    backward_into: Callable[..., tuple[torch.Tensor, ...]], do: torch.Tensor, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, *described: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dq, dk, dv, and each sequence's gradients of the tables, (B, entries)."""
    dq, dk, dv = (each.new_empty(each.shape) for each in (q, k, v))
    return dq, dk, dv, *backward_into(dq, dk, dv, do, q, k, v, *described)


def hstu_attention_backward_into_reference(
    dq, dk, dv, do, q, k, v, *described
) -> tuple[torch.Tensor, torch.Tensor]:
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
            # The derivative of silu: d (s * sigmoid(s)) / ds = sigmoid * (1 + s * (1 - sigmoid)).
            ds = (do[rows, h] @ v[columns, h].t()) * sigmoid * (1 + s * (1 - sigmoid)) * sequence.scale
            dv[columns, h] = p.t() @ do[rows, h]
            dq[rows, h] = (call.alpha * ds).to(k.dtype) @ k[columns, h]
            dk[columns, h] = (call.alpha * ds).to(q.dtype).t() @ q[rows, h]
            for name, table in (("pos", dpos), ("ts", dts)):
                if name in sequence.places:
                    terms = (call.bias_factor * ds).flatten().to(table.dtype)
                    table[b].index_add_(0, sequence.places[name].flatten(), terms)
    return dpos, dts


CALL = (
    "Tensor seq_offsets, int max_seq_len, float alpha, int scaling_seqlen, Tensor? attn_scale, "
    "Tensor? num_targets, int target_group_size, Tensor? num_contexts, int max_attn_len, "
    "int min_full_attn_seq_len, int attn_prefix_len, Tensor? pos_weights, Tensor? ts_weights, "
    "Tensor? timestamps, Tensor? query_timestamps, float bias_factor, Tensor? delta_offsets, "
    "bool deterministic"
)
"""The fields of `Call`."""


def _fake(q, v):
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _fake_backward(q, k, v, *described):
    return *(each.new_empty(each.shape) for each in (q, k, v)), *Call(*described).new_table_gradients()


def _fake_into(v, *described):
    return Call(*described).new_table_gradients()


def _save(ctx, inputs, output):
    *arguments, ctx.impl = inputs
    # Two lists of one length, each with None where the other has the argument.
    ctx.save_for_backward(*(each if isinstance(each, torch.Tensor) else None for each in arguments))
    ctx.rest = [None if isinstance(each, torch.Tensor) else each for each in arguments]


def _backward(ctx, do):
    pairs = zip(ctx.saved_tensors, ctx.rest, strict=True)
    q, k, v, *described = (other if tensor is None else tensor for tensor, other in pairs)
    dq, dk, dv, dpos, dts = HSTU_ATTENTION_BACKWARD(do, q, k, v, *described, impl=ctx.impl)
    call, rest = Call(*described), dict.fromkeys(Call._fields)
    for name, terms in (("pos_weights", dpos), ("ts_weights", dts)):
        if getattr(call, name) is not None:
            # (B, entries): one term for each sequence, and no sum yet.
            rest[name] = RowTerms(terms)
    return dq, dk, dv, *rest.values()


HSTU_ATTENTION = Op(
    f"hstu_attention(Tensor q, Tensor k, Tensor v, {CALL}) -> Tensor",
    reference=hstu_attention_reference, cpu="cpu_attention:hstu_attention",
    triton="triton_attention:hstu_attention", check=checks.check, check_memory=checks.check_memory,
    fake=_fake, save=_save, backward=_backward, widens=True,
    autocast=dict.fromkeys("qkv", LOWER)
    | dict.fromkeys(("attn_scale", "pos_weights", "ts_weights"), FLOAT32),
)  # fmt: skip
HSTU_ATTENTION_BACKWARD_INTO = Op(
    "hstu_attention_backward_into(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor do, Tensor q, "
    f"Tensor k, Tensor v, {CALL}) -> (Tensor, Tensor)",
    reference=hstu_attention_backward_into_reference, cpu="cpu_attention:hstu_attention_backward_into",
    triton="triton_attention:hstu_attention_backward_into",
    check=(checks.check, checks.check_backward, checks.check_into), check_memory=checks.check_memory,
    fake=_fake_into, widens=True,
)  # fmt: skip
HSTU_ATTENTION_BACKWARD = Op(
    f"hstu_attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, {CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=hstu_attention_backward, over=HSTU_ATTENTION_BACKWARD_INTO,
    check=(checks.check, checks.check_backward), check_memory=checks.check_memory, fake=_fake_backward,
    widens=True,
)  # fmt: skip
