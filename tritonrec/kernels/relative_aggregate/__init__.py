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
time, (B, H, R), for a caller who rounds each of them once to the exact grid.

Dimensions: B sequences, L tokens, H heads, D features of a head, R buckets.
"""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.arguments import check_shape, check_tensors
from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.head_layout import flat_heads
from tritonrec.kernels.offsets import check_lengths, check_max_seq_len, check_offsets
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.relative_aggregate import reference
from tritonrec.kernels.workers import over_ranges

__all__ = ["aggregate_backward", "aggregate_forward", "relative_aggregate"]


def relative_aggregate(
    v: torch.Tensor,
    table: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    timestamps: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Each token's sum over itself and the tokens before it, weighted by relative position or time.

    Args:
        v: (L, H, D) float32, the last dimension contiguous, other strides free.
        table: (H, R) float32, R >= 1, the weight of each bucket.
        seq_offsets: (B + 1,) int32 or int64, sequence b owns rows seq_offsets[b] : seq_offsets[b + 1].
        max_seq_len: no sequence is longer; it sizes the launch and changes no value.
        timestamps: (L,) int64, any values in any order (a token is at least 1 after those before it), or
            None for relative positions.
    Returns:
        (L, H, D) float32. Differentiable in v and table.
    Raises:
        ValueError: shapes, dtypes, offsets or lengths that do not fit.
    """
    _check(v, table, seq_offsets, max_seq_len, timestamps)
    return _relative_aggregate(v, table, seq_offsets, max_seq_len, timestamps, impl)


def _check(
    v: torch.Tensor,
    table: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    timestamps: torch.Tensor | None,
) -> None:
    check_max_seq_len(max_seq_len)
    check_tensors(("timestamps",), v=v, table=table, seq_offsets=seq_offsets, timestamps=timestamps)
    if v.dim() != 3 or table.dim() != 2 or table.shape[0] != v.shape[1] or table.shape[1] == 0:
        raise ValueError(
            f"v must be (L, H, D) and table (H, R) with R >= 1, got v {tuple(v.shape)}, "
            f"table {tuple(table.shape)}"
        )
    if v.dtype != torch.float32 or table.dtype != torch.float32:
        raise ValueError(f"v and table must be float32, got {v.dtype} and {table.dtype}")
    if timestamps is not None and (timestamps.shape != v.shape[:1] or timestamps.dtype != torch.int64):
        raise ValueError(
            f"timestamps must be ({v.shape[0]},) int64, got {tuple(timestamps.shape)} {timestamps.dtype}"
        )


def _check_values(v: torch.Tensor, seq_offsets: torch.Tensor, max_seq_len: int) -> None:
    check_offsets("seq_offsets", seq_offsets, v.shape[0])
    check_lengths(seq_offsets, max_seq_len)


def aggregate_forward(
    v: torch.Tensor,
    table: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    timestamps: torch.Tensor | None,
    impl: str,
) -> torch.Tensor:
    """`relative_aggregate` without the checks and the dispatcher: the door for hot callers."""
    chosen = implementation(impl, v)  # type: ignore[arg-type]
    if chosen == "reference":
        return reference.forward(v, table, seq_offsets, timestamps)
    if v.numel() == 0:
        return v.new_zeros(v.shape)
    if chosen == "triton":
        from tritonrec.kernels.relative_aggregate import triton_relative

        out = v.new_empty(v.shape)
        triton_relative.forward(v, table, seq_offsets, max_seq_len, timestamps, out)
        return out
    from tritonrec.kernels.relative_aggregate import numba_relative

    out = v.new_zeros(v.shape)
    offsets, times, sizes, cost = _plan(v, table, seq_offsets, timestamps)
    arguments = (*flat_heads(v), table.contiguous().view(-1).numpy(), offsets, times, out.view(-1).numpy())

    def run(start: int, stop: int) -> None:
        numba_relative.forward(*arguments, np.uintp(start), np.uintp(stop), *sizes)

    over_ranges(run, len(offsets) - 1, cost)
    return out


def aggregate_backward(
    do: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    timestamps: torch.Tensor | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dv (L, H, D), and each sequence's gradient of the table, (B, H, R), both contiguous."""
    chosen = implementation(impl, v)  # type: ignore[arg-type]
    if chosen == "reference":
        return reference.backward(do, v, table, seq_offsets, timestamps)
    shape = (seq_offsets.shape[0] - 1, *table.shape)
    if v.numel() == 0:
        return v.new_zeros(v.shape), v.new_zeros(shape)
    if chosen == "triton":
        from tritonrec.kernels.relative_aggregate import triton_relative

        dv, dtable = v.new_empty(v.shape), v.new_empty(shape)
        triton_relative.backward(do, v, table, seq_offsets, max_seq_len, timestamps, dv, dtable)
        return dv, dtable
    from tritonrec.kernels.relative_aggregate import numba_relative

    dv, dtable = v.new_zeros(v.shape), v.new_empty(shape)
    offsets, times, sizes, cost = _plan(v, table, seq_offsets, timestamps)
    arguments = (
        *flat_heads(do), *flat_heads(v), table.contiguous().view(-1).numpy(), offsets, times,
        dv.view(-1).numpy(), dtable.view(-1).numpy(),
    )  # fmt: skip

    def run(start: int, stop: int) -> None:
        numba_relative.backward(*arguments, np.uintp(start), np.uintp(stop), *sizes)

    over_ranges(run, len(offsets) - 1, 3 * cost)
    return dv, dtable


_NO_TIMES = np.empty(0, np.int64)


def _plan(
    v: torch.Tensor, table: torch.Tensor, seq_offsets: torch.Tensor, timestamps: torch.Tensor | None
) -> tuple[np.ndarray, np.ndarray, tuple[np.uintp, ...], float]:
    offsets = seq_offsets.contiguous().numpy()
    times = _NO_TIMES if timestamps is None else timestamps.contiguous().numpy()
    lengths = np.diff(offsets).astype(np.float64)
    (_, heads, dim), buckets = v.shape, table.shape[1]
    sizes = tuple(map(np.uintp, (heads, dim, buckets, int(lengths.max()))))
    return offsets, times, sizes, float((lengths * lengths).sum()) * heads * (dim + 4)


@custom_op("tritonrec::relative_aggregate", mutates_args=())
def _relative_aggregate(
    v: torch.Tensor,
    table: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    timestamps: torch.Tensor | None,
    impl: str,
) -> torch.Tensor:
    _check(v, table, seq_offsets, max_seq_len, timestamps)
    _check_values(v, seq_offsets, max_seq_len)
    return aggregate_forward(v.detach(), table.detach(), seq_offsets, max_seq_len, timestamps, impl)


@_relative_aggregate.register_fake
def _(v, table, seq_offsets, max_seq_len, timestamps, impl):
    return v.new_empty(v.shape)


@custom_op("tritonrec::relative_aggregate_backward", mutates_args=())
def _relative_aggregate_backward(
    do: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    timestamps: torch.Tensor | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(v, table, seq_offsets, max_seq_len, timestamps)
    check_tensors(v=v, do=do)
    check_shape("do", do, v.shape, v.dtype)
    _check_values(v, seq_offsets, max_seq_len)
    return aggregate_backward(
        do.detach(), v.detach(), table.detach(), seq_offsets, max_seq_len, timestamps, impl
    )


@_relative_aggregate_backward.register_fake
def _(do, v, table, seq_offsets, max_seq_len, timestamps, impl):
    return v.new_empty(v.shape), v.new_empty(seq_offsets.shape[0] - 1, *table.shape)


def _save(ctx, inputs, output):
    v, table, seq_offsets, ctx.max_seq_len, timestamps, ctx.impl = inputs
    ctx.save_for_backward(v, table, seq_offsets, timestamps)


def _backward(ctx, do):
    v, table, seq_offsets, timestamps = ctx.saved_tensors
    dv, dtable = _relative_aggregate_backward(
        do, v, table, seq_offsets, ctx.max_seq_len, timestamps, ctx.impl
    )
    return dv, dtable.sum(0), None, None, None, None


_relative_aggregate.register_autograd(_backward, setup_context=_save)
