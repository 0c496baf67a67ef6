"""Softmax attention over sequences stored end to end, each in a fixed order of its own.

    s[i, j] = scale * <q[i, h], k[j, h]> + bias[b, h, i, j]        where query i sees key j, else -inf
    p = softmax over j of s,   out[i, h] = sum over j of  p[i, j] * kept[i, j] * v[j, h]
    dv[j] = sum over i of  p[i, j] kept[i, j] do[i]
    ds[i, j] = p[i, j] (kept[i, j] <do[i], v[j]> - <do[i], out[i]>)
    dq[i] = scale * sum over j of ds[i, j] k[j],   dk[j] = scale * sum over i of ds[i, j] q[i]

A query that sees no key has the output 0 and no gradient. With `causal` query i sees keys j <= i. A padded
batch (B, T, H, D) is the case of equal lengths, and its padding is a bias of -inf.

No (L, L) matrix exists but the bias that a caller gives. Sums run along one sequence: a sequence's outputs
and gradients do not depend, bit for bit, on what it is batched with, and there are no atomics. Dropout of the
weights is a function of (seed, sample, head, i, j): head h draws under ``seed + 2**32 h``, where query i is
the position and key j the column of `tritonrec.ops.dropout`.

Dimensions: B sequences, M queries, L keys, H heads, D and E features of a head.
Source: Vaswani et al., "Attention is all you need", NeurIPS 2017, equation 1; backward and the running
maximum as in Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import as_float, check_tensors
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.softmax_attention.register import SOFTMAX_ATTENTION


def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    sample_ids: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Attention of each sequence's queries to its own keys.

    Args:
        q: (M, H, D). k: (L, H, D). v: (L, H, E). One dtype, float32, bf16 or fp16; the last dimension
            contiguous, other strides free.
        seq_offsets: (B + 1,) int32 or int64, sequence b owns queries seq_offsets[b] : seq_offsets[b + 1].
        max_seq_len: no sequence has more queries or keys; it sizes the launch and changes no value.
        causal: query i sees keys up to place i. scale: of the products; None: D ** -0.5.
        key_offsets: as `seq_offsets`, of the keys; None: the same.
        bias: (B, H, I, J) float32, any strides (``expand`` is free), added to the scores of query i < I and
            key j < J; -inf hides a key. It gets no gradient.
        dropout: probability p that a weight is zeroed, 0 <= p < 1. seed: int64. sample_ids: (B,) int64,
            needed where there is dropout.
    Returns:
        (M, H, E) of v's dtype. Differentiable in q, k and v.
    Raises:
        ValueError: shapes, dtypes, offsets or lengths that do not fit.
    """
    if scale is None:
        check_tensors(q=q)
        scale = max(q.shape[-1], 1) ** -0.5 if q.dim() else 1.0
    out, _, _ = SOFTMAX_ATTENTION(
        q, k, v, seq_offsets, key_offsets, max_seq_len, as_float("scale", scale), causal, bias,
        as_float("dropout", dropout), seed, sample_ids, impl=impl,
    )  # fmt: skip
    return out
