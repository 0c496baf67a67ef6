"""Registration of `relative_aggregate` and its derivative."""

from __future__ import annotations

import torch

from tritonrec.kernels.arguments import check_shape
from tritonrec.kernels.autocast import FLOAT32, LOW, LOWER
from tritonrec.kernels.offsets import (
    LONGEST,
    check_lengths,
    check_max_seq_len,
    check_offsets,
    check_offsets_shape,
)
from tritonrec.kernels.op import Op
from tritonrec.kernels.relative_aggregate import reference
from tritonrec.kernels.row_terms import RowTerms


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
    reference=reference.relative_aggregate, cpu="numba_relative:relative_aggregate",
    triton="triton_relative:relative_aggregate", check=_check, check_memory=_check_sequences,
    fake=lambda v: v.new_empty(v.shape), save=_save, backward=_backward,
    widens=True, autocast={"v": LOWER, "table": FLOAT32},
)  # fmt: skip
RELATIVE_AGGREGATE_BACKWARD = Op(
    "relative_aggregate_backward(Tensor do, Tensor v, Tensor table, Tensor seq_offsets, int max_seq_len, "
    "Tensor? timestamps) -> (Tensor, Tensor)",
    reference=reference.relative_aggregate_backward, cpu="numba_relative:relative_aggregate_backward",
    triton="triton_relative:relative_aggregate_backward", check=(_check, _check_backward),
    check_memory=_check_sequences, fake=_fake_backward, widens=True,
)  # fmt: skip
