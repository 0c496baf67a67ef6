"""Rows summed by key: out[segments[i]] += values[i], in a fixed order or on the exact grid.

D dim, K occurrences, S segments. With values (5, D) and S = 4, of which segment 1 is empty::

    segments   2  0  2  3  2
    out[0] = values[1]                               out[1] = 0
    out[2] = (values[0] + values[2]) + values[4]     out[3] = values[3]

`consistency="window"` adds float32 in order of occurrence: deterministic, and equal in every bit between
implementations, but a function of the order. `consistency="batch"` rounds each value once to
fixed point and adds int64: the same for every order, split and rank. An int64 sum that would leave its
range is an error, never a wrap-around.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch.autograd import forward_ad

from tritonrec.kernels.arguments import not_a_tensor
from tritonrec.kernels.dispatch import Impl, implementation, in_plain_eager, plain_function, written
from tritonrec.kernels.fixed_point import FRACTION_BITS, ExactSumError, check_bits
from tritonrec.kernels.overlap import check_no_overlap
from tritonrec.kernels.padding import check_scalar, num_valid, record
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.row_layout import check_matrix, check_rows, contiguous_rows, flat_rows
from tritonrec.kernels.segment_sum import reference

Consistency = Literal["window", "batch"]

__all__ = ["accumulate", "segment_sum"]


def segment_sum(
    values: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    *,
    consistency: Consistency = "window",
    out: torch.Tensor | None = None,
    bits: int = FRACTION_BITS,
    name: str = "tensor",
    impl: Impl = "auto",
    count: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum rows by segment.

    Args:
        values: (K, D) float32; for consistency "batch" also int64, on the grid already.
        segments: (K,) int64 in [0, num_segments), in any order.
        consistency: "window" (float32 in order of occurrence) or "batch" (int64 on the grid of 2**-bits).
        out: (S, D) to add to in place, float32 or int64 as the consistency asks, contiguous rows; not
            differentiable. Without it the sums start from zero.
        name: what an error calls `values`.
        count: () int64, the occurrences that hold; the others are not added (`kernels.padding`).
        status: () int64, mutated: takes 1 + row * D + column of the first value that cannot be added, for
            `check_summed`, where otherwise the host would wait to raise ExactSumError.
    Returns:
        (S, D) float32 or int64; `out` itself where it was given. "window" without `out` is differentiable
        in `values` (backward gathers rows).
    Raises:
        ExactSumError: consistency "batch": a value is not finite or too large, or a sum leaves int64. `out`
            then holds a part of the sum and has to be discarded.
        IndexError: a segment outside [0, num_segments); nothing was added.
        ValueError: an argument of another shape, dtype or range; `out` or `status` shares memory with
            another argument.
    """
    _check(values, segments, num_segments, consistency, bits, count)
    check_scalar("status", status, values)
    if out is None and (status is None or consistency == "window"):
        arguments = values, segments, num_segments, consistency, bits, name, impl, count
        if not in_plain_eager(*arguments):
            return _segment_sum(*arguments)
        if values.requires_grad and torch.is_grad_enabled():
            return _SegmentSum.apply(*arguments)
        return _sum(*arguments)
    if out is None:
        if forward_ad._current_level < 0:  # the op refuses a tangent, which this would drop
            values = values.detach()
        out = torch.zeros(num_segments, values.shape[1], dtype=torch.int64, device=values.device)
    _check_out(out, values, num_segments, consistency)
    if torch.is_grad_enabled() and (values.requires_grad or out.requires_grad):
        raise ValueError("segment_sum with out= is not differentiable: detach values and out, or use no_grad")
    if in_plain_eager(out, values, segments, bits, name, impl, count, status):
        written(out, status)
        accumulate(out, values, segments, bits, name, impl, count, status)
    else:
        _segment_sum_into(out, values, segments, bits, name, impl, count, status)
    return out


def _check(
    values: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    consistency: str,
    bits: int,
    count: torch.Tensor | None,
) -> None:
    if consistency not in ("window", "batch"):
        raise ValueError(f"consistency must be 'window' or 'batch', got {consistency!r}")
    if not isinstance(values, torch.Tensor):
        raise not_a_tensor("values", values)
    exact_terms = consistency == "batch" and values.dtype == torch.int64
    check_matrix("values", values, torch.int64 if exact_terms else torch.float32)
    if not isinstance(segments, torch.Tensor):
        raise not_a_tensor("segments", segments)
    if segments.dim() != 1 or segments.dtype != torch.int64 or segments.shape[0] != values.shape[0]:
        raise ValueError(
            f"segments must be ({values.shape[0]},) int64 to go with values {tuple(values.shape)}, "
            f"got {tuple(segments.shape)} {segments.dtype}"
        )
    if segments.device != values.device:
        raise ValueError(f"values is on {values.device}, segments on {segments.device}")
    if num_segments < 0:
        raise ValueError(f"num_segments must not be negative, got {num_segments}")
    check_bits(bits)
    check_scalar("count", count, values)


def _check_out(out: torch.Tensor, values: torch.Tensor, num_segments: int, consistency: str) -> None:
    check_matrix("out", out, torch.float32 if consistency == "window" else torch.int64, in_place=True)
    if out.device != values.device:
        raise ValueError(f"values is on {values.device}, out on {out.device}")
    if out.shape[0] != num_segments or out.shape[1] != values.shape[1]:
        raise ValueError(f"out must be ({num_segments}, {values.shape[1]}), got {tuple(out.shape)}")


def accumulate(
    out: torch.Tensor,
    values: torch.Tensor,
    segments: torch.Tensor,
    bits: int,
    name: str,
    impl: str,
    count: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """`segment_sum` into `out` without the checks of shapes and the dispatcher: the door for hot callers."""
    chosen = implementation(impl, out)  # type: ignore[arg-type]
    check_no_overlap({"out": out, "status": status}, {"values": values, "segments": segments, "count": count})
    check_rows("segments", segments, out.shape[0], count)
    if values.numel() == 0 or out.numel() == 0:
        return
    values = contiguous_rows(values)
    exact = out.dtype == torch.int64
    bad = -1
    if chosen == "triton":
        from tritonrec.kernels.segment_sum import triton_segment_sum

        code = triton_segment_sum.segment_sum(out, values, segments, bits, count)
        if code is None:
            return
        if status is not None:
            record(status, code)
            return
        bad = int(code) - 1
    elif count is not None:
        first = num_valid(count, segments.numel())
        values, segments = values[:first], segments[:first]
    if chosen == "reference":
        if exact:
            bad = reference.add_batch(out, values, segments, bits)
        else:
            reference.add_window(out, values, segments)
    elif chosen == "cpu":
        bad = _accumulate_cpu(out, values, segments, bits, exact)
    if bad >= 0 and status is not None:
        record(status, bad + 1)
    elif bad >= 0:
        row, column = divmod(bad, values.shape[1])
        raise sum_error(name, (row, column), values[row, column].item(), int(segments[row]), bits)


def sum_error(
    name: str, index: tuple[int, int], value: float | int, segment: int, bits: int
) -> ExactSumError:
    """The error for ``name[index]`` = `value`, which cannot be added to its segment."""
    fits = isinstance(value, int) or abs(value) < 2.0 ** (62 - bits)
    into = f"segment {segment}, column {index[1]},"
    return ExactSumError(name, index, value, bits, into if fits else "")


def _accumulate_cpu(
    out: torch.Tensor, values: torch.Tensor, segments: torch.Tensor, bits: int, exact: bool
) -> int:
    from tritonrec.kernels.segment_sum import numba_segment_sum

    arguments = (*flat_rows(out), *flat_rows(values), segments.contiguous().numpy(), np.uintp(out.shape[1]))
    if not exact:
        numba_segment_sum.add_window(*arguments)
        return -1
    if values.dtype == torch.int64:
        return numba_segment_sum.add_batch_terms(*arguments)
    return numba_segment_sum.add_batch(*arguments, 2.0**bits, np.float32(2.0 ** (62 - bits)))


@custom_op("tritonrec::segment_sum_into", mutates_args=("out", "status"))
def _segment_sum_into(
    out: torch.Tensor,
    values: torch.Tensor,
    segments: torch.Tensor,
    bits: int,
    name: str,
    impl: str,
    count: torch.Tensor | None,
    status: torch.Tensor | None,
) -> None:
    check_matrix("out", out, torch.int64 if out.dtype == torch.int64 else torch.float32, in_place=True)
    consistency = "batch" if out.dtype == torch.int64 else "window"
    _check(values, segments, out.shape[0], consistency, bits, count)
    _check_out(out, values, out.shape[0], consistency)
    check_scalar("status", status, values)
    accumulate(out, values, segments, bits, name, impl, count, status)


@_segment_sum_into.register_fake
def _(out, values, segments, bits, name, impl, count, status):
    return None


def _sum(
    values: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    consistency: str,
    bits: int,
    name: str,
    impl: str,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype = torch.float32 if consistency == "window" else torch.int64
    if num_segments * values.shape[1] >= 1 << 60:
        raise ValueError(f"num_segments = {num_segments} rows of {values.shape[1]} columns fit no memory")
    out = torch.zeros(num_segments, values.shape[1], dtype=dtype, device=values.device)
    accumulate(out, values, segments, bits, name, impl, count)
    return out


@custom_op("tritonrec::segment_sum", mutates_args=(), linear="values")
def _segment_sum(
    values: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    consistency: str,
    bits: int,
    name: str,
    impl: str,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    _check(values, segments, num_segments, consistency, bits, count)
    return _sum(values, segments, num_segments, consistency, bits, name, impl, count)


@_segment_sum.register_fake
def _(values, segments, num_segments, consistency, bits, name, impl, count=None):
    dtype = torch.float32 if consistency == "window" else torch.int64
    return torch.empty(num_segments, values.shape[1], dtype=dtype, device=values.device)


def _save_segments(ctx, inputs, output):
    ctx.save_for_backward(inputs[1], inputs[7])
    ctx.impl = inputs[6]


def _gather(ctx, gradient):
    from tritonrec.kernels.gather_rows import gather_rows

    segments, count = ctx.saved_tensors
    return gather_rows(gradient, segments, ctx.impl, count=count), *(None,) * 7


_segment_sum.register_autograd(_gather, setup_context=_save_segments)
_SegmentSum = plain_function(_sum, _save_segments, _gather)
