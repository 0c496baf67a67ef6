# mypy: ignore-errors
"""Batch-invariant products on the CPU, over the one inner loop of `kernels.numba_matmul`."""

import numpy as np
import torch

from tritonrec.kernels.deferred import refuse
from tritonrec.kernels.fixed_point.numba_fixed_point import (
    CALM,
    add_near,
    add_rounded,
    is_calm,
)
from tritonrec.kernels.gradients import made_once
from tritonrec.kernels.linear.numba_row_products import add_row_products
from tritonrec.kernels.linear.op import no_sum
from tritonrec.kernels.numba_matmul import add_products
from tritonrec.kernels.row_layout import contiguous_rows, flat, flat_int64, flat_rows
from tritonrec.kernels.row_terms import add_rows
from tritonrec.kernels.workers import over_ranges

from ..caches import njit

U = np.uintp
ROWS = U(32)
"""Rows of a product made together: their inputs and outputs stay in the first two levels of cache."""
SUMS = U(2**15)
"""Elements of an int64 accumulator that stay in the second-level cache while all samples add to them."""
NO_BIAS = np.empty(0, np.float32)
PAD = TILE = U(16)
FEW = 3
"""From so many samples on it pays to look at an accumulator before its sums."""


@njit(cache=True, nogil=True)
def weight_stride(columns):
    """From one row of a weight (inner, columns) to the next, where `rows_times` reads it.

    Rows begin on cache lines. Those of a power of two would fall into few sets of the first-level cache: 1.4
    times the time.
    """
    return columns if columns <= U(64) else (columns + PAD - U(1)) // PAD * PAD + PAD


@njit(cache=True, nogil=True)
def with_stride(weight, inner, columns):
    """A contiguous weight (inner, columns) with `weight_stride`; itself where that is its own."""
    stride = weight_stride(columns)
    if stride == columns:
        return weight
    out = np.empty(inner * stride, np.float32)
    for i in range(inner):
        for c in range(columns):
            out[i * stride + c] = weight[i * columns + c]
    return out


def laid_out(weight: torch.Tensor) -> np.ndarray:
    """A float32 weight (inner, columns) of any strides, flat, with `weight_stride`; once in a window."""
    return made_once(weight, _lay_out)


def _lay_out(weight: torch.Tensor) -> np.ndarray:
    inner, columns = weight.shape
    stride = int(weight_stride(U(columns)))
    if stride == columns:
        return flat(weight)
    rows = weight.new_empty(inner, stride)
    if weight.stride(0) == 1 and weight.stride(1) == inner:
        _transpose(flat(weight.t()), rows.numpy().reshape(-1), U(inner), U(columns), U(stride))
    else:
        rows[:, :columns].copy_(weight.detach())
    return rows.numpy().reshape(-1)


@njit(cache=True, nogil=True)
def _transpose(weight, out, inner, columns, stride):
    """A weight (columns, inner) to rows of `out`, a tile at a time: torch takes up to 5 times as long."""
    for first in range(U(0), columns, TILE):
        last = min(first + TILE, columns)
        for start in range(U(0), inner, TILE):
            for i in range(start, min(start + TILE, inner)):
                for c in range(first, last):
                    out[i * stride + c] = weight[c * inner + i]


@njit(cache=True, nogil=True)
def rows_times(x, x_stride, weight, bias, out, start, stop, inner, columns):
    """Rows [start, stop) of ``x @ weight + bias``: bias (columns,) or empty, weight (inner, columns) with
    `weight_stride` from row to row.
    """
    stride = weight_stride(columns)
    while start < stop:
        rows = min(ROWS, stop - start)
        for r in range(start, start + rows):
            first = r * columns
            if bias.shape[0]:
                for c in range(columns):
                    out[first + c] = bias[c]
            else:
                for c in range(columns):
                    out[first + c] = np.float32(0.0)
        add_products(
            out, start * columns, columns, x, start * x_stride, x_stride, U(1), weight, U(0), stride,
            rows, inner, columns,
        )  # fmt: skip
        start += rows


@njit(cache=True, nogil=True)
def add_weight_gradients(
    accumulator, accumulator_stride, dy, dy_stride, x, x_stride, offsets, start, stop, inner, scale, limit
):
    """Rows [start, stop) of the accumulator: per sample the float32 product, rounded once, added.

    Four output rows of one sample fit the first-level cache together, so a product never reaches memory. A
    sample's tokens are read once for all rows of the accumulator that the second-level cache holds.
    Returns (sample, row, column) of the first value that cannot be added, or (-1, -1, -1), and the value;
    the first by sample, then row, whatever the order of the loops.
    """
    tile = np.empty(4 * inner, np.float32)
    first_bad = (np.int64(-1), np.int64(-1), np.int64(-1), np.float32(0.0))
    samples = offsets.shape[0] - 1
    #     for rows of the accumulator that fit the second-level cache     start .. last
    #         for samples                                          s
    #             for four of these rows                           o: product of the sample, then the sum
    block = max(U(4), SUMS // max(inner, U(1)) // U(4) * U(4))
    while start < stop:
        last = min(start + block, stop)
        # While all sums of the block are below 2**61 the samples' terms, CALM of less than 2**51 each, cannot
        # leave int64: then no sum is checked. One term that is larger ends that for the rest of the block.
        calm = FEW <= samples <= CALM
        for r in range(start, last):
            calm = calm and is_calm(accumulator, r * accumulator_stride, inner)
        s = 0
        while s < samples:
            first = U(offsets[s])
            terms = U(offsets[s + 1]) - first
            s += 1
            o = start
            while o < last and terms > 0:
                rows = min(U(4), last - o)
                tile[:] = 0
                add_products(
                    # dy^T x without a transposed copy: a row of the product
                    # is a column of dy (stride 1), its terms are tokens.
                    tile, U(0), inner, dy, first * dy_stride + o, U(1), dy_stride, x, first * x_stride,
                    x_stride, rows, terms, inner,
                )  # fmt: skip
                for r in range(rows):
                    to = (o + r) * accumulator_stride
                    calm = calm and add_near(accumulator, to, tile, r * inner, inner, limit)
                    if calm:
                        continue
                    column = add_rounded(accumulator, to, tile, r * inner, inner, scale, limit)
                    # Only an earlier sample could fail first: later blocks walk those before s - 1 alone.
                    if column >= 0:
                        first_bad = (np.int64(s - 1), np.int64(o + r), column, tile[r * inner + U(column)])
                        samples = s - 1  # what fails in this sample further down comes after
                        last = o
                        break
                o += U(4)
        start += block
    return first_bad


def linear(x, weight, bias, _seq_offsets=None) -> torch.Tensor:
    """See `tritonrec.kernels.linear.op.linear`."""
    (tokens, inner), columns = x.shape, weight.shape[0]
    out = x.new_empty(tokens, columns)
    if out.numel() == 0:
        return out
    if x.dtype != torch.float32:
        raise ValueError(f"linear on the CPU computes in float32, got {x.dtype}")
    arguments = (
        *flat_rows(x if inner <= 1 or x.stride(1) == 1 else x.contiguous()), laid_out(weight.t()),
        NO_BIAS if bias is None else flat(bias), flat(out),
    )  # fmt: skip

    def run(start: int, stop: int) -> None:
        rows_times(*arguments, U(start), U(stop), U(inner), U(columns))

    over_ranges(run, tokens, 2.0 * tokens * inner * columns, step=4)
    return out


def linear_weight_grad(
    accumulator, dy, x, seq_offsets, bits, name, bias_accumulator=None, bias_name=""
) -> None:
    """See `tritonrec.kernels.linear.op.linear_weight_grad`."""
    if accumulator.numel() and x.shape[0]:
        _add_products(accumulator, dy, x, seq_offsets, bits, name)
    if bias_accumulator is not None:
        add_rows(bias_accumulator, dy, bits, bias_name, "cpu")


def _add_products(
    accumulator: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, seq_offsets: torch.Tensor | None, bits: int,
    name: str,
) -> None:  # fmt: skip
    arrays = (*flat_rows(accumulator), *flat_rows(contiguous_rows(dy)), *flat_rows(contiguous_rows(x)))
    tokens, inner, scale, limit = U(x.shape[0]), U(x.shape[1]), 2.0**bits, 2.0 ** (62 - bits)
    offsets = None if seq_offsets is None else flat_int64(seq_offsets)

    def run(start: int, stop: int) -> tuple[int, int, int, float]:
        if offsets is None:
            return add_row_products(*arrays, tokens, U(start), U(stop), inner, scale, limit)
        return add_weight_gradients(*arrays, offsets, U(start), U(stop), inner, scale, np.float32(limit))

    found = over_ranges(run, accumulator.shape[0], 2.0 * x.shape[0] * accumulator.numel(), step=4)
    bad = [(int(sample), int(row), int(column), float(value)) for sample, row, column, value in found]
    first = min((place for place in bad if place[0] >= 0), key=lambda place: place[:3], default=None)
    if first is not None:
        refuse(no_sum(first, bits, name))
