"""Causal sums with a learned weight for each relative place or time, over sequences stored end to end.

    out[i, h] = sum over j <= i of the same sequence of  table[h, bucket(i, j)] * v[j, h]
    dv[j, h] = sum over i >= j of  table[h, bucket(i, j)] * do[i, h]
    dtable_b[h, r] = sum over pairs of sequence b with bucket(i, j) = r of  <do[i, h], v[j, h]>

    bucket(i, j) = min(i - j, R - 1)                                       by position
    bucket(i, j) = min(floor(log2(max(1, t_i - t_j))), R - 1)              by time, with timestamps t

Four tokens at times 0, 3, 3 and 40, R = 8::

    by position   0 . . .          by time   0 . . .
                  1 0 . .                    1 0 . .
                  2 1 0 .                    1 0 0 .
                  3 2 1 0                    5 5 5 0

These are the positional and the temporal channel of FuXi-alpha (Ye et al., "FuXi-alpha: Scaling
Recommendation Model with Feature Interaction Enhanced Transformer", WWW 2025). The logarithm is the number of
bits of an integer, exact for every pair of int64 times. No (L, L) matrix exists at any moment, and backward
keeps the inputs only. A sum runs along one sequence in a fixed order: a sequence's outputs and gradients do
not depend, bit for bit, on what it is batched with. The table's gradient leaves the kernel one sequence at a
time, (B, H, R), for a caller who rounds each of them once to fixed point.

Dimensions: B sequences, L tokens, H heads, D features of a head, R buckets.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.relative_aggregate.register import RELATIVE_AGGREGATE


def relative_aggregate(
    v: torch.Tensor,
    table: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    timestamps: torch.Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Each token's sum over itself and the tokens before it, weighted by relative position or time.

    Args:
        v: (L, H, D) float32, bf16 or fp16, the last dimension contiguous, other strides free.
        table: (H, R) float32, 1 <= R <= 2**27, the weight of each bucket.
        seq_offsets: (B + 1,) int32 or int64, sequence b owns rows seq_offsets[b] : seq_offsets[b + 1].
        max_seq_len: no sequence is longer, at most 2**27; it sizes the launch and changes no value.
        timestamps: (L,) int64, any values in any order (a token is at least 1 after those before it), or
            None for relative positions.
    Returns:
        (L, H, D) of v's dtype. Differentiable in v and table.
    Raises:
        ValueError: shapes, dtypes, offsets or lengths that do not fit.
    """
    return RELATIVE_AGGREGATE(v, table, seq_offsets, max_seq_len, timestamps, impl=impl)
