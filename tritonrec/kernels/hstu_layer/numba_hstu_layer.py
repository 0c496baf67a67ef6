# mypy: ignore-errors
"""A whole HSTU layer on the CPU: the loops of its ops one after another, a few sequences at a time.

The loops are those of the ops, so the bits are theirs; what is saved is the way through Python between them,
and what a few sequences need stays in the cache from one loop to the next. Arguments come as one array of
addresses and sizes, in the order of the names below: numba unpacks an array for as much time as a small
kernel takes.
"""

import numpy as np
from numba import carray

from tritonrec.kernels.hstu_attention import numba_attention as attention
from tritonrec.kernels.linear.numba_linear import add_weight_gradients, rows_times, weight_stride, with_stride
from tritonrec.kernels.norm_linear_silu import numba_norm_linear_silu as front
from tritonrec.kernels.norm_mul_dropout import numba_norm as norm
from tritonrec.kernels.numba_addresses import floats, integers, pointer
from tritonrec.kernels.numba_sequences import transpose
from tritonrec.kernels.rows.numba_segment_sum import add_all

from ..caches import njit

F32 = np.float32
I = np.int64
U = np.uintp
CHUNK = 256  # tokens that pass through the layer together, unless one sequence has more
MOST_SAMPLES = 64  # of a chunk

# The table: sizes, then addresses, of which 0 is no tensor, in the order of the records of `cpu_hstu_layer`.
(
    SAMPLES, TOKENS, DIM, HEADS, QK_DIM, V_DIM, POS_ENTRIES, TS_ENTRIES, BASE, SIGN,
    KEY_0, KEY_1, TAG, THRESHOLD,  # of dropout
    OFFSETS, TARGETS, SAMPLE_IDS, POSITIONS, TIMES, ROW_TIMES,  # `Place`: whose tokens these are
    NORM_WEIGHT, NORM_BIAS, UVQK_WEIGHT, UVQK_BIAS, GATE_WEIGHT, GATE_BIAS, OUTPUT_WEIGHT, OUTPUT_BIAS,
    POS_WEIGHTS, TS_WEIGHTS,  # with the line before `Parameters`
    X, Z, UVQK, ATTENDED, GATED, MEANS, RSTDS, GATE_MEANS, GATE_RSTDS, OUT, HAS_NORMED, NORMED,  # forward
    DY, DX,  # from here on of backward alone: what it leaves to the caller
    DUVQK, DGATE_WEIGHT, DGATE_BIAS, DNORM_WEIGHT, DNORM_BIAS, DPOS, DTS,  # `Terms`
) = range(51)  # fmt: skip
(  # or, in place of what it leaves to the caller, the sums that it adds gradients to
    SUM_OUTPUT_WEIGHT, SUM_OUTPUT_BIAS, SUM_GATE_WEIGHT, SUM_GATE_BIAS, SUM_POS, SUM_TS, SUM_NORM_WEIGHT,
    SUM_NORM_BIAS, SUM_UVQK_WEIGHT, SUM_UVQK_BIAS,
) = range(44, 54)  # fmt: skip
SUMS = 10
# The floats.
EPS, GATE_EPS, ALPHA, SCALE, KEPT_FACTOR, BIAS_FACTOR = range(6)


@njit(cache=True, nogil=True)
def _mask():
    """Of attention: targets one by one, no limits."""
    mask = np.zeros(4, np.int64)
    mask[0] = 1
    return mask


@njit(cache=True, nogil=True)
def _longest(offsets, start, stop):
    longest = I(0)
    for b in range(start, stop):
        longest = max(longest, offsets[b + 1] - offsets[b])
    return longest


@njit(cache=True, nogil=True)
def _chunk_end(offsets, start, stop):
    """The end of the sequences from `start` that pass through together."""
    # One sequence at least, however long.
    end = start + 1
    while end < stop and end - start < MOST_SAMPLES and offsets[end + 1] - offsets[start] <= CHUNK:
        end += 1
    return end


@njit(cache=True, nogil=True)
def _dropout(a, numbers):
    return (
        np.uint32(a[KEY_0]), np.uint32(a[KEY_1]), I(a[TAG]), np.uint64(a[THRESHOLD]), numbers[KEPT_FACTOR]
    )  # fmt: skip


@njit(cache=True, nogil=True)
def forward(a, numbers, start, stop):
    """Sequences [start, stop) of the output, and of what backward needs."""
    samples, tokens = a[SAMPLES], a[TOKENS]
    dim, heads, qk, v_dim = U(a[DIM]), U(a[HEADS]), U(a[QK_DIM]), U(a[V_DIM])
    values, keys = heads * v_dim, heads * qk
    columns = U(2) * (values + keys)
    offsets = integers(a[OFFSETS], samples + 1)
    targets = integers(a[TARGETS], samples) if a[TARGETS] else np.zeros(samples, np.int64)
    contexts, mask = np.zeros(samples, np.int64), _mask()
    scales = np.full(1, numbers[SCALE], F32)
    ids, positions = integers(a[SAMPLE_IDS], tokens), integers(a[POSITIONS], tokens)
    pos, ts = floats(a[POS_WEIGHTS], a[POS_ENTRIES]), floats(a[TS_WEIGHTS], a[TS_ENTRIES])
    timed = tokens if a[TS_ENTRIES] else I(0)
    times, row_times = integers(a[TIMES], timed), integers(a[ROW_TIMES], timed)
    dropout = _dropout(a, numbers)

    x, out = floats(a[X], tokens * I(dim)), floats(a[OUT], tokens * I(dim))
    z, uvqk = floats(a[Z], tokens * I(columns)), floats(a[UVQK], tokens * I(columns))
    attended = floats(a[ATTENDED], tokens * I(values))
    gated = floats(a[GATED], tokens * I(values))
    normed = floats(a[NORMED], tokens * I(dim) * a[HAS_NORMED])
    means, rstds = floats(a[MEANS], tokens), floats(a[RSTDS], tokens)
    gate_means, gate_rstds = floats(a[GATE_MEANS], tokens), floats(a[GATE_RSTDS], tokens)

    stride, out_stride = weight_stride(columns), weight_stride(dim)
    inner_weight, output_weight = np.empty(dim * stride, F32), np.empty(values * out_stride, F32)
    transpose(floats(a[UVQK_WEIGHT], I(dim * columns)), U(0), dim, columns, dim, inner_weight, stride)
    transpose(floats(a[OUTPUT_WEIGHT], I(dim * values)), U(0), values, dim, values, output_weight, out_stride)
    norm_weight, norm_bias = floats(a[NORM_WEIGHT], I(dim)), floats(a[NORM_BIAS], I(dim))
    uvqk_bias, output_bias = floats(a[UVQK_BIAS], I(columns)), floats(a[OUTPUT_BIAS], I(dim))
    gate_weight, gate_bias = floats(a[GATE_WEIGHT], I(values)), floats(a[GATE_BIAS], I(values))

    b = start
    while b < stop:
        e = _chunk_end(offsets, b, stop)
        first, last = U(offsets[b]), U(offsets[e])
        front.forward(
            x, dim, norm_weight, norm_bias, numbers[EPS], inner_weight, uvqk_bias, uvqk, z, normed, means,
            rstds, first, last, dim, columns,
        )  # fmt: skip
        for i in range(first * values, last * values):
            attended[i] = F32(0.0)
        attention.forward(
            # One row of uvqk has all heads of each part, side by side:
            #     | u: values | v: values | q: keys | k: keys |        values = H * v_dim, keys = H * qk_dim
            uvqk[U(2) * values :], columns, qk, uvqk[U(2) * values + keys :], columns, qk, uvqk[values:],
            columns, v_dim, offsets, offsets, targets, contexts, mask, scales, U(0), numbers[ALPHA], pos,
            a[BASE], a[SIGN], ts, row_times, times, numbers[BIAS_FACTOR], attended, values, v_dim, U(b), U(e),
            heads, qk, v_dim, U(_longest(offsets, b, e)),
        )  # fmt: skip
        norm.forward(
            attended, values, uvqk, columns, gate_weight, gate_bias, numbers[GATE_EPS], dropout, ids,
            positions, gated, gate_means, gate_rstds, first, last, values,
        )  # fmt: skip
        rows_times(gated, values, output_weight, output_bias, out, first, last, values, dim)
        for i in range(first * dim, last * dim):
            out[i] += x[i]
        b = e


@njit(cache=True, nogil=True)
def _weights(a):
    """Those of uvqk and output, as `rows_times` reads them in backward."""
    dim, values = U(a[DIM]), U(a[HEADS] * a[V_DIM])
    columns = U(2) * (values + U(a[HEADS] * a[QK_DIM]))
    uvqk_weight = with_stride(floats(a[UVQK_WEIGHT], I(dim * columns)), columns, dim)
    return uvqk_weight, with_stride(floats(a[OUTPUT_WEIGHT], I(dim * values)), dim, values)


@njit(cache=True, nogil=True)
def _backward_rows(
    a, numbers, start, stop, uvqk_weight, output_weight, dgated, dattended, duvqk, normed, dgate_weight,
    dgate_bias, dnorm_weight, dnorm_bias, dpos, dts,
):  # fmt: skip
    """Sequences [start, stop) of dx, and all that the gradients of parameters are made of.

    The buffers begin with the first row of sequence `start`. normed is written unless it was kept.
    """
    samples, tokens = a[SAMPLES], a[TOKENS]
    dim, heads, qk, v_dim = U(a[DIM]), U(a[HEADS]), U(a[QK_DIM]), U(a[V_DIM])
    values, keys = heads * v_dim, heads * qk
    columns = U(2) * (values + keys)
    all_offsets = integers(a[OFFSETS], samples + 1)
    first, last = U(all_offsets[start]), U(all_offsets[stop])
    rows = last - first
    count = stop - start
    # The buffers hold the rows of this chunk alone: all arrays
    # are cut to its first row, and its offsets begin at 0.
    offsets = np.empty(count + 1, np.int64)
    for b in range(count + 1):
        offsets[b] = all_offsets[start + b] - all_offsets[start]
    targets = integers(a[TARGETS], samples)[start:] if a[TARGETS] else np.zeros(count, np.int64)
    contexts, mask = np.zeros(count, np.int64), _mask()
    scales = np.full(1, numbers[SCALE], F32)
    ids, positions = integers(a[SAMPLE_IDS], tokens)[first:], integers(a[POSITIONS], tokens)[first:]
    pos, ts = floats(a[POS_WEIGHTS], a[POS_ENTRIES]), floats(a[TS_WEIGHTS], a[TS_ENTRIES])
    timed = tokens if a[TS_ENTRIES] else I(0)
    times, row_times = integers(a[TIMES], timed), integers(a[ROW_TIMES], timed)
    if timed:
        times, row_times = times[first:], row_times[first:]

    x, dy = floats(a[X], tokens * I(dim))[first * dim :], floats(a[DY], tokens * I(dim))[first * dim :]
    dx = floats(a[DX], tokens * I(dim))[first * dim :]
    z = floats(a[Z], tokens * I(columns))[first * columns :]
    uvqk = floats(a[UVQK], tokens * I(columns))[first * columns :]
    attended = floats(a[ATTENDED], tokens * I(values))[first * values :]
    means, rstds = floats(a[MEANS], tokens)[first:], floats(a[RSTDS], tokens)[first:]
    gate_means = floats(a[GATE_MEANS], tokens)[first:]
    gate_rstds = floats(a[GATE_RSTDS], tokens)[first:]
    norm_weight, norm_bias = floats(a[NORM_WEIGHT], I(dim)), floats(a[NORM_BIAS], I(dim))
    gate_weight, gate_bias = floats(a[GATE_WEIGHT], I(values)), floats(a[GATE_BIAS], I(values))

    no_bias = np.empty(0, F32)  # a constant would be a type of its own, which cannot be written to
    rows_times(dy, dim, output_weight, no_bias, dgated, U(0), rows, dim, values)
    norm.backward(
        dgated, values, attended, values, uvqk, columns, gate_weight, gate_bias, _dropout(a, numbers), ids,
        positions, gate_means, gate_rstds, dattended, duvqk, columns, dgate_weight, dgate_bias, U(0), rows,
        values,
    )  # fmt: skip
    for t in range(rows):
        # The gate's gradient (the first `values` columns) is
        # there already; attention adds to the other three parts.
        for i in range(t * columns + values, (t + U(1)) * columns):
            duvqk[i] = F32(0.0)
    attention.backward(
        dattended, values, v_dim, uvqk[U(2) * values :], columns, qk, uvqk[U(2) * values + keys :], columns,
        qk, uvqk[values:], columns, v_dim, offsets, offsets, targets, contexts, mask, scales, U(0),
        numbers[ALPHA], pos, a[BASE], a[SIGN], ts, row_times, times, numbers[BIAS_FACTOR],
        duvqk[U(2) * values :], columns, qk, duvqk[U(2) * values + keys :], columns, qk, duvqk[values:],
        columns, v_dim, dpos, dts, U(0), U(count), heads, qk, v_dim, U(_longest(offsets, I(0), count)),
    )  # fmt: skip
    front.backward(
        duvqk, x, dim, norm_weight, norm_bias, numbers[EPS], np.empty(0, F32),
        floats(a[UVQK_BIAS], I(columns)), uvqk_weight, z, normed, means, rstds, dx,
        dnorm_weight, dnorm_bias, U(0), rows, dim, columns, a[HAS_NORMED] != 0,
    )  # fmt: skip
    # The layer's input is added to its output: its gradient gets dy as it is.
    for i in range(rows * dim):
        dx[i] += dy[i]


@njit(cache=True, nogil=True)
def backward(a, numbers, start, stop):
    """Sequences [start, stop) of dx, and of the terms of gradients, which the caller sums."""
    samples, tokens = a[SAMPLES], a[TOKENS]
    values = a[HEADS] * a[V_DIM]
    columns = 2 * (values + a[HEADS] * a[QK_DIM])
    offsets = integers(a[OFFSETS], samples + 1)
    dpos = carray(pointer(a[DPOS]), (samples, a[POS_ENTRIES]), np.float32)
    dts = carray(pointer(a[DTS]), (samples, a[TS_ENTRIES]), np.float32)
    most = U(max(CHUNK, _longest(offsets, start, stop)))
    dgated, dattended = np.empty(most * U(values), F32), np.empty(most * U(values), F32)
    uvqk_weight, output_weight = _weights(a)
    b = start
    while b < stop:
        e = _chunk_end(offsets, b, stop)
        first = offsets[b]
        _backward_rows(
            a, numbers, b, e, uvqk_weight, output_weight, dgated, dattended,
            floats(a[DUVQK], tokens * columns)[first * columns :],
            floats(a[NORMED], tokens * a[DIM])[first * a[DIM] :],
            floats(a[DGATE_WEIGHT], tokens * values)[first * values :],
            floats(a[DGATE_BIAS], tokens * values)[first * values :],
            floats(a[DNORM_WEIGHT], tokens * a[DIM])[first * a[DIM] :],
            floats(a[DNORM_BIAS], tokens * a[DIM])[first * a[DIM] :], dpos[b:e], dts[b:e],
        )  # fmt: skip
        b = e


@njit(cache=True, nogil=True)
def _note(bad, bad_values, which, found, row, column, value):
    """Keep the first value that a sum cannot take."""
    if bad[which, 0] < 0:
        bad[which, 0], bad[which, 1], bad[which, 2], bad_values[which] = found, row, column, value
    return I(1)


@njit(cache=True, nogil=True)
def _add_rows(bad, bad_values, which, first, sums, terms, rows, dim, scale, limit):
    """Add rows of terms to int64 sums (dim,)."""
    place = add_all(sums, terms, dim, I(rows), dim, scale, limit)
    if place < 0:
        return I(0)
    return _note(
        bad, bad_values, which, I(first) + place // I(dim), place % I(dim), I(0), terms[place]
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _add_products(bad, bad_values, which, sample, sums, dy, x, offsets, outer, inner, scale, limit):
    """Add each sample's product dy.T @ x to int64 sums (outer, inner)."""
    found, row, column, value = add_weight_gradients(
        sums, inner, dy, outer, x, inner, offsets, U(0), outer, inner, scale, limit
    )
    if found < 0:
        return I(0)
    return _note(bad, bad_values, which, I(sample) + found, row, column, value)


@njit(cache=True, nogil=True)
def backward_exact(a, numbers, scale, limit, bad, bad_values):
    """dx, and the exact gradients of all parameters added to their sums.

    `bad` (SUMS, 3) is -1 where a sum took all its values; otherwise the first that it could not take, in
    `bad_values`: (sample, row, column) of a product, (row of the batch, column) of other terms. Returns the
    number of chunks and sums where there was one.
    """
    samples, tokens = a[SAMPLES], a[TOKENS]
    dim, heads = U(a[DIM]), U(a[HEADS])
    values, keys = heads * U(a[V_DIM]), heads * U(a[QK_DIM])
    columns = U(2) * (values + keys)
    offsets = integers(a[OFFSETS], samples + 1)
    most = U(max(CHUNK, _longest(offsets, I(0), samples)))
    dgated, dattended = np.empty(most * values, F32), np.empty(most * values, F32)
    dgate_weight, dgate_bias = np.empty(most * values, F32), np.empty(most * values, F32)
    duvqk, some_normed = np.empty(most * columns, F32), np.empty(most * dim, F32)
    dnorm_weight, dnorm_bias = np.empty(most * dim, F32), np.empty(most * dim, F32)
    dpos = np.empty((MOST_SAMPLES, a[POS_ENTRIES]), F32)
    dts = np.empty((MOST_SAMPLES, a[TS_ENTRIES]), F32)
    some_offsets = np.empty(MOST_SAMPLES + 1, np.int64)
    all_dy, all_gated = floats(a[DY], tokens * I(dim)), floats(a[GATED], tokens * I(values))
    uvqk_weight, output_weight = _weights(a)
    failed = I(0)
    b = I(0)
    while b < samples:
        e = _chunk_end(offsets, b, samples)
        first = U(offsets[b])
        rows = U(offsets[e]) - first
        normed = floats(a[NORMED], tokens * I(dim))[first * dim :] if a[HAS_NORMED] else some_normed
        _backward_rows(
            a, numbers, b, e, uvqk_weight, output_weight, dgated, dattended, duvqk, normed, dgate_weight,
            dgate_bias, dnorm_weight, dnorm_bias, dpos, dts,
        )  # fmt: skip
        for s in range(b, e + 1):
            some_offsets[s - b] = offsets[s] - offsets[b]
        cut = some_offsets[: e - b + 1]
        dy, gated = all_dy[first * dim :], all_gated[first * values :]
        failed += _add_products(
            bad, bad_values, I(0), b, integers(a[SUM_OUTPUT_WEIGHT], I(dim * values)), dy, gated, cut, dim,
            values, scale, limit,
        )  # fmt: skip
        failed += _add_rows(
            bad, bad_values, I(1), first, integers(a[SUM_OUTPUT_BIAS], I(dim)), dy, rows, dim, scale, limit
        )
        failed += _add_rows(
            bad, bad_values, I(2), first, integers(a[SUM_GATE_WEIGHT], I(values)), dgate_weight, rows, values,
            scale, limit,
        )  # fmt: skip
        failed += _add_rows(
            bad, bad_values, I(3), first, integers(a[SUM_GATE_BIAS], I(values)), dgate_bias, rows, values,
            scale, limit,
        )  # fmt: skip
        if a[POS_ENTRIES]:
            failed += _add_rows(
                bad, bad_values, I(4), U(b), integers(a[SUM_POS], a[POS_ENTRIES]), dpos.reshape(-1), U(e - b),
                U(a[POS_ENTRIES]), scale, limit,
            )  # fmt: skip
        if a[TS_ENTRIES]:
            failed += _add_rows(
                bad, bad_values, I(5), U(b), integers(a[SUM_TS], a[TS_ENTRIES]), dts.reshape(-1), U(e - b),
                U(a[TS_ENTRIES]), scale, limit,
            )  # fmt: skip
        failed += _add_rows(
            bad,
            bad_values,
            I(6),
            first,
            integers(a[SUM_NORM_WEIGHT], I(dim)),
            dnorm_weight,
            rows,
            dim,
            scale,
            limit,
        )
        failed += _add_rows(
            bad,
            bad_values,
            I(7),
            first,
            integers(a[SUM_NORM_BIAS], I(dim)),
            dnorm_bias,
            rows,
            dim,
            scale,
            limit,
        )
        failed += _add_products(
            bad, bad_values, I(8), b, integers(a[SUM_UVQK_WEIGHT], I(dim * columns)), duvqk, normed, cut,
            columns, dim, scale, limit,
        )  # fmt: skip
        failed += _add_rows(
            bad,
            bad_values,
            I(9),
            first,
            integers(a[SUM_UVQK_BIAS], I(columns)),
            duvqk,
            rows,
            columns,
            scale,
            limit,
        )
        b = e
    return failed
