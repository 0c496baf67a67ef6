"""Exact moves of embedding rows: `gather_rows` and `scatter_rows`.

No arithmetic happens forward, so every implementation returns the same bits, NaN payloads included.
On the CPU a gather is torch's, and so is a small scatter; others are a loop of memcpy.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd import forward_ad

from tritonrec.kernels.arguments import not_a_tensor
from tritonrec.kernels.dispatch import Impl, implementation, in_plain_eager, plain_function, written
from tritonrec.kernels.gather_rows import reference
from tritonrec.kernels.overlap import check_no_overlap
from tritonrec.kernels.padding import check_scalar, num_valid, pad
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.row_layout import check_rows, flat_rows
from tritonrec.kernels.workers import over_ranges

# Bytes from which the loop beats torch's index_copy_: at 200 rows of 256 bytes it takes 1.7 of the time,
# at 1,000 rows 0.8, at 5,000 rows 0.4 (one Zen 4 thread, rows at random out of 60,000).
SMALL = 1 << 18
COMMON = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32}


def gather_rows(
    source: torch.Tensor, rows: torch.Tensor, impl: Impl = "auto", *, count: torch.Tensor | None = None
) -> torch.Tensor:
    """``out[k] = source[rows[k]]``.

    Args:
        source: (R, D), any dtype; row stride arbitrary, so a view of a wider buffer is fine.
        rows: (K,) int64 in [0, R); a row may occur many times.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
        count: () int64, the rows that hold (`kernels.padding`).

    Returns:
        (K, D), contiguous, dtype of `source`; zeros behind `count`.

    Raises:
        IndexError: a row is outside the source (on an accelerator: an asynchronous device assertion).

    Differentiable in `source` where that is float32: the gradient of a row is the sum of the gradients of
    its occurrences, added in order of occurrence (`segment_sum`, consistency "window").
    """
    _check_gather(source, rows, count)
    if not in_plain_eager(source, rows, count):
        return torch.ops.tritonrec.gather_rows(source, rows, impl, count)
    if source.requires_grad and torch.is_grad_enabled():
        return _Gather.apply(source, rows, impl, count)
    return launch_gather(source, rows, impl, count)


def scatter_rows(
    destination: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    impl: Impl = "auto",
    *,
    source: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> None:
    """``destination[rows[k]] = values[k]``, in place; with `source` ``values[source[k]]``, in one pass.

    Args:
        destination: (R, D), any dtype, row stride arbitrary; mutated.
        rows: (K,) int64 in [0, R), distinct (not checked: with a repeated row the winner is unspecified).
        values: (K, D), with `source` (N, D) of any N; dtype of `destination`.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
        source: (K,) int64 in [0, N); a row of `values` may be taken many times, or never.
        count: () int64, the rows that hold (`kernels.padding`); the others are not written.

    Raises:
        IndexError: a row is outside the destination or the values; the destination is unchanged (on an
            accelerator: an asynchronous device assertion).
        ValueError: shapes, dtypes or devices that do not fit; `destination` shares memory with another
            argument.

    Differentiable in destination and values, as `Tensor.index_copy_`: rows that are written get no gradient,
    and values the gradient of the row they went to; with `source` the sum over the rows they went to, for
    float32 (`segment_sum`, consistency "window").
    """
    _check_scatter(destination, rows, values, count, source)
    differentiated = torch.is_grad_enabled() and (destination.requires_grad or values.requires_grad)
    if differentiated and forward_ad._current_level < 0:  # the op refuses a tangent
        try:
            _ScatterRows.apply(destination, rows, values, impl, source, count)
        except RuntimeError as error:
            if "leaf Variable" not in str(error):
                raise
            raise RuntimeError(
                "destination is a leaf that requires a gradient, or a view of one: give destination.clone(), "
                "or call under torch.no_grad()"
            ) from error
        return
    if not in_plain_eager(destination, rows, values, count, source):
        torch.ops.tritonrec.scatter_rows(destination, rows, values, impl, count, source)
        return
    written(destination)
    launch_scatter(destination, rows, values, impl, count, source)


def _check_gather(source: torch.Tensor, rows: torch.Tensor, count: torch.Tensor | None) -> None:
    _check_rows_of("source", source, rows)
    check_scalar("count", count, rows)


def _check_scatter(
    destination: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor | None,
    source: torch.Tensor | None,
) -> None:
    _check_rows_of("destination", destination, rows)
    if source is not None:
        _check_rows_of("values", values, source, "source")
        if source.shape != rows.shape:
            raise ValueError(f"rows and source must be equally many, got {len(rows)} and {len(source)}")
    if not isinstance(values, torch.Tensor):
        raise not_a_tensor("values", values)
    length = rows.shape[0] if source is None else values.shape[0]
    if values.shape != (length, destination.shape[1]) or values.dtype != destination.dtype:
        raise ValueError(
            f"values must be {(length, destination.shape[1])} {destination.dtype}, "
            f"got {tuple(values.shape)} {values.dtype}"
        )
    if values.device != destination.device:
        raise ValueError(f"destination is on {destination.device}, values on {values.device}")
    check_scalar("count", count, rows)


def _check_rows_of(name: str, matrix: torch.Tensor, rows: torch.Tensor, name_of_rows: str = "rows") -> None:
    if not isinstance(matrix, torch.Tensor):
        raise not_a_tensor(name, matrix)
    if not isinstance(rows, torch.Tensor):
        raise not_a_tensor(name_of_rows, rows)
    if matrix.dim() != 2:
        raise ValueError(f"{name} must be (R, D), got shape {tuple(matrix.shape)}")
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"{name_of_rows} must be (K,) int64, got shape {tuple(rows.shape)} {rows.dtype}")
    if rows.device != matrix.device:
        raise ValueError(f"{name} is on {matrix.device}, {name_of_rows} on {rows.device}")


def launch_gather(
    source: torch.Tensor, rows: torch.Tensor, impl: str, count: torch.Tensor | None = None
) -> torch.Tensor:
    """`gather_rows` without validation of shapes, dispatcher and autograd, for callers inside the package."""
    chosen = implementation(impl, source)  # type: ignore[arg-type]
    if chosen != "cpu":
        check_rows("rows", rows, source.shape[0], count)
    if chosen == "triton":
        from tritonrec.kernels.gather_rows import triton_rows

        return triton_rows.gather_rows(source, rows, count)
    size = rows.numel()
    if count is not None:
        rows = rows[: num_valid(count, size)]
    gathered = _gather_cpu(source, rows) if chosen == "cpu" else reference.gather_rows(source, rows)
    return pad(gathered, size, 0)


def _gather_cpu(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if source.numel() == 0:  # torch looks at no row then
        check_rows("rows", rows, source.shape[0])
    try:
        return torch.index_select(source, 0, rows)
    except IndexError:
        check_rows("rows", rows, source.shape[0])  # names the row, where torch does not
        raise


def launch_scatter(
    destination: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    impl: str,
    count: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
) -> None:
    """`scatter_rows` without validation of shapes and dispatcher, for callers inside the package."""
    chosen = implementation(impl, destination)  # type: ignore[arg-type]
    read = {"rows": rows, "values": values, "count": count, "source": source}
    check_no_overlap({"destination": destination}, read)
    check_rows("rows", rows, destination.shape[0], count)
    if source is not None:
        check_rows("source", source, values.shape[0], count)
    if chosen == "triton":
        from tritonrec.kernels.gather_rows import triton_rows

        triton_rows.scatter_rows(destination, rows, values, count, source)
        return
    if count is not None:
        rows = rows[: num_valid(count, rows.numel())]
        if source is not None:
            source = source[: rows.numel()]
        else:
            values = values[: rows.numel()]
    if chosen == "reference":
        reference.scatter_rows(destination, rows, values, source)
    else:
        _scatter_cpu(destination, rows, values, source)


def _scatter_cpu(
    destination: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, source: torch.Tensor | None
) -> None:
    if not destination.stride(1) == values.stride(1) == 1:
        destination.index_copy_(0, rows, values if source is None else values.index_select(0, source))
        return
    if source is None:
        if values.nbytes < SMALL and values.dtype in COMMON:  # torch has no kernel for rarer types
            destination.index_copy_(0, rows, values)
            return
        source = torch.arange(rows.numel())
    from tritonrec.kernels.gather_rows import numba_rows

    to, places = flat_rows(destination.view(torch.uint8)), rows.contiguous().numpy()
    of, taken = flat_rows(values.view(torch.uint8)), source.contiguous().numpy()
    width = values.element_size() * values.shape[1]

    def run(start: int, stop: int) -> None:
        numba_rows.scatter_rows(*to, places[start:stop], *of, taken[start:stop], np.uintp(width))

    over_ranges(run, len(places), len(places) * width)


@custom_op("tritonrec::gather_rows", mutates_args=(), linear="source")
def _gather_op(
    source: torch.Tensor, rows: torch.Tensor, impl: str, count: torch.Tensor | None = None
) -> torch.Tensor:
    _check_gather(source, rows, count)
    return launch_gather(source, rows, impl, count)


@_gather_op.register_fake
def _gather_fake(
    source: torch.Tensor, rows: torch.Tensor, impl: str, count: torch.Tensor | None = None
) -> torch.Tensor:
    return source.new_empty((rows.shape[0], source.shape[1]))


def _gather_setup(ctx, inputs, output) -> None:
    source, rows, impl, count = inputs
    ctx.save_for_backward(rows, count)
    ctx.num_rows, ctx.impl = source.shape[0], impl


def _gather_backward(ctx, grad: torch.Tensor):
    from tritonrec.kernels.segment_sum import segment_sum

    rows, count = ctx.saved_tensors
    if grad.dtype != torch.float32:
        raise ValueError(f"gather_rows is differentiable in a float32 source, got {grad.dtype}: use .float()")
    return segment_sum(grad, rows, ctx.num_rows, impl=ctx.impl, count=count), None, None, None


_gather_op.register_autograd(_gather_backward, setup_context=_gather_setup)
_Gather = plain_function(launch_gather, _gather_setup, _gather_backward)


@custom_op("tritonrec::scatter_rows", mutates_args=("destination",))
def _scatter_op(
    destination: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    impl: str,
    count: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
) -> None:
    _check_scatter(destination, rows, values, count, source)
    launch_scatter(destination, rows, values, impl, count, source)


@_scatter_op.register_fake
def _scatter_fake(destination, rows, values, impl, count=None, source=None):
    return None


class _ScatterRows(torch.autograd.Function):
    """`scatter_rows` as a step of autograd: an op that returns nothing has no derivative of its own."""

    @staticmethod
    def forward(destination, rows, values, impl, source, count):
        scatter_rows(destination, rows, values, impl, source=source, count=count)
        return destination

    @staticmethod
    def setup_context(ctx, inputs, output):
        destination, rows, values, ctx.impl, source, count = inputs
        ctx.mark_dirty(destination)
        ctx.save_for_backward(rows, source, count)
        ctx.num_values, ctx.dtype = len(values), values.dtype

    @staticmethod
    def backward(ctx, grad):
        from tritonrec.kernels.segment_sum import segment_sum

        rows, source, count = ctx.saved_tensors
        kept = taken = None
        if ctx.needs_input_grad[0]:
            kept = grad.clone()
            scatter_rows(kept, rows, kept.new_zeros(len(rows), kept.shape[1]), ctx.impl, count=count)
        if ctx.needs_input_grad[2]:
            taken = gather_rows(grad, rows, ctx.impl, count=count)
            if source is not None and ctx.dtype != torch.float32:
                raise ValueError(
                    "scatter_rows with source is differentiable in float32 values, got "
                    f"{ctx.dtype}: use .float()"
                )
            if source is not None:
                taken = segment_sum(taken, source, ctx.num_values, impl=ctx.impl, count=count)
        return kept, None, taken, None, None, None
