# mypy: ignore-errors
"""HSTU attention on the CPU: four query rows at a time, one head of one sequence after another.

A sequence is read where it lies; only the keys (and in backward the values) of the current head are copied,
transposed, so that scores of neighbouring keys lie side by side. Columns that none of the four rows sees are
left out in runs (`numba_mask`). Every sum is one ascending chain (`kernels.numba_matmul`), so a sequence's
bits depend on that sequence alone, and a row of the output on that row.
"""

import numpy as np

from tritonrec.kernels.hstu_attention.numba_bias import add_bias, add_bias_gradient
from tritonrec.kernels.hstu_attention.numba_mask import find_runs, find_spans
from tritonrec.kernels.numba_float import exp
from tritonrec.kernels.numba_matmul import add_products
from tritonrec.kernels.numba_sequences import transpose

from ..caches import njit

F32 = np.float32
I = np.int64
U = np.uintp
ONE, THREE, FOUR = U(1), U(3), U(4)


@njit(cache=True, nogil=True, inline="always")
def clear(x, start, count):
    for j in range(count):
        x[start + j] = F32(0.0)


@njit(cache=True, nogil=True, inline="always")
def spans_of(spans, row, n):
    """The n-th of the three spans of a row."""
    # columns    0 ... prefix        low ... high        own ... row
    #            [ n = 0 )           [  n = 1  )         [  n = 2  ]
    if n == 0:
        return U(0), U(spans[row, 0])
    if n == 1:
        return U(spans[row, 1]), U(spans[row, 2])
    return U(spans[row, 3]), row + ONE


@njit(cache=True, nogil=True, inline="always")
def clear_hidden(x, at, spans, row, left, right):
    """Zero what `row` does not see in the run of columns [left, right)."""
    # Spans ascend: what lies between them, and behind the last, is hidden.
    done = left
    for n in range(3):
        start, stop = spans_of(spans, row, n)
        if start < right and stop > done:
            if start > done:
                clear(x, at + done, start - done)
            done = stop
    if done < right:
        clear(x, at + done, right - done)


@njit(cache=True, nogil=True, inline="always")
def weigh(p, start, count, alpha, scale):
    """p = silu(alpha p) * scale."""
    for j in range(count):
        x = alpha * p[start + j]
        p[start + j] = x / (F32(1.0) + exp(-x)) * scale


@njit(cache=True, nogil=True, inline="always")
def weigh_with_slope(p, ds, start, count, alpha, scale, gain):
    """p = silu(alpha p) * scale, ds = ds * silu'(alpha p) * scale * gain."""
    for j in range(count):
        x = alpha * p[start + j]
        s = F32(1.0) / (F32(1.0) + exp(-x))
        p[start + j] = x * s * scale
        ds[start + j] = ds[start + j] * (s * (F32(1.0) + x * (F32(1.0) - s))) * scale * gain


@njit(cache=True, nogil=True)
def add_bias_to_row(p, at, spans, row, pos, base, sign, ts, row_time, times, begin, alpha, factor):
    """p = alpha p + factor * bias where `row` sees."""
    for n in range(3):
        start, stop = spans_of(spans, row, n)
        for j in range(start, stop):
            p[at + j] *= alpha
        add_bias(p, at, I(row), I(start), I(stop), pos, base, sign, ts, row_time, times, I(begin), factor)


@njit(cache=True, nogil=True)
def add_bias_gradient_of_row(
    ds, at, spans, row, pos_sums, base, sign, ts_sums, row_time, times, begin, alpha
):  # fmt: skip
    """Add what `row` sees to the tables' sums; then ds *= alpha."""
    for n in range(3):
        start, stop = spans_of(spans, row, n)
        add_bias_gradient(
            ds, at, I(row), I(start), I(stop), pos_sums, base, sign, ts_sums, row_time, times, I(begin)
        )
        for j in range(at + start, at + stop):
            ds[j] *= alpha


@njit(cache=True, nogil=True, error_model="numpy")  # a check for zero would keep `weigh` from vectors
def forward(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, offsets, row_offsets, targets, contexts, mask,
    scales, scale_step, alpha, pos, base, sign, ts, row_times, times, factor,
    out, out_token, out_head, start, stop, heads, dim_qk, dim_v, longest,
):  # fmt: skip
    """Sequences [start, stop); `out` is zero; `targets` has one entry per sequence.

    `row_offsets` are the offsets of q: the last so many tokens of each sequence. The scale of row t is
    ``scales[t * scale_step]``.
    """
    width = longest + U(16)  # rows of a power of two would fall into one set of the cache
    keys = np.empty(dim_qk * width, F32)
    p = np.empty(FOUR * width, F32)
    spans = np.empty((longest, 4), np.int64)
    runs = np.empty((3, 2), np.int64)
    biased = pos.shape[0] + ts.shape[0] > 0
    # With a bias the scores are scaled where it is added (`add_bias_to_row`), and by 1 here.
    slope = F32(1.0) if biased else alpha
    row_time = I(0)
    for b in range(start, stop):
        begin, row_begin = U(offsets[b]), U(row_offsets[b])
        length = U(offsets[b + 1]) - begin
        hidden = length - (U(row_offsets[b + 1]) - row_begin)  # tokens before the first query
        find_spans(spans, I(hidden), I(length), I(length) - I(targets[b]), I(contexts[b]), mask)
        for h in range(heads):
            v_first = begin * v_token + h * v_head
            transpose(k, begin * k_token + h * k_head, k_token, length, dim_qk, keys, width)
            i = hidden
            while i < length:
                # Fours begin at multiples of four of the sequence,
                # also where its first tokens have no queries.
                rows = min(FOUR - (i & THREE), length - i)
                count = find_runs(runs, spans, I(i), I(i + rows))
                t = row_begin + (i - hidden)
                # scores = Q K^T, in the runs of columns that a row of the four may see
                for n in range(count):
                    left, right = U(runs[n, 0]), U(runs[n, 1])
                    for r in range(rows):
                        clear(p, r * width + left, right - left)
                    add_products(
                        p, left, width, q, t * q_token + h * q_head, q_token, ONE, keys, left, width,
                        rows, dim_qk, right - left,
                    )  # fmt: skip
                for r in range(rows):
                    at, row = r * width, i + r
                    if biased:
                        if row_times.shape[0] > 0:
                            row_time = row_times[begin + row]
                        add_bias_to_row(
                            p, at, spans, row, pos, base, sign, ts, row_time, times, begin, alpha, factor
                        )
                    scale = scales[(t + r) * scale_step]
                    for n in range(count):
                        left, right = U(runs[n, 0]), U(runs[n, 1])
                        weigh(p, at + left, right - left, slope, scale)
                        clear_hidden(p, at, spans, row, left, right)
                # out += P V, over the same runs in ascending order
                for n in range(count):
                    left, right = U(runs[n, 0]), U(runs[n, 1])
                    add_products(
                        out, t * out_token + h * out_head, out_token, p, left, width, ONE,
                        v, v_first + left * v_token, v_token, rows, right - left, dim_v,
                    )  # fmt: skip
                i += rows


@njit(cache=True, nogil=True, error_model="numpy")
def backward(
    do, do_token, do_head, q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, offsets, row_offsets,
    targets, contexts, mask, scales, scale_step, alpha, pos, base, sign, ts, row_times, times, factor,
    dq, dq_token, dq_head, dk, dk_token, dk_head, dv, dv_token, dv_head, dpos, dts,
    start, stop, heads, dim_qk, dim_v, longest,
):  # fmt: skip
    """As `forward`; dq, dk and dv are zero. A key's gradient adds its queries in order.

    dpos and dts (B, entries) are overwritten with each sequence's gradients of the tables.
    """
    width = longest + U(16)
    keys = np.empty(dim_qk * width, F32)
    values = np.empty(dim_v * width, F32)
    p = np.empty(FOUR * width, F32)
    ds = np.empty(FOUR * width, F32)
    spans = np.empty((longest, 4), np.int64)
    runs = np.empty((3, 2), np.int64)
    pos_sums, ts_sums = np.empty(pos.shape[0], np.float64), np.empty(ts.shape[0], np.float64)
    biased = pos.shape[0] + ts.shape[0] > 0
    # `gain` is the factor of dQ and dK. With a bias it comes last, once
    # the tables have their gradients, which are those of alpha q k + bias.
    slope, gain = (F32(1.0), F32(1.0)) if biased else (alpha, alpha)
    row_time = I(0)
    for b in range(start, stop):
        begin, row_begin = U(offsets[b]), U(row_offsets[b])
        length = U(offsets[b + 1]) - begin
        hidden = length - (U(row_offsets[b + 1]) - row_begin)
        find_spans(spans, I(hidden), I(length), I(length) - I(targets[b]), I(contexts[b]), mask)
        pos_sums[:] = 0
        ts_sums[:] = 0
        for h in range(heads):
            k_first = begin * k_token + h * k_head
            dk_first, dv_first = begin * dk_token + h * dk_head, begin * dv_token + h * dv_head
            transpose(k, k_first, k_token, length, dim_qk, keys, width)
            transpose(v, begin * v_token + h * v_head, v_token, length, dim_v, values, width)
            i = hidden
            while i < length:
                rows = min(FOUR - (i & THREE), length - i)
                count = find_runs(runs, spans, I(i), I(i + rows))
                t = row_begin + (i - hidden)
                q_first, do_first = t * q_token + h * q_head, t * do_token + h * do_head
                for n in range(count):
                    left, right = U(runs[n, 0]), U(runs[n, 1])
                    for r in range(rows):
                        clear(p, r * width + left, right - left)
                        clear(ds, r * width + left, right - left)
                    add_products(
                        p, left, width, q, q_first, q_token, ONE, keys, left, width,
                        rows, dim_qk, right - left,
                    )  # fmt: skip
                    add_products(
                        ds, left, width, do, do_first, do_token, ONE, values, left, width,
                        rows, dim_v, right - left,
                    )  # fmt: skip
                for r in range(rows):
                    at, row = r * width, i + r
                    if biased:
                        if row_times.shape[0] > 0:
                            row_time = row_times[begin + row]
                        add_bias_to_row(
                            p, at, spans, row, pos, base, sign, ts, row_time, times, begin, alpha, factor
                        )
                    scale = scales[(t + r) * scale_step]
                    for n in range(count):
                        left, right = U(runs[n, 0]), U(runs[n, 1])
                        weigh_with_slope(p, ds, at + left, right - left, slope, scale, gain)
                        clear_hidden(p, at, spans, row, left, right)
                        clear_hidden(ds, at, spans, row, left, right)
                    if biased:
                        add_bias_gradient_of_row(
                            ds, at, spans, row, pos_sums, base, sign, ts_sums, row_time, times, begin, alpha
                        )
                for n in range(count):
                    left, right = U(runs[n, 0]), U(runs[n, 1])
                    columns = right - left
                    add_products(
                        dq, t * dq_token + h * dq_head, dq_token, ds, left, width, ONE,
                        k, k_first + left * k_token, k_token, rows, columns, dim_qk,
                    )  # fmt: skip
                    add_products(
                        dk, dk_first + left * dk_token, dk_token, ds, left, ONE, width,
                        # dK += dS^T Q: `ds` is read by columns (steps 1 and `width`).
                        q, q_first, q_token, columns, rows, dim_qk,
                    )  # fmt: skip
                    add_products(
                        dv, dv_first + left * dv_token, dv_token, p, left, ONE, width,
                        do, do_first, do_token, columns, rows, dim_v,
                    )  # fmt: skip
                i += rows
        for e in range(pos_sums.shape[0]):
            dpos[b, e] = F32(factor * pos_sums[e])
        for e in range(ts_sums.shape[0]):
            dts[b, e] = F32(factor * ts_sums[e])
