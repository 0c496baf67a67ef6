"""Rows of embeddings moved and summed: `gather_rows`, `scatter_rows`, `segment_sum`.

A move does no arithmetic, so every implementation returns the same bits, NaN payloads included.

A sum is out[segments[i]] += values[i], in a fixed order or in fixed point. D dim, K occurrences, S segments.
With values (5, D) and S = 4, of which segment 1 is empty::

    segments   2  0  2  3  2
    out[0] = values[1]                               out[1] = 0
    out[2] = (values[0] + values[2]) + values[4]     out[3] = values[3]

`consistency="window"` adds float32 in order of occurrence: deterministic, and equal in every bit between
implementations, but a function of the order. `consistency="batch"` rounds each value once to fixed point and
adds int64: the same for every order, split and rank. An int64 sum that would leave its range is an error,
never a wrap-around.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.fixed_point.errors import FRACTION_BITS
from tritonrec.kernels.padding import check_scalar
from tritonrec.kernels.rows.reference import zero_sums
from tritonrec.kernels.rows.register import GATHER_ROWS, SCATTER_ROWS, SEGMENT_SUM, SEGMENT_SUM_INTO

Consistency = Literal["window", "batch"]


class IndexedRows(NamedTuple):
    """Rows that are not gathered: row k is ``values[rows[k]]``."""

    values: torch.Tensor  # (R, D)
    rows: torch.Tensor  # (K,) int64 in [0, R)

    def gathered(self) -> torch.Tensor:
        """(K, D), as `gather_rows`."""
        return gather_rows(self.values, self.rows)

    def pooled(self, bags: torch.Tensor, num_bags: int) -> torch.Tensor:
        """(num_bags, D), the sums over the rows of each bag, of which ``bags[k]`` is that of row k.

        The bits, and those of the gradients, of ``segment_sum(self.gathered(), bags, num_bags)``.
        """
        return segment_sum(self.values, bags, num_bags, source=self.rows)


def gather_rows(
    source: torch.Tensor, rows: torch.Tensor, *, count: torch.Tensor | None = None, impl: Impl = "auto"
) -> torch.Tensor:
    """``out[k] = source[rows[k]]``.

    Args:
        source: (R, D), any dtype; row stride arbitrary, so a view of a wider buffer is fine.
        rows: (K,) int64 in [0, R); a row may occur many times.
        count: () int64, the number of valid rows (`kernels.padding`).
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        (K, D), contiguous, dtype of `source`; zeros behind `count`.

    Raises:
        IndexError: a row is outside the source (on an accelerator: an asynchronous device assertion).

    Differentiable in a `source` of float32, bf16 or fp16: the gradient of a row is the float32 sum of the
    gradients of its occurrences, added in order of occurrence (`segment_sum`, consistency "window").
    """
    return GATHER_ROWS(source, rows, count, impl=impl)


def scatter_rows(
    destination: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    *,
    source: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """``destination[rows[k]] = values[k]``, in place; with `source` ``values[source[k]]``, in one pass.

    Args:
        destination: (R, D), any dtype, row stride arbitrary; mutated.
        rows: (K,) int64 in [0, R), distinct (not checked: with a repeated row the winner is unspecified).
        values: (K, D), with `source` (N, D) of any N; dtype of `destination`.
        source: (K,) int64 in [0, N); a row of `values` may be taken many times, or never.
        count: () int64, the number of valid rows (`kernels.padding`); the others are not written.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Raises:
        IndexError: a row is outside the destination or the values; the destination is unchanged (on an
            accelerator: an asynchronous device assertion).
        ValueError: shapes, dtypes or devices that do not fit; `destination` shares memory with another
            argument.

    Differentiable in destination and values, as `Tensor.index_copy_`: rows that are written get no gradient,
    and values the gradient of the row they went to; with `source` the float32 sum over the rows they went to
    (`segment_sum`, consistency "window"), for all floats but float64.
    """
    SCATTER_ROWS(destination, rows, values, source, count, impl=impl)


def segment_sum(
    values: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    *,
    consistency: Consistency = "window",
    out: torch.Tensor | None = None,
    fraction_bits: int = FRACTION_BITS,
    name: str = "tensor",
    source: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Sum rows by segment; with `source` ``out[segments[k]] += values[source[k]]``, in one pass.

    With `source` it is the pooled lookup of an embedding bag (`IndexedRows.pooled`), and its derivative is
    the same sum with `segments` and `source` exchanged: what neither writes are the (K, D) rows in between.

    Args:
        values: (K, D), with `source` (N, D) of any N; float32, bf16 or fp16, for consistency "batch" also
            int64, in fixed point already.
        segments: (K,) int64 in [0, num_segments), in any order.
        consistency: "window" (float32 in order of occurrence) or "batch" (int64, of 2**-fraction_bits).
        out: (S, D) to add to in place, float32 or int64 as the consistency asks, contiguous rows; not
            differentiable. Without it the sums start from zero.
        name: what an error calls the rows that are added.
        source: (K,) int64 in [0, N); a row of `values` may be taken many times, or never.
        count: () int64, the number of valid occurrences; the others are not added (`kernels.padding`).
        status: () int64, mutated: takes 1 + row * D + column of the first value that cannot be added, for
            `check_summed`, where otherwise the host would wait to raise ExactSumError. Consistency "window"
            can add every value and leaves it alone.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
    Returns:
        (S, D) float32 or int64; `out` itself where it was given. "window" without `out` is differentiable
        in `values`: the gradient of a row is that of its segment, with `source` the float32 sum over its
        occurrences in their order.
    Raises:
        ExactSumError: consistency "batch": a value is not finite or too large, or a sum leaves int64. `out`
            then holds a part of the sum and has to be discarded. Triton adds up a segment of more than 128
            rows in parts, in any order: where their sum leaves int64, it names the first row of one.
        IndexError: a segment outside [0, num_segments), or a source outside [0, N); nothing was added.
        ValueError: an argument of another shape, dtype or range; `out` or `status` shares memory with
            another argument.
        RuntimeError: `out` is float32, and it or `values` requires a gradient.
    """
    options = consistency, fraction_bits, name, count, source
    if out is None and (status is None or consistency == "window"):
        check_scalar("status", status)
        return SEGMENT_SUM(values, segments, num_segments, *options, impl=impl)
    if out is None:
        out = zero_sums(values, num_segments, consistency)
    SEGMENT_SUM_INTO(out, values, segments, num_segments, *options, status, impl=impl)
    return out
