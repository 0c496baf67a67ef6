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
them once to the exact grid. There are no atomics and no locks, unless ``deterministic=False`` asks for them:
dQ is summed by query rows, dK and dV by key rows. Only the inputs are kept for backward; scores are computed
again, and no (L, L) matrix exists at any moment.

Dimensions: B sequences, L tokens, M queries (= L without `delta_offsets`), H heads, Dqk and Dv features of a
head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
import torch

from tritonrec.kernels.arguments import check_tensors, check_whole
from tritonrec.kernels.dispatch import PLAIN_NUMBERS, Impl, implementation, in_plain_eager, plain_function
from tritonrec.kernels.head_layout import flat_heads
from tritonrec.kernels.hstu_attention import reference
from tritonrec.kernels.hstu_attention.call import Call
from tritonrec.kernels.hstu_attention.checks import check_arguments, check_backward, check_into, check_values
from tritonrec.kernels.hstu_attention.masks import Mask
from tritonrec.kernels.offsets import check_offsets_shape
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.workers import over_ranges

__all__ = ["attention_backward", "attention_forward", "hstu_attention"]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Into = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


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
    num_targets: torch.Tensor | None = None,
    target_group_size: int = 1,
    num_contexts: torch.Tensor | None = None,
    contextual_seq_len: int = 0,
    max_attn_len: int = 0,
    min_full_attn_seq_len: int = 0,
    attn_prefix_len: int = 0,
    pos_weights: torch.Tensor | None = None,
    ts_weights: torch.Tensor | None = None,
    timestamps: torch.Tensor | None = None,
    query_timestamps: torch.Tensor | None = None,
    bias_scaled_by_alpha: bool = False,
    delta_offsets: torch.Tensor | None = None,
    deterministic: bool = True,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Causal HSTU attention, diagonal included, over jagged sequences. All masks combine.

    Args:
        q: (M, H, Dqk), Dqk >= 1. k: (L, H, Dqk). v: (L, H, Dv). One dtype: float32; bf16 and fp16 too in
            Triton. The last dimension contiguous, other strides free (slices of one projection will do). In
            Triton no head has more than 256 features.
        seq_offsets: (B + 1,) int32 or int64, sequence b owns rows seq_offsets[b] : seq_offsets[b + 1].
        max_seq_len: no sequence is longer. It sizes the launch and `pos_weights`, and changes no value else.
        alpha: factor of the scores.
        scaling_seqlen: the normaliser N >= 1, the same for every batch: scale = 1 / N. Or, instead,
        attn_scale: (M,) float32, the scale of each query's row, or one element for all; not differentiated.
        num_targets: (B,) int32 or int64: the last so many tokens of a sequence see the tokens before them
            all and themselves, not each other. In groups of `target_group_size` they also see the earlier
            ones of their group.
        num_contexts: (B,) int32 or int64: the first so many tokens of a sequence see each other and all of
            history. Or `contextual_seq_len`, the same number for all sequences; one that is shorter without
            its targets has no history then.
        max_attn_len: history and targets see at most so many places back, and themselves; 0: no limit.
        min_full_attn_seq_len: the last so many rows of history, and the targets, have no such limit.
        attn_prefix_len: nor do the first so many tokens of a sequence, as keys.
        pos_weights: (2 N - 1,) float32 with N = max_seq_len, weight of query i and key j at j - i + N - 1; or
            (N,), at i - j, for masks without contextual tokens. One table for all heads.
        ts_weights: (buckets,) float32; floor(log2(max(1, t_i - t_j))), at most the last bucket, exact for all
            int64. timestamps: (L,) int64, needed with it. query_timestamps: (L,) int64, the t_i where they
            are others (HSTU takes the time of the next token).
        bias_scaled_by_alpha: False: alpha * q k + bias, as Meta's code has it. True: alpha * (q k + bias), as
            NVIDIA's and FBGEMM's.
        delta_offsets: (B + 1,): sequence b has queries for its last delta_offsets[b + 1] - delta_offsets[b]
            tokens only, for serving with cached keys and values. Output rows have the bits of the full call.
        deterministic: False lets Triton's backward add dq by float32 atomics, five products instead of seven:
            faster, and not the same bits each time. The CPU is deterministic anyway.
    Returns:
        (M, H, Dv) of v's dtype. Differentiable in q, k, v, pos_weights and ts_weights.
    Raises:
        ValueError: shapes, dtypes, offsets, lengths or numbers of tokens that do not fit.
    """
    check_whole(contextual_seq_len=contextual_seq_len)
    if contextual_seq_len:
        if num_contexts is not None:
            raise ValueError("give num_contexts or contextual_seq_len, not both")
        check_offsets_shape("seq_offsets", seq_offsets)
        check_tensors(("num_targets",), seq_offsets=seq_offsets, num_targets=num_targets)
        rest = seq_offsets[1:] - seq_offsets[:-1]
        rest = rest if num_targets is None else rest - num_targets
        num_contexts = rest.clamp(0, contextual_seq_len)
    mask = Mask(target_group_size, max_attn_len, min_full_attn_seq_len, attn_prefix_len)
    call = Call(
        seq_offsets, max_seq_len, float(alpha), 1 if scaling_seqlen is None else scaling_seqlen, list(mask),
        num_targets, num_contexts, delta_offsets, attn_scale, pos_weights, ts_weights, timestamps,
        query_timestamps, float(alpha) if bias_scaled_by_alpha else 1.0, deterministic, impl,
    )  # fmt: skip
    if (scaling_seqlen is None) == (attn_scale is None):
        raise ValueError("give the normaliser: scaling_seqlen or attn_scale, one of the two")
    check_arguments(q, k, v, call, contextual_seq_len)
    if not in_plain_eager(q, k, v, *call, plain=PLAIN_NUMBERS):
        return _hstu_attention(q, k, v, *call)
    # The dispatcher and `register_autograd` loop over the schema: as long as a tiny batch takes.
    return (_Attention.apply if torch.is_grad_enabled() else _attend)(q, k, v, *call)


def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """`hstu_attention` without the checks and the dispatcher: the door for hot callers."""
    chosen = implementation(call.impl, q)  # type: ignore[arg-type]
    if chosen == "reference":
        return reference.forward(q, k, v, call)
    shape = (*q.shape[:2], v.shape[2])
    if q.numel() == 0 or v.numel() == 0:
        return v.new_zeros(shape)
    if chosen == "triton":
        from tritonrec.kernels.hstu_attention import triton_attention

        out = v.new_empty(shape)
        triton_attention.forward(q, k, v, call, out)
        return out
    from tritonrec.kernels.hstu_attention import numba_attention

    out = v.new_zeros(shape)
    _launch(numba_attention.forward, (q, k, v), call, (out,), 1.0)
    return out


def attention_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, into: Into | None = None
) -> Gradients:
    """dq, dk, dv, and each sequence's gradients of the tables, (B, entries) float32.

    dq, dk and dv overwrite the tensors `into`, of any strides but a contiguous last dimension; new and
    contiguous without.
    """
    chosen = implementation(call.impl, q)  # type: ignore[arg-type]
    if chosen == "reference":
        *grads, dpos, dts = reference.backward(do, q, k, v, call)
        dq, dk, dv = grads if into is None else (to.copy_(grad) for to, grad in zip(into, grads, strict=True))
        return dq, dk, dv, dpos, dts
    dpos, dts = call.new_table_gradients()
    if chosen == "triton" and q.numel() > 0 and v.numel() > 0:
        from tritonrec.kernels.hstu_attention import triton_attention

        dq, dk, dv = into or (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
        triton_attention.backward(do, q, k, v, call, dq, dk, dv, dpos, dts)
        return dq, dk, dv, dpos, dts
    if into is None:
        dq, dk, dv = (tensor.new_zeros(tensor.shape) for tensor in (q, k, v))
    else:
        dq, dk, dv = (tensor.zero_() for tensor in into)
    if q.numel() == 0 or v.numel() == 0:
        return dq, dk, dv, dpos, dts
    from tritonrec.kernels.hstu_attention import numba_attention

    outs = (dq, dk, dv, dpos, dts)
    _launch(numba_attention.backward, (do, q, k, v), call, outs, 2.5)
    return outs


_NO_TIMES, _NO_WEIGHTS = np.empty(0, np.int64), np.empty(0, np.float32)


def _array(tensor: torch.Tensor | None, absent: np.ndarray) -> np.ndarray:
    return absent if tensor is None else tensor.detach().contiguous().numpy()


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
            f"hstu_attention on the CPU computes in float32, got {q.dtype}: convert q, k and v with "
            ".float(), or take impl='reference'"
        )
    offsets = call.seq_offsets.contiguous().numpy()
    row_offsets = _array(call.delta_offsets, offsets)
    none = _zeros(call.num_sequences)
    if call.attn_scale is None:
        scales = np.array([1 / call.scaling_seqlen], np.float32)
    else:
        scales = call.attn_scale.contiguous().view(-1).numpy()
    base, sign = (0, 0) if call.pos_weights is None else call.position_index
    times = _array(call.timestamps, _NO_TIMES)
    described = (
        offsets, row_offsets, _array(call.num_targets, none), _array(call.num_contexts, none),
        np.array(call.mask, np.int64), scales, np.uintp(len(scales) > 1), np.float32(call.alpha),
        _array(call.pos_weights, _NO_WEIGHTS), base, sign, _array(call.ts_weights, _NO_WEIGHTS),
        _array(call.query_timestamps, times), times, np.float32(call.bias_factor),
    )  # fmt: skip
    lengths = (offsets[1:] - offsets[:-1]).astype(np.float64)
    heads, dim_qk, dim_v = q.shape[1], q.shape[2], v.shape[2]
    pairs = lengths @ (row_offsets[1:] - row_offsets[:-1])
    sizes = tuple(map(np.uintp, (heads, dim_qk, dim_v, int(lengths.max()))))
    arguments = (*_flat(inputs), *described, *_flat(outs))

    def run(start: int, stop: int) -> None:
        kernel(*arguments, np.uintp(start), np.uintp(stop), *sizes)

    over_ranges(run, call.num_sequences, weight * float(pairs) * heads * (dim_qk + dim_v))


_CALL = (
    "Tensor seq_offsets, SymInt max_seq_len, float alpha, SymInt scaling_seqlen, SymInt[] mask_numbers, "
    "Tensor? num_targets, Tensor? num_contexts, Tensor? delta_offsets, Tensor? attn_scale, "
    "Tensor? pos_weights, Tensor? ts_weights, Tensor? timestamps, Tensor? query_timestamps, "
    "float bias_factor, bool deterministic, str impl"
)


def _attend(q, k, v, *described):
    call = Call(*described)
    check_values(q, k, call)
    return attention_forward(q.detach(), k.detach(), v.detach(), call)


@custom_op(
    "tritonrec::hstu_attention", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_CALL}) -> Tensor"
)
def _hstu_attention(q, k, v, *described):
    check_arguments(q, k, v, Call(*described))
    return _attend(q, k, v, *described)


@_hstu_attention.register_fake
def _(q, k, v, *described):
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2])


@custom_op(
    "tritonrec::hstu_attention_backward",
    mutates_args=(),
    schema=f"(Tensor do, Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _hstu_attention_backward(do, q, k, v, *described):
    call = Call(*described)
    check_backward(do, q, k, v, call)
    return attention_backward(do, q, k, v, call)


@_hstu_attention_backward.register_fake
def _(do, q, k, v, *described):
    return *(t.new_empty(t.shape) for t in (q, k, v)), *Call(*described).new_table_gradients()


@custom_op(
    "tritonrec::hstu_attention_backward_into",
    mutates_args=("dq", "dk", "dv"),
    schema=(
        "(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor do, Tensor q, Tensor k, Tensor v, "
        f"{_CALL}) -> (Tensor, Tensor)"
    ),
)
def _hstu_attention_backward_into(dq, dk, dv, do, q, k, v, *described):
    call = Call(*described)
    check_backward(do, q, k, v, call)
    check_into({"dq": dq, "dk": dk, "dv": dv}, do, q, k, v, call)
    return attention_backward(do, q, k, v, call, (dq, dk, dv))[3:]


@_hstu_attention_backward_into.register_fake
def _(dq, dk, dv, do, q, k, v, *described):
    return Call(*described).new_table_gradients()


def _save(ctx, inputs, output):
    q, k, v, *described = inputs
    ctx.save_for_backward(q, k, v, *(x if isinstance(x, torch.Tensor) else None for x in described))
    ctx.rest = [None if isinstance(x, torch.Tensor) else x for x in described]


def _backward(ctx, do):
    q, k, v, *tensors = ctx.saved_tensors
    call = Call(*(x if tensor is None else tensor for tensor, x in zip(tensors, ctx.rest, strict=True)))
    # With create_graph it is the op, which raises for a second derivative.
    if not torch.is_grad_enabled() and in_plain_eager(do, q, k, v, *call, plain=PLAIN_NUMBERS):
        dq, dk, dv, dpos, dts = attention_backward(do, q, k, v, call)
    else:
        dq, dk, dv, dpos, dts = _hstu_attention_backward(do, q, k, v, *call)
    rest = dict.fromkeys(Call._fields)
    if call.pos_weights is not None:
        rest["pos_weights"] = dpos.sum(0)
    if call.ts_weights is not None:
        rest["ts_weights"] = dts.sum(0)
    return dq, dk, dv, *rest.values()


_hstu_attention.register_autograd(_backward, setup_context=_save)
_Attention = plain_function(_attend, _save, _backward)
