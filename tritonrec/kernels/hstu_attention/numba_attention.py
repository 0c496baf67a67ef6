"""HSTU attention on the CPU: four query rows at a time, one head of one sequence after another.

A sequence is read where it lies; only the keys (and in backward the values) of the current head are copied,
transposed, so that scores of neighbouring keys lie side by side. Columns to the right of the four rows'
diagonal are never computed. Every sum is one ascending chain (`kernels.numba_matmul`), so a sequence's bits
depend on that sequence alone.
"""

import numpy as np
from numba import njit

from tritonrec.kernels.numba_float import exp
from tritonrec.kernels.numba_matmul import add_products

F32 = np.float32
U = np.uintp
ONE, FOUR = U(1), U(4)


@njit(cache=True, nogil=True)
def transpose(source, first, stride, rows, columns, out, out_stride):
    """``out[c, r] = source[r, c]``, flat."""
    for r in range(rows):
        start = first + r * stride
        for c in range(columns):
            out[c * out_stride + r] = source[start + c]


@njit(cache=True, nogil=True)
def last_visible(row, history):
    """Keys before this position are visible to the query `row`, and the row itself is; no others."""
    return min(row + ONE, history)


@njit(cache=True, nogil=True)
def forward(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, offsets, targets, alpha, scale, out,
    start, stop, heads, dim_qk, dim_v, longest,
):  # fmt: skip
    """Sequences [start, stop); `out` is contiguous and zero; `targets` has one entry per sequence."""
    width = longest + U(16)  # rows of a power of two would fall into one set of the cache
    keys = np.empty(dim_qk * width, F32)
    p = np.empty(FOUR * width, F32)
    out_token = heads * dim_v
    for b in range(start, stop):
        begin = U(offsets[b])
        length = U(offsets[b + 1]) - begin
        history = length - U(targets[b])
        for h in range(heads):
            q_first, v_first = begin * q_token + h * q_head, begin * v_token + h * v_head
            out_first = begin * out_token + h * dim_v
            transpose(k, begin * k_token + h * k_head, k_token, length, dim_qk, keys, width)
            i = U(0)
            while i < length:
                rows = min(FOUR, length - i)
                columns = i + rows
                for r in range(rows):
                    p[r * width : r * width + columns] = 0
                add_products(
                    p, U(0), width, q, q_first + i * q_token, q_token, ONE, keys, U(0), width,
                    rows, dim_qk, columns,
                )  # fmt: skip
                for r in range(rows):
                    at = r * width
                    own = p[at + i + r]
                    seen = last_visible(i + r, history)
                    for j in range(seen):
                        x = alpha * p[at + j]
                        p[at + j] = x / (F32(1.0) + exp(-x)) * scale
                    for j in range(seen, columns):
                        p[at + j] = F32(0.0)
                    if i + r >= seen:
                        x = alpha * own
                        p[at + i + r] = x / (F32(1.0) + exp(-x)) * scale
                add_products(
                    out, out_first + i * out_token, out_token, p, U(0), width, ONE, v, v_first, v_token,
                    rows, columns, dim_v,
                )  # fmt: skip
                i += FOUR


@njit(cache=True, nogil=True)
def backward(
    do, do_token, do_head, q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, offsets, targets,
    alpha, scale, dq, dk, dv, start, stop, heads, dim_qk, dim_v, longest,
):  # fmt: skip
    """As `forward`; dq, dk and dv are contiguous and zero. A key's gradient adds its queries in order."""
    width = longest + U(16)
    keys = np.empty(dim_qk * width, F32)
    values = np.empty(dim_v * width, F32)
    p = np.empty(FOUR * width, F32)
    ds = np.empty(FOUR * width, F32)
    qk_token, o_token = heads * dim_qk, heads * dim_v
    for b in range(start, stop):
        begin = U(offsets[b])
        length = U(offsets[b + 1]) - begin
        history = length - U(targets[b])
        for h in range(heads):
            q_first, k_first = begin * q_token + h * q_head, begin * k_token + h * k_head
            do_first = begin * do_token + h * do_head
            dqk_first, dv_first = begin * qk_token + h * dim_qk, begin * o_token + h * dim_v
            transpose(k, k_first, k_token, length, dim_qk, keys, width)
            transpose(v, begin * v_token + h * v_head, v_token, length, dim_v, values, width)
            i = U(0)
            while i < length:
                rows = min(FOUR, length - i)
                columns = i + rows
                for r in range(rows):
                    p[r * width : r * width + columns] = 0
                    ds[r * width : r * width + columns] = 0
                add_products(
                    p, U(0), width, q, q_first + i * q_token, q_token, ONE, keys, U(0), width,
                    rows, dim_qk, columns,
                )  # fmt: skip
                add_products(
                    ds, U(0), width, do, do_first + i * do_token, do_token, ONE, values, U(0), width,
                    rows, dim_v, columns,
                )  # fmt: skip
                for r in range(rows):
                    at = r * width
                    own, own_slope = p[at + i + r], ds[at + i + r]
                    seen = last_visible(i + r, history)
                    for j in range(seen):
                        x = alpha * p[at + j]
                        s = F32(1.0) / (F32(1.0) + exp(-x))
                        p[at + j] = x * s * scale
                        ds[at + j] = ds[at + j] * (s * (F32(1.0) + x * (F32(1.0) - s))) * scale * alpha
                    for j in range(seen, columns):
                        p[at + j] = F32(0.0)
                        ds[at + j] = F32(0.0)
                    if i + r >= seen:
                        x = alpha * own
                        s = F32(1.0) / (F32(1.0) + exp(-x))
                        p[at + i + r] = x * s * scale
                        ds[at + i + r] = own_slope * (s * (F32(1.0) + x * (F32(1.0) - s))) * scale * alpha
                add_products(
                    dq, dqk_first + i * qk_token, qk_token, ds, U(0), width, ONE, k, k_first, k_token,
                    rows, columns, dim_qk,
                )  # fmt: skip
                add_products(
                    dk, dqk_first, qk_token, ds, U(0), ONE, width, q, q_first + i * q_token, q_token,
                    columns, rows, dim_qk,
                )  # fmt: skip
                add_products(
                    dv, dv_first, o_token, p, U(0), ONE, width, do, do_first + i * do_token, do_token,
                    columns, rows, dim_v,
                )  # fmt: skip
                i += FOUR
