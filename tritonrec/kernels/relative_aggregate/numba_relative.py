# mypy: ignore-errors
"""Relative aggregation on the CPU: the buckets of four query rows serve all heads of a sequence.

The weights of four rows are looked up, then multiplied with the values as in HSTU attention; columns to the
right of the four rows' diagonal are never computed. Every sum is one chain in a fixed order
(`kernels.numba_matmul`), so a sequence's bits depend on that sequence alone. The table's gradient adds
float32 scores in float64, row by row.
"""

import numpy as np
import torch

from tritonrec.kernels.head_layout import flat_heads
from tritonrec.kernels.numba_matmul import add_products
from tritonrec.kernels.numba_sequences import log2_of_difference, transpose
from tritonrec.kernels.row_layout import flat, flat_int64
from tritonrec.kernels.workers import over_ranges

from ..caches import njit

F32 = np.float32
U = np.uintp
ONE, FOUR = U(1), U(4)
NO_TIMES = np.empty(0, np.int64)


@njit(cache=True, nogil=True)
def find_buckets(places, width, times, begin, i, rows, last):
    """Buckets of query rows i to i + rows - 1, each with the keys up to itself."""
    # A key behind the query has no bucket: the places end at the diagonal.
    for r in range(rows):
        at = r * width
        if times.shape[0] == 0:
            for j in range(i + r + ONE):
                places[at + j] = min(np.int64(i + r - j), last)
        else:
            now = times[begin + i + r]
            for j in range(i + r + ONE):
                places[at + j] = min(log2_of_difference(now, times[begin + j]), last)


@njit(cache=True, nogil=True)
def look_up(p, places, width, table, first, i, rows):
    """Weights of query rows i to i + rows - 1, zero to the right of each row's diagonal."""
    for r in range(rows):
        at = r * width
        for j in range(i + r + ONE):
            p[at + j] = table[first + U(places[at + j])]
        # The rectangle of four rows has a triangle to the right of the diagonal, which gets weights of 0.
        for j in range(i + r + ONE, i + rows):
            p[at + j] = F32(0.0)


@njit(cache=True, nogil=True)
def forward(
    v, v_token, v_head, table, offsets, times, out, start, stop, heads, dim, buckets, longest
):  # fmt: skip
    """Sequences [start, stop); `out` is contiguous and zero; `times` is empty for relative positions."""
    width = longest + U(16)  # rows of a power of two would fall into one set of the cache
    places = np.empty(FOUR * width, np.int64)
    p = np.empty(FOUR * width, F32)
    last, out_token = np.int64(buckets) - 1, heads * dim
    for b in range(start, stop):
        begin = U(offsets[b])
        length = U(offsets[b + 1]) - begin
        i = U(0)
        while i < length:
            rows = min(FOUR, length - i)
            find_buckets(places, width, times, begin, i, rows, last)
            for h in range(heads):
                look_up(p, places, width, table, h * buckets, i, rows)
                add_products(
                    out, (begin + i) * out_token + h * dim, out_token, p, U(0), width, ONE,
                    v, begin * v_token + h * v_head, v_token, rows, i + rows, dim,
                )  # fmt: skip
            i += FOUR


@njit(cache=True, nogil=True)
def backward(
    do, do_token, do_head, v, v_token, v_head, table, offsets, times, dv, dtable, start, stop, heads, dim,
    buckets, longest,
):  # fmt: skip
    """As `forward`; dv is contiguous and zero, dtable (B, H, R) is overwritten."""
    width = longest + U(16)
    places = np.empty(FOUR * width, np.int64)
    p = np.empty(FOUR * width, F32)
    scores = np.empty(FOUR * width, F32)
    values = np.empty(heads * dim * width, F32)
    sums = np.empty(heads * buckets, np.float64)
    last, dv_token = np.int64(buckets) - 1, heads * dim
    for b in range(start, stop):
        begin = U(offsets[b])
        length = U(offsets[b + 1]) - begin
        sums[:] = 0
        for h in range(heads):
            of_head = values[h * dim * width : (h + ONE) * dim * width]
            transpose(v, begin * v_token + h * v_head, v_token, length, dim, of_head, width)
        i = U(0)
        while i < length:
            rows = min(FOUR, length - i)
            find_buckets(places, width, times, begin, i, rows, last)
            for h in range(heads):
                do_first = (begin + i) * do_token + h * do_head
                look_up(p, places, width, table, h * buckets, i, rows)
                add_products(
                    dv, begin * dv_token + h * dim, dv_token, p, U(0), ONE, width, do, do_first, do_token,
                    i + rows, rows, dim,
                )  # fmt: skip
                for r in range(rows):
                    scores[r * width : r * width + i + rows] = 0
                add_products(
                    scores, U(0), width, do, do_first, do_token, ONE, values, h * dim * width, width,
                    rows, dim, i + rows,
                )  # fmt: skip
                for r in range(rows):
                    for j in range(i + r + ONE):
                        sums[h * buckets + U(places[r * width + j])] += np.float64(scores[r * width + j])
            i += FOUR
        for e in range(heads * buckets):
            dtable[b * heads * buckets + e] = F32(sums[e])


def relative_aggregate(v, table, seq_offsets, max_seq_len, timestamps) -> torch.Tensor:
    """See `tritonrec.kernels.relative_aggregate.op.relative_aggregate`."""
    out = v.new_zeros(v.shape)
    if v.numel() == 0:
        return out
    offsets, times, sizes, cost = _plan(v, table, seq_offsets, timestamps)
    arguments = (*flat_heads(v), flat(table), offsets, times, flat(out))
    over_ranges(
        lambda start, stop: forward(*arguments, U(start), U(stop), *sizes), len(offsets) - 1, cost
    )  # fmt: skip
    return out


def relative_aggregate_backward(
    do, v, table, seq_offsets, max_seq_len, timestamps
) -> tuple[torch.Tensor, torch.Tensor]:
    """dv (L, H, D), and each sequence's gradient of the table, (B, H, R), both contiguous."""
    dv, dtable = v.new_zeros(v.shape), v.new_zeros(seq_offsets.shape[0] - 1, *table.shape)
    if v.numel() == 0:
        return dv, dtable
    offsets, times, sizes, cost = _plan(v, table, seq_offsets, timestamps)
    arguments = (*flat_heads(do), *flat_heads(v), flat(table), offsets, times, flat(dv), flat(dtable))
    over_ranges(
        lambda start, stop: backward(*arguments, U(start), U(stop), *sizes), len(offsets) - 1, 3 * cost
    )  # fmt: skip
    return dv, dtable


def _plan(
    v: torch.Tensor, table: torch.Tensor, seq_offsets: torch.Tensor, timestamps: torch.Tensor | None
) -> tuple[np.ndarray, np.ndarray, tuple[np.uintp, ...], float]:
    """Offsets, times, sizes of the loops, and about how many operations a forward takes."""
    offsets = flat_int64(seq_offsets)
    times = NO_TIMES if timestamps is None else flat_int64(timestamps)
    lengths = np.diff(offsets).astype(np.float64)
    (_, heads, dim), buckets = v.shape, table.shape[1]
    sizes = tuple(map(U, (heads, dim, buckets, int(lengths.max()))))
    return offsets, times, sizes, float((lengths * lengths).sum()) * heads * (dim + 4)
