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

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import FLOAT32, LOW, LOWER
from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.offsets import (
    LONGEST,
    check_lengths,
    check_max_seq_len,
    check_offsets,
    check_offsets_shape,
)
from tritonrec.kernels.op import Op
from tritonrec.kernels.row_terms import RowTerms


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


# Reference: one sequence and head at a time, with the weights spelled out; any float dtype.


def buckets(length: int, timestamps: list[int] | None, count: int) -> torch.Tensor:
    """(length, length) int64: the bucket of a query (row) and a key (column), 0 where the key comes later."""
    places = torch.zeros(length, length, dtype=torch.int64)
    for i in range(length):
        for j in range(i + 1):
            if timestamps is None:
                place = i - j
            else:
                place = max(1, timestamps[i] - timestamps[j]).bit_length() - 1  # Python's own integers
            places[i, j] = min(place, count - 1)
    return places


def sequences(
    seq_offsets: torch.Tensor, timestamps: torch.Tensor | None, count: int
) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Rows, buckets and causal mask of each sequence."""
    found = []
    for start, stop in zip(seq_offsets[:-1].tolist(), seq_offsets[1:].tolist(), strict=True):
        times = None if timestamps is None else timestamps[start:stop].tolist()
        places = buckets(stop - start, times, count).to(seq_offsets.device)
        found.append((slice(start, stop), places, torch.ones_like(places).tril()))
    return found


def relative_aggregate_reference(v, table, seq_offsets, max_seq_len, timestamps) -> torch.Tensor:
    """See `relative_aggregate`."""
    out = v.new_zeros(v.shape)
    for rows, places, mask in sequences(seq_offsets, timestamps, table.shape[1]):
        for h in range(v.shape[1]):
            out[rows, h] = (table[h][places] * mask) @ v[rows, h]
    return out


def relative_aggregate_backward_reference(
    do, v, table, seq_offsets, max_seq_len, timestamps
) -> tuple[torch.Tensor, torch.Tensor]:
    """dv (L, H, D), and each sequence's gradient of the table, (B, H, R), both contiguous."""
    dv, dtable = v.new_zeros(v.shape), v.new_zeros(len(seq_offsets) - 1, *table.shape)
    for b, (rows, places, mask) in enumerate(sequences(seq_offsets, timestamps, table.shape[1])):
        for h in range(v.shape[1]):
            dv[rows, h] = (table[h][places] * mask).t() @ do[rows, h]
            scores = (do[rows, h] @ v[rows, h].t()) * mask
            for r in range(table.shape[1]):
                dtable[b, h, r] = scores[places == r].sum()
    return dv, dtable


def _check(v, table, seq_offsets, max_seq_len, timestamps) -> None:
    check_max_seq_len(max_seq_len)
    check_offsets_shape("seq_offsets", seq_offsets)
    if v.dim() != 3 or table.dim() != 2 or table.shape[0] != v.shape[1] or table.shape[1] == 0:
        raise ValueError(
            f"v must be (L, H, D) and table (H, R) with R >= 1, got v {tuple(v.shape)}, "
            f"table {tuple(table.shape)}"
        )
    if table.shape[1] > LONGEST:
        raise ValueError(f"table must have at most 2**27 buckets a head, got {table.shape[1]}")
    if v.dtype not in (torch.float32, *LOW) or table.dtype != torch.float32:
        raise ValueError(
            f"v must be float32, bfloat16 or float16 and table float32, got {v.dtype} and {table.dtype}"
        )
    if timestamps is not None and (timestamps.shape != v.shape[:1] or timestamps.dtype != torch.int64):
        raise ValueError(
            f"timestamps must be ({v.shape[0]},) int64, got {tuple(timestamps.shape)} {timestamps.dtype}"
        )


def _check_backward(do, v) -> None:
    check_shape("do", do, v.shape, v.dtype)


def _check_sequences(v, seq_offsets, max_seq_len) -> None:
    check_offsets("seq_offsets", seq_offsets, v.shape[0])
    check_lengths(seq_offsets, max_seq_len)


def _save(ctx, inputs, output):
    v, table, seq_offsets, ctx.max_seq_len, timestamps, ctx.impl = inputs
    ctx.save_for_backward(v, table, seq_offsets, timestamps)


def _backward(ctx, do):
    v, table, seq_offsets, timestamps = ctx.saved_tensors
    dv, dtable = RELATIVE_AGGREGATE_BACKWARD(
        do, v, table, seq_offsets, ctx.max_seq_len, timestamps, impl=ctx.impl
    )
    return dv, RowTerms(dtable), None, None, None


def _fake_backward(v, table, seq_offsets):
    return v.new_empty(v.shape), table.new_empty(seq_offsets.shape[0] - 1, *table.shape)


RELATIVE_AGGREGATE = Op(
    "relative_aggregate(Tensor v, Tensor table, Tensor seq_offsets, int max_seq_len, Tensor? timestamps) "
    "-> Tensor",
    reference=relative_aggregate_reference, cpu="numba_relative:relative_aggregate",
    triton="triton_relative:relative_aggregate", check=_check, check_memory=_check_sequences,
    fake=lambda v: v.new_empty(v.shape), save=_save, backward=_backward,
    widens=True, autocast={"v": LOWER, "table": FLOAT32},
)  # fmt: skip
RELATIVE_AGGREGATE_BACKWARD = Op(
    "relative_aggregate_backward(Tensor do, Tensor v, Tensor table, Tensor seq_offsets, int max_seq_len, "
    "Tensor? timestamps) -> (Tensor, Tensor)",
    reference=relative_aggregate_backward_reference, cpu="numba_relative:relative_aggregate_backward",
    triton="triton_relative:relative_aggregate_backward", check=(_check, _check_backward),
    check_memory=_check_sequences, fake=_fake_backward, widens=True,
)  # fmt: skip
