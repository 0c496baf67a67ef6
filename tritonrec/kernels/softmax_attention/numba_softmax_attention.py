# mypy: ignore-errors
"""Softmax attention on the CPU: four query rows of one head at a time, against all keys that they see.

Every sum is one in a fixed order (`kernels.numba_matmul`, `kernels.numba_float.dot`) along the sequence, so
its bits depend on that sequence alone. Backward computes the weights again from the row's greatest score and
its sum of exponentials.
"""

import numpy as np
import torch

from tritonrec.kernels.head_layout import flat_heads
from tritonrec.kernels.norm_mul_dropout.numba_norm import draw_kept
from tritonrec.kernels.numba_float import dot, exp
from tritonrec.kernels.numba_matmul import add_products
from tritonrec.kernels.numba_sequences import transpose
from tritonrec.kernels.philox.reference import DROPOUT, halves
from tritonrec.kernels.row_layout import flat, flat_int64
from tritonrec.kernels.softmax_attention.op import Call
from tritonrec.kernels.workers import over_ranges

from ..caches import njit

F32 = np.float32
U = np.uintp
ONE, FOUR = U(1), U(4)
HIDDEN = F32(-np.inf)
NO_BIAS = np.empty(0, F32), (U(0),) * 4
NO_IDS = np.empty(0, np.int64)


@njit(cache=True, nogil=True)
def find_scores(
    s, width, q, q_first, q_token, keys, scale, causal, bias, bias_strides, b, h, i, rows, columns, dim
):  # fmt: skip
    """Scores of query rows i to i + rows - 1 against `columns` keys, -inf where one is hidden."""
    for r in range(rows):
        s[r * width : r * width + columns] = 0
    add_products(s, U(0), width, q, q_first, q_token, ONE, keys, U(0), width, rows, dim, columns)
    for r in range(rows):
        at = r * width
        for j in range(columns):
            s[at + j] *= scale
        if bias.shape[0]:
            of_sample, of_head, of_query, of_key = bias_strides
            from_ = b * of_sample + h * of_head + (i + r) * of_query
            for j in range(columns):
                s[at + j] += bias[from_ + j * of_key]
        if causal:
            # The four rows share `columns`; those behind a row's own place are hidden from it.
            for j in range(min(i + r + ONE, columns), columns):
                s[at + j] = HIDDEN


@njit(cache=True, nogil=True)
def exponentials(s, at, columns, most):
    for j in range(columns):
        x = s[at + j]
        s[at + j] = F32(0.0) if x == HIDDEN else exp(x - most)


@njit(cache=True, nogil=True)
def keep(kept, draws, samples, b, h, position, columns):
    """The factor of each key's weight for one query."""
    k0, k1, tag, threshold, factor = draws
    # Whole blocks of four draws; `kept` has room for those behind the last key.
    block = kept[: (columns + U(3)) // FOUR * FOUR]
    draw_kept(block, k0, np.uint32(k1 + np.uint32(h)), tag, samples[b], np.int64(position), threshold, factor)


@njit(cache=True, nogil=True, error_model="numpy")
def forward(
    q, q_token, q_head, k, k_token, k_head, v, v_token, v_head, q_offsets, k_offsets, scale, causal, bias,
    bias_strides, draws, samples, out, most, total, last, start, stop, heads, dim, dim_v, longest,
):  # fmt: skip
    """Sequences [start, stop); `out` is contiguous and zero."""
    width = longest + U(16)  # rows of a power of two would fall into one set of the cache
    keys = np.empty(dim * width, F32)
    s = np.empty(FOUR * width, F32)
    ones, kept = np.ones(width, F32), np.empty(width, F32)
    out_token = heads * dim_v
    for b in range(start, stop):
        q_begin, k_begin = U(q_offsets[b]), U(k_offsets[b])
        queries, length = U(q_offsets[b + 1]) - q_begin, U(k_offsets[b + 1]) - k_begin
        shift = length - queries if last else U(0)
        for h in range(heads):
            transpose(k, k_begin * k_token + h * k_head, k_token, length, dim, keys, width)
            i = U(0)
            while i < queries:
                rows, place = min(FOUR, queries - i), shift + i
                columns = min(length, place + rows) if causal else length
                find_scores(
                    s, width, q, (q_begin + i) * q_token + h * q_head, q_token, keys, scale, causal, bias,
                    bias_strides, b, h, place, rows, columns, dim,
                )  # fmt: skip
                for r in range(rows):
                    at = r * width
                    highest = HIDDEN
                    for j in range(columns):
                        if not s[at + j] <= highest:  # also where it is NaN
                            highest = s[at + j]
                    highest = F32(0.0) if highest == HIDDEN else highest
                    exponentials(s, at, columns, highest)
                    # by the keys that this row sees, whatever its neighbours in the four see
                    seen = min(place + r + ONE, columns) if causal else columns
                    # By `dot`, whose order of additions is a function of `seen` alone.
                    whole = dot(s, at, ones, U(0), seen)
                    # A row that sees no key has weights of 0 / 1.
                    whole = F32(1.0) if whole == 0 else whole
                    for j in range(columns):
                        s[at + j] /= whole
                    # Kept for backward, which makes the weights again: exp(s - most) / total.
                    kept_at = (q_begin + i + r) * heads + h
                    most[kept_at], total[kept_at] = highest, whole
                    # draws[3] is the threshold: 0 without dropout.
                    if draws[3]:
                        keep(kept, draws, samples, b, h, place + r, columns)
                        for j in range(columns):
                            s[at + j] *= kept[j]
                add_products(
                    out, (q_begin + i) * out_token + h * dim_v, out_token, s, U(0), width, ONE,
                    v, k_begin * v_token + h * v_head, v_token, rows, columns, dim_v,
                )  # fmt: skip
                i += FOUR


@njit(cache=True, nogil=True, error_model="numpy")
def backward(
    do, do_token, do_head, most, total, q, q_token, q_head, k, k_token, k_head, v, v_token, v_head,
    q_offsets, k_offsets, scale, causal, bias, bias_strides, draws, samples, dq, dk, dv, start,
    stop, heads, dim, dim_v, longest,
):  # fmt: skip
    """As `forward`; dq, dk and dv are contiguous and zero."""
    width = longest + U(16)
    keys, values = np.empty(dim * width, F32), np.empty(dim_v * width, F32)
    s, ds = np.empty(FOUR * width, F32), np.empty(FOUR * width, F32)
    kept = np.empty(width, F32)
    token, v_width = heads * dim, heads * dim_v
    for b in range(start, stop):
        q_begin, k_begin = U(q_offsets[b]), U(k_offsets[b])
        queries, length = U(q_offsets[b + 1]) - q_begin, U(k_offsets[b + 1]) - k_begin
        for h in range(heads):
            transpose(k, k_begin * k_token + h * k_head, k_token, length, dim, keys, width)
            transpose(v, k_begin * v_token + h * v_head, v_token, length, dim_v, values, width)
            i = U(0)
            while i < queries:
                rows = min(FOUR, queries - i)
                columns = min(length, i + rows) if causal else length
                q_first = (q_begin + i) * q_token + h * q_head
                do_first = (q_begin + i) * do_token + h * do_head
                find_scores(
                    s, width, q, q_first, q_token, keys, scale, causal, bias, bias_strides, b, h, i, rows,
                    columns, dim,
                )  # fmt: skip
                for r in range(rows):
                    ds[r * width : r * width + columns] = 0
                add_products(
                    ds, U(0), width, do, do_first, do_token, ONE, values, U(0), width, rows, dim_v, columns
                )
                for r in range(rows):
                    at = r * width
                    place = (q_begin + i + r) * heads + h
                    exponentials(s, at, columns, most[place])
                    if draws[3]:
                        keep(kept, draws, samples, b, h, i + r, columns)
                    else:
                        kept[:columns] = 1
                    for j in range(columns):
                        s[at + j] /= total[place]
                        ds[at + j] *= kept[j]
                    # not <do, out>, the same in real numbers: where one key has all the weight, this is its
                    # slope to the last bit, and the difference below is 0
                    along = dot(s, at, ds, at, min(i + r + ONE, columns) if causal else columns)
                    for j in range(columns):
                        ds[at + j] = s[at + j] * (ds[at + j] - along) * scale
                        s[at + j] *= kept[j]
                add_products(
                    dq, (q_begin + i) * token + h * dim, token, ds, U(0), width, ONE,
                    k, k_begin * k_token + h * k_head, k_token, rows, columns, dim,
                )  # fmt: skip
                add_products(
                    # ds transposed by its strides: a row for each key, and the four queries are the terms.
                    dk, k_begin * token + h * dim, token, ds, U(0), ONE, width, q, q_first, q_token, columns,
                    rows, dim,
                )  # fmt: skip
                add_products(
                    dv, k_begin * v_width + h * dim_v, v_width, s, U(0), ONE, width, do, do_first, do_token,
                    columns, rows, dim_v,
                )  # fmt: skip
                i += FOUR


def softmax_attention(
    q, k, v, *described, last: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out (M, H, E), and for each query and head its greatest score and the sum of exponentials, (M, H).

    Where they are the `last`, queries stand at the last places of their sequence's keys, of which there are
    as many or more. They get the bits that they have when all queries are given.
    """
    call = Call(*described)
    out = v.new_zeros(*q.shape[:2], v.shape[2])
    most, total = q.new_zeros(q.shape[:2]), q.new_ones(q.shape[:2])
    if most.numel() == 0 or k.shape[0] == 0:
        return out, most, total
    rest, sizes, cost = _plan(q, v, call)
    written = flat(out), flat(most), flat(total), last
    arguments = (*flat_heads(q), *flat_heads(k), *_heads(v), *rest, *written)
    over_ranges(
        lambda start, stop: forward(*arguments, U(start), U(stop), *sizes), len(call.q_offsets) - 1, cost
    )  # fmt: skip
    return out, most, total


def softmax_attention_backward(
    do, out, most, total, q, k, v, *described
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, contiguous."""
    call = Call(*described)
    dq, dk, dv = (tensor.new_zeros(tensor.shape) for tensor in (q, k, v))
    if most.numel() == 0 or k.shape[0] == 0:
        return dq, dk, dv
    rest, sizes, cost = _plan(q, v, call)
    arguments = (
        *_heads(do), flat(most), flat(total), *flat_heads(q), *flat_heads(k), *_heads(v), *rest,
        flat(dq), flat(dk), flat(dv),
    )  # fmt: skip
    over_ranges(
        lambda start, stop: backward(*arguments, U(start), U(stop), *sizes), len(call.q_offsets) - 1, 3 * cost
    )  # fmt: skip
    return dq, dk, dv


def _heads(tensor: torch.Tensor) -> tuple[np.ndarray, np.uintp, np.uintp]:
    return flat_heads(tensor if tensor.numel() else tensor.contiguous())


def _flat_bias(bias: torch.Tensor | None) -> tuple[np.ndarray, tuple[np.uintp, ...]]:
    """A flat view of the bias, whatever its strides, and the strides."""
    if bias is None or bias.numel() == 0:
        return NO_BIAS
    strides = bias.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(bias.shape, strides, strict=True))
    return bias.detach().as_strided((span,), (1,)).numpy(), tuple(map(U, strides))


def _plan(q: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[tuple, tuple[np.uintp, ...], float]:
    """Arguments that forward and backward share, sizes of the loops, and about how many operations."""
    q_offsets, k_offsets = flat_int64(call.q_offsets), flat_int64(call.k_offsets)
    k0, k1 = halves(call.seed)
    draws = (
        np.uint32(k0), np.uint32(k1), np.int64(DROPOUT), np.uint64(int(call.p * 2**32)),
        F32(1 / (1 - call.p)),
    )  # fmt: skip
    queries, keys = np.diff(q_offsets).astype(np.float64), np.diff(k_offsets).astype(np.float64)
    (_, heads, dim), dim_v = q.shape, v.shape[2]
    sizes = tuple(map(U, (heads, dim, dim_v, int(keys.max()))))
    rest = (
        q_offsets, k_offsets, F32(call.scale), call.causal, *_flat_bias(call.bias), draws,
        NO_IDS if call.sample_ids is None else flat_int64(call.sample_ids),
    )  # fmt: skip
    return rest, sizes, float((queries * keys).sum()) * heads * (2 * (dim + dim_v) + 20)
