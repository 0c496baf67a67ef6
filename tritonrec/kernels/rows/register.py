"""Registration of `gather_rows`, `scatter_rows` and `segment_sum`, of which each is another's derivative."""

from __future__ import annotations

import torch

from tritonrec.kernels.fixed_point.errors import FRACTION_BITS, check_fraction_bits
from tritonrec.kernels.op import Op
from tritonrec.kernels.overlap import check_no_overlap
from tritonrec.kernels.padding import check_scalar
from tritonrec.kernels.row_layout import check_matrix, check_rows
from tritonrec.kernels.rows import reference


def _check_gather(source: torch.Tensor, rows: torch.Tensor, count: torch.Tensor | None) -> None:
    _check_rows_of("source", source, "rows", rows)
    check_scalar("count", count)


def _check_rows_of(name: str, matrix: torch.Tensor, name_of_rows: str, rows: torch.Tensor) -> None:
    if matrix.dim() != 2:
        raise ValueError(f"{name} must be (R, D), got shape {tuple(matrix.shape)}")
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"{name_of_rows} must be (K,) int64, got shape {tuple(rows.shape)} {rows.dtype}")


def _check_gather_memory(source: torch.Tensor, rows: torch.Tensor, count: torch.Tensor | None) -> None:
    check_rows("rows", rows, source.shape[0], count)


def _fake_gather(source, rows, count):
    return source.new_empty((rows.shape[0], source.shape[1]))


def _save_gather(ctx, inputs, output) -> None:
    source, rows, count, ctx.impl = inputs
    ctx.num_rows = source.shape[0]
    ctx.save_for_backward(rows, count)


def _differentiate_gather(ctx, grad: torch.Tensor):
    rows, count = ctx.saved_tensors
    if grad.dtype != torch.float32:
        raise ValueError(f"gather_rows is differentiable in a float32 source, got {grad.dtype}: use .float()")
    return _sum_rows(grad, rows, ctx.num_rows, count, ctx.impl), None, None


def _sum_rows(values, rows, num_rows, count, impl) -> torch.Tensor:
    return SEGMENT_SUM(values, rows, num_rows, "window", FRACTION_BITS, "gradient", count, impl=impl)


GATHER_ROWS = Op(
    "gather_rows(Tensor source, Tensor rows, Tensor? count) -> Tensor",
    reference=reference.gather_rows, cpu="numba_rows:gather_rows", triton="triton_rows:gather_rows",
    check=_check_gather, check_memory=_check_gather_memory, fake=_fake_gather,
    save=_save_gather, backward=_differentiate_gather,
)  # fmt: skip


def _check_scatter(
    destination: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    source: torch.Tensor | None,
    count: torch.Tensor | None,
) -> None:
    _check_rows_of("destination", destination, "rows", rows)
    if source is not None:
        _check_rows_of("values", values, "source", source)
        if source.shape != rows.shape:
            raise ValueError(f"rows and source must be equally many, got {len(rows)} and {len(source)}")
    length = rows.shape[0] if source is None else values.shape[0]
    if values.shape != (length, destination.shape[1]) or values.dtype != destination.dtype:
        raise ValueError(
            f"values must be {(length, destination.shape[1])} {destination.dtype}, "
            f"got {tuple(values.shape)} {values.dtype}"
        )
    check_scalar("count", count)


def _check_scatter_memory(
    destination: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    source: torch.Tensor | None,
    count: torch.Tensor | None,
) -> None:
    read = {"rows": rows, "values": values, "count": count, "source": source}
    check_no_overlap({"destination": destination}, read)
    check_rows("rows", rows, destination.shape[0], count)
    if source is not None:
        check_rows("source", source, values.shape[0], count)


def _save_scatter(ctx, inputs, output) -> None:
    _, rows, values, source, count, ctx.impl = inputs
    ctx.num_values, ctx.dtype = len(values), values.dtype
    ctx.save_for_backward(rows, source, count)


def _differentiate_scatter(ctx, grad: torch.Tensor):
    rows, source, count = ctx.saved_tensors
    kept = taken = None
    if ctx.needs_input_grad[0]:
        kept = grad.clone()
        zeros = kept.new_zeros(len(rows), kept.shape[1])
        SCATTER_ROWS(kept, rows, zeros, None, count, impl=ctx.impl)
    if ctx.needs_input_grad[2]:
        taken = GATHER_ROWS(grad, rows, count, impl=ctx.impl)
        if source is not None and ctx.dtype != torch.float32:
            raise ValueError(
                f"scatter_rows with source is differentiable in float32 values, got {ctx.dtype}: use .float()"
            )
        if source is not None:
            taken = _sum_rows(taken, source, ctx.num_values, count, ctx.impl)
    return kept, None, taken, None, None


SCATTER_ROWS = Op(
    "scatter_rows(Tensor(a!) destination, Tensor rows, Tensor values, Tensor? source, Tensor? count) -> ()",
    reference=reference.scatter_rows, cpu="numba_rows:scatter_rows", triton="triton_rows:scatter_rows",
    check=_check_scatter, check_memory=_check_scatter_memory,
    save=_save_scatter, backward=_differentiate_scatter,
)  # fmt: skip


def _check_sums(
    values: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    consistency: str,
    fraction_bits: int,
    name: str,
    count: torch.Tensor | None,
) -> None:
    if consistency not in ("window", "batch"):
        raise ValueError(f"consistency must be 'window' or 'batch', got {consistency!r}")
    in_fixed_point = consistency == "batch" and values.dtype == torch.int64
    check_matrix("values", values, torch.int64 if in_fixed_point else torch.float32)
    if segments.dim() != 1 or segments.dtype != torch.int64 or segments.shape[0] != values.shape[0]:
        raise ValueError(
            f"segments must be ({values.shape[0]},) int64 to go with values {tuple(values.shape)}, "
            f"got {tuple(segments.shape)} {segments.dtype}"
        )
    if num_segments < 0:
        raise ValueError(f"num_segments must not be negative, got {num_segments}")
    check_fraction_bits(fraction_bits)
    check_scalar("count", count)


def _check_segments(values, segments, num_segments, consistency, fraction_bits, name, count) -> None:
    check_rows("segments", segments, num_segments, count)


def _fake_sums(values, segments, num_segments, consistency, *_):
    dtype = torch.float32 if consistency == "window" else torch.int64
    return torch.empty(num_segments, values.shape[1], dtype=dtype, device=values.device)


def _save_sums(ctx, inputs, output) -> None:
    _, segments, _, _, _, _, count, ctx.impl = inputs
    ctx.save_for_backward(segments, count)


def _differentiate_sums(ctx, grad: torch.Tensor):
    segments, count = ctx.saved_tensors
    return GATHER_ROWS(grad, segments, count, impl=ctx.impl), *(None,) * 6


SEGMENT_SUM = Op(
    "segment_sum(Tensor values, Tensor segments, int num_segments, str consistency, int fraction_bits, "
    "str name, Tensor? count) -> Tensor",
    reference=reference.segment_sum, cpu="numba_segment_sum:segment_sum",
    triton="triton_segment_sum:segment_sum",
    check=_check_sums, check_memory=_check_segments, fake=_fake_sums,
    save=_save_sums, backward=_differentiate_sums,
)  # fmt: skip


def _check_sums_into(out, values, segments, num_segments, consistency, *rest) -> None:
    *options, status = rest
    _check_sums(values, segments, num_segments, consistency, *options)
    check_matrix("out", out, torch.float32 if consistency == "window" else torch.int64, in_place=True)
    if out.shape[0] != num_segments or out.shape[1] != values.shape[1]:
        raise ValueError(f"out must be ({num_segments}, {values.shape[1]}), got {tuple(out.shape)}")
    check_scalar("status", status)


def _check_memory_of_sums(out, *arguments) -> None:
    values, segments, *_, count, status = arguments
    check_no_overlap({"out": out, "status": status}, {"values": values, "segments": segments, "count": count})
    _check_segments(*arguments[:-1])


SEGMENT_SUM_INTO = Op(
    "segment_sum_into(Tensor(a!) out, Tensor values, Tensor segments, int num_segments, str consistency, "
    "int fraction_bits, str name, Tensor? count, Tensor(b!)? status) -> ()",
    reference=reference.segment_sum_into, cpu="numba_segment_sum:segment_sum_into",
    triton="triton_segment_sum:segment_sum_into",
    check=_check_sums_into, check_memory=_check_memory_of_sums,
)  # fmt: skip
