# mypy: ignore-errors
"""Segment sums on the CPU: rows are added to their segment in order of occurrence.

Flat arrays and row strides (`kernels.row_layout.flat_rows`), so that the inner loop over columns vectorises;
the loop over occurrences never changes its order, so a vector width cannot change a bit.
"""

import numpy as np
import torch

from tritonrec.kernels.fixed_point.errors import ExactSumError, report_sum, sum_error
from tritonrec.kernels.fixed_point.numba_fixed_point import (
    CALM,
    HALF,
    NEAR,
    ROUNDER,
    add_near,
    add_near_rows,
    add_rounded,
    add_terms,
    is_calm,
    is_near,
)
from tritonrec.kernels.numba_intrinsics import bits_of, prefetch
from tritonrec.kernels.padding import first_valid, report
from tritonrec.kernels.row_layout import contiguous_rows, flat, flat_rows

from ..caches import njit

# Rows of a large `out` are met at random, so each loop asks for the cache lines of the row 16 occurrences on.
# 262,144 rows of 64 columns into 131,072 segments took 17.8 ms without, 9.9 ms 4 ahead, 7.6 ms 8 ahead and
# 6.0 ms 16 ahead ("batch", one Zen 5 thread); where `out` fits the cache it costs up to 5 %. The request is
# written out in each loop: as a function it halved the gain.
AHEAD = 16
NO_ROWS = np.empty(0, np.int64)
"""For `source`: row i is added for occurrence i."""
MOST_FACTOR = np.float32(128.0)
"""Of products whose values are looked at once for many factors."""


def segment_sum_into(
    out, values, segments, num_segments, consistency, fraction_bits, name, count, source, status=None
) -> None:
    """See `tritonrec.ops.segment_sum`, with `out`."""
    if values.numel() == 0 or out.numel() == 0:
        return
    values, segments = contiguous_rows(values), first_valid(segments, count)
    taken = NO_ROWS if source is None else source.contiguous().numpy()
    arguments = (
        *flat_rows(out), *flat_rows(values), segments.contiguous().numpy(), taken, np.uintp(out.shape[1])
    )  # fmt: skip
    bad = -1
    if consistency == "window":
        add_window(*arguments)
    elif values.dtype == torch.int64:
        bad = add_batch_terms(*arguments)
    else:
        bad = add_batch(*arguments, 2.0**fraction_bits, np.float32(2.0 ** (62 - fraction_bits)))
    if bad >= 0:
        report_sum(bad + 1, status, name, values, segments, fraction_bits, source)


def add_rows(sums: torch.Tensor, values: torch.Tensor, fraction_bits: int, name: str) -> None:
    """`segment_sum_into` of float32 rows (n, D) that all belong to one segment, int64 of D elements."""
    if values.numel() == 0:
        return
    values = contiguous_rows(values)
    limit = np.float32(2.0 ** (62 - fraction_bits))
    bad = add_all(
        flat(sums), *flat_rows(values), len(values), np.uintp(values.shape[1]), 2.0**fraction_bits, limit
    )
    if bad >= 0:
        report_sum(
            bad + 1,
            None,
            name,
            values,
            torch.zeros(len(values), dtype=torch.int64, device="cpu"),
            fraction_bits,
        )


def add_products(
    out: torch.Tensor, values: torch.Tensor, factors: torch.Tensor, segments: torch.Tensor, consistency: str,
    fraction_bits: int, name: str, first: int = 0,
) -> None:  # fmt: skip
    """out[segments[i]] += factors[i] * values[i // G] for K = G n occurrences i, without the (K, D) products.

    `segment_sum_into` of the products, rounded to float32 each; values are (n, D) float32, factors (K,).
    `first` is the number that an error gives the first occurrence.
    """
    if factors.numel() == 0 or out.numel() == 0:
        return
    values, dim = contiguous_rows(values), out.shape[1]
    arguments = (
        *flat_rows(out), *flat_rows(values), flat(factors), segments.contiguous().numpy(), np.uintp(dim),
        np.uintp(len(segments) // len(values)),
    )  # fmt: skip
    if consistency == "window":
        add_products_window(*arguments)
        return
    bad = add_products_batch(*arguments, 2.0**fraction_bits, np.float32(2.0 ** (62 - fraction_bits)))

    def error(code: int) -> ExactSumError:
        row, column = divmod(code - 1, dim)
        value = (factors.reshape(-1)[row] * values[row * len(values) // len(segments), column]).item()
        return sum_error(name, (first + row, column), value, int(segments[row]), fraction_bits)

    report(bad + 1, None, error)


@njit(cache=True, nogil=True)
def add_window(out, out_stride, values, value_stride, segments, source, dim):
    count, indexed = segments.shape[0], source.shape[0] > 0
    for i in range(count):
        if i + AHEAD < count:
            ahead = np.uintp(segments[i + AHEAD]) * out_stride
            # A cache line has 16 float32 or 8 int64.
            for d in range(np.uintp(0), dim, np.uintp(16)):
                prefetch(out, ahead + d)
            if indexed:
                ahead = np.uintp(source[i + AHEAD]) * value_stride
                for d in range(np.uintp(0), dim, np.uintp(16)):
                    prefetch(values, ahead + d)
        to = np.uintp(segments[i]) * out_stride
        first = np.uintp(source[i] if indexed else i) * value_stride
        for d in range(dim):
            out[to + d] += values[first + d]


@njit(cache=True, nogil=True)
def add_batch(out, out_stride, values, value_stride, segments, source, dim, scale, limit):
    """Position (row * dim + column) of the first value that cannot be added, or -1."""
    count, indexed = segments.shape[0], source.shape[0] > 0
    for i in range(count):
        if i + AHEAD < count:
            ahead = np.uintp(segments[i + AHEAD]) * out_stride
            for d in range(np.uintp(0), dim, np.uintp(8)):
                prefetch(out, ahead + d)
            if indexed:
                ahead = np.uintp(source[i + AHEAD]) * value_stride
                for d in range(np.uintp(0), dim, np.uintp(16)):
                    prefetch(values, ahead + d)
        to = np.uintp(segments[i]) * out_stride
        first = np.uintp(source[i] if indexed else i) * value_stride
        column = add_rounded(out, to, values, first, dim, scale, limit)
        if column >= 0:
            return np.int64(i) * np.int64(dim) + column
    return np.int64(-1)


@njit(cache=True, nogil=True)
def add_all(out, values, value_stride, count, dim, scale, limit):
    """`add_batch` into one segment."""
    zero = np.uintp(0)
    # Rows of one segment meet in the same totals. Where these are below 2**61 (`is_calm`) no CALM terms below
    # 2**51 can take them out of int64, so no sum of the block is checked.
    for start in range(0, count, CALM):
        stop = min(start + CALM, count)
        calm, i = is_calm(out, zero, dim), start
        while i < stop:
            first = np.uintp(i) * value_stride
            if calm and i + 4 <= stop:
                # A term too large for `add_near_rows` has changed nothing: `i` stays,
                # and the rows go one by one, checked, to the end of the block.
                calm = add_near_rows(out, zero, values, first, value_stride, dim, limit)
                if calm:
                    i += 4
                continue
            calm = calm and add_near(out, zero, values, first, dim, limit)
            if not calm:
                column = add_rounded(out, zero, values, first, dim, scale, limit)
                if column >= 0:
                    return np.int64(i) * np.int64(dim) + column
            i += 1
    return np.int64(-1)


@njit(cache=True, nogil=True)
def add_batch_terms(out, out_stride, terms, term_stride, segments, source, dim):
    """`add_batch` for values that are in fixed point already."""
    count, indexed = segments.shape[0], source.shape[0] > 0
    for i in range(count):
        if i + AHEAD < count:
            ahead = np.uintp(segments[i + AHEAD]) * out_stride
            for d in range(np.uintp(0), dim, np.uintp(8)):
                prefetch(out, ahead + d)
            if indexed:
                ahead = np.uintp(source[i + AHEAD]) * term_stride
                for d in range(np.uintp(0), dim, np.uintp(8)):
                    prefetch(terms, ahead + d)
        to = np.uintp(segments[i]) * out_stride
        first = np.uintp(source[i] if indexed else i) * term_stride
        column = add_terms(out, to, terms, first, dim)
        if column >= 0:
            return np.int64(i) * np.int64(dim) + column
    return np.int64(-1)


@njit(cache=True, nogil=True)
def add_products_window(out, out_stride, values, value_stride, factors, segments, dim, count):
    i = np.uintp(0)
    for t in range(np.uintp(segments.shape[0]) // count):
        first = t * value_stride
        for _ in range(count):
            if i + np.uintp(AHEAD) < np.uintp(segments.shape[0]):
                ahead = np.uintp(segments[i + np.uintp(AHEAD)]) * out_stride
                for d in range(np.uintp(0), dim, np.uintp(16)):
                    prefetch(out, ahead + d)
            to, factor = np.uintp(segments[i]) * out_stride, factors[i]
            for d in range(dim):
                out[to + d] += factor * values[first + d]
            i += np.uintp(1)


@njit(cache=True, nogil=True)
def add_products_batch(out, out_stride, values, value_stride, factors, segments, dim, count, scale, limit):
    """Position (occurrence * dim + column) of the first product that cannot be added, or -1."""
    row = np.empty(dim, np.float32)
    rounder = np.float64(limit) * ROUNDER
    zero = bits_of(rounder)
    # Occurrence i has the value of row t = i // count: `count` occurrences of one row follow each other.
    i = np.uintp(0)
    for t in range(np.uintp(segments.shape[0]) // count):
        first = t * value_stride
        # of a value and a factor within these bounds the product is, so none is looked at
        near = is_near(values, first, dim, limit * NEAR / MOST_FACTOR)
        for _ in range(count):
            if i + np.uintp(AHEAD) < np.uintp(segments.shape[0]):
                ahead = np.uintp(segments[i + np.uintp(AHEAD)]) * out_stride
                for d in range(np.uintp(0), dim, np.uintp(8)):
                    prefetch(out, ahead + d)
            factor = factors[i]
            to = np.uintp(segments[i]) * out_stride
            # The inlined `add_rounded` of a product: its value is below the bound by `near` and `factor`, so
            # only the total may leave its range, and then the row is taken back and added by the slow path.
            if near and abs(factor) <= MOST_FACTOR:
                moved = np.int64(0)
                for d in range(dim):
                    after = out[to + d] + (bits_of(np.float64(factor * values[first + d]) + rounder) - zero)
                    out[to + d] = after
                    moved |= after + HALF
                if moved >= 0:
                    i += np.uintp(1)
                    continue
                for d in range(dim):
                    out[to + d] -= bits_of(np.float64(factor * values[first + d]) + rounder) - zero
            for d in range(dim):
                row[d] = factor * values[first + d]
            column = add_rounded(out, to, row, np.uintp(0), dim, scale, limit)
            if column >= 0:
                return np.int64(i) * np.int64(dim) + column
            i += np.uintp(1)
    return np.int64(-1)
