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

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.hstu_attention.call import HSTUBias, HSTUMask, describe
from tritonrec.kernels.hstu_attention.register import HSTU_ATTENTION


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
