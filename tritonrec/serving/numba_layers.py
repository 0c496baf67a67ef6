# mypy: ignore-errors
"""All layers of an HSTU or a SASRec for new tokens over stored keys and values, in one call of the CPU.

Op by op, a user with a few new events costs the way through Python and torch, not the arithmetic. Here users
pass through all layers a chunk at a time. The loops are those of the ops, so the bits are theirs; keys and
values are read where they lie, unless a user's pages do not follow each other.

Dimensions: B users, M new tokens, L tokens, d model dimension.
"""

import numpy as np

from tritonrec.kernels.caches import njit
from tritonrec.kernels.hstu_attention import numba_attention as hstu_attention
from tritonrec.kernels.linear.numba_linear import rows_times
from tritonrec.kernels.norm_linear_silu import numba_norm_linear_silu as front
from tritonrec.kernels.norm_mul_dropout import numba_norm as norm
from tritonrec.kernels.softmax_attention import numba_softmax_attention as softmax_attention

F32 = np.float32
I = np.int64
U = np.uintp
CHUNK = 256  # new tokens that pass through the layers together, unless one user has more
NO_DROPOUT = front.NO_DROPOUT
NO_STRIDES = (U(0),) * 4


@njit(cache=True, nogil=True)
def _chunk_end(fresh, start, stop):
    end = start + 1
    while end < stop and fresh[end + 1] - fresh[start] <= CHUNK:
        end += 1
    return end


@njit(cache=True, nogil=True)
def _of(weights, at, number):
    """Part n of what lies behind each other, at [at[n, 0], at[n, 1])."""
    return weights[at[number, 0] : at[number, 1]]


@njit(cache=True, nogil=True)
def _place(x, rows, scale, positions, users, dim, first, last):
    """The first layer's input of users [first, last): rows * scale + positions."""
    fresh, known = users[0], users[1]
    for b in range(first, last):
        for t in range(fresh[b], fresh[b + 1]):
            to, row = U(t - fresh[first]) * dim, U(t) * dim
            at = U(known[b] + t - fresh[b]) * dim
            for d in range(dim):
                x[to + d] = rows[row + d] * scale + positions[at + d]


@njit(cache=True, nogil=True)
def _keep(z, columns, of_keys, keys, of_values, values, store, users, first, last):
    """Store keys and values, from these columns of z on; whether all are finite."""
    fresh, offsets, places = users[0], users[2], users[3]
    finite = True
    for b in range(first, last):
        count = fresh[b + 1] - fresh[b]
        for t in range(count):
            row, of = places[offsets[b + 1] - count + t], U(fresh[b] - fresh[first] + t) * columns
            for c in range(keys):
                store[row, c] = z[of + of_keys + c]
            for c in range(values):
                store[row, keys + c] = z[of + of_values + c]
            for c in range(keys + values):
                finite &= store[row, c] - store[row, c] == F32(0.0)
    return finite


@njit(cache=True, nogil=True)
def _stored(store, places, width, some):
    """A user's keys and values, token by token: a view where they follow each other, otherwise a copy."""
    count, following = places.shape[0], True
    for t in range(count):
        following &= places[t] == places[0] + t
    if following:
        return store[places[0] : places[0] + count].reshape(-1)
    for t in range(count):
        for c in range(width):
            some[U(t) * width + c] = store[places[t], c]
    return some


@njit(cache=True, nogil=True)
def _take_last(x, dim, z, columns, fresh, first, last):
    """Of each user the row of the last token alone: nobody reads the others of the last layer."""
    for b in range(first, last):
        of, to = U(fresh[b + 1] - 1 - fresh[first]), U(b - first)
        for d in range(dim):
            x[to * dim + d] = x[of * dim + d]
        for c in range(columns):
            z[to * columns + c] = z[of * columns + c]


@njit(cache=True, nogil=True)
def _norm(x, weight, bias, eps, out, rows, dim):
    none, no_ids, moments = np.empty(0, F32), np.empty(0, np.int64), np.empty(rows, F32)
    norm.forward(
        x, dim, none, U(0), weight, bias, eps, NO_DROPOUT, no_ids, no_ids, out, moments, moments, U(0), rows,
        dim,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _add_product(x, y, y_width, weight, bias, some, rows, dim):
    """x += y @ weight + bias, as an op and a sum."""
    rows_times(y, y_width, weight, bias, some, U(0), rows, y_width, dim)
    for i in range(rows * dim):
        x[i] = x[i] + some[i]


@njit(cache=True, nogil=True)
def hstu(layers, at, shared, shared_at, sizes, numbers, rows, users, store, out, start, stop):
    """Vectors of users [start, stop), in `out`; keys and values of their new tokens, in `store`.

    False where one of these is not finite.

    Args:
        layers: (layers, size), of each layer norm, uvqk, gate and output, each weight and bias, then weights
            of positions and times, part n at [at[n, 0], at[n, 1]). shared: positions, and weight and bias of
            the last norm, at `shared_at`. Weights of products as `rows_times` reads them.
        sizes: d, heads, qk_dim, v_dim. numbers: eps of a layer's norm, of its gate and of the last norm,
            alpha and scale of attention, scale of rows. rows: (M * d,), of the new tokens.
        users: offsets (B + 1,) of the new tokens, tokens that are stored (B,), offsets (B + 1,) of all, and
            their places in the store and times (L,), int64. store: (layers, places, keys and values), or
            (1, ...) where nothing has to stay in it: layers write over each other.
        out: (B * d,).
    """
    dim, heads, qk, v_dim = sizes
    fresh, _, offsets, places, times = users
    values, keys = heads * v_dim, heads * qk
    columns, width = U(2) * (values + keys), keys + values
    timed, no_times, none = at[9, 1] > at[9, 0], np.empty(0, np.int64), np.empty(0, F32)
    mask, zeros, sign = np.zeros(4, np.int64), np.zeros(1, np.int64), I(-1) if at[8, 1] > at[8, 0] else I(0)
    mask[0] = 1
    scales = np.full(1, numbers[4], F32)
    tokens, queries = np.zeros(2, np.int64), np.zeros(2, np.int64)
    b = start
    while b < stop:
        e = _chunk_end(fresh, b, stop)
        count, longest = U(fresh[e] - fresh[b]), (offsets[b + 1 : e + 1] - offsets[b:e]).max()
        x, uvqk, some = np.empty(count * dim, F32), np.empty(count * columns, F32), np.empty(count * dim, F32)
        attended, gated = np.empty(count * values, F32), np.empty(count * values, F32)
        moments, copied, asked = np.empty(count, F32), np.empty(U(longest) * width, F32), np.empty(longest, I)
        _place(x, rows, numbers[5], _of(shared, shared_at, 0), users, dim, b, e)
        for layer in range(layers.shape[0]):
            own, last = layers[layer], layer == layers.shape[0] - 1
            stored = store[layer % store.shape[0]]
            front.forward(
                x, dim, _of(own, at, 0), _of(own, at, 1), numbers[0], _of(own, at, 2), _of(own, at, 3), uvqk,
                none, none, moments, moments, U(0), count, dim, columns,
            )  # fmt: skip
            # | u: values | v: values | q: keys | k: keys |
            of_q, of_k = U(2) * values, U(2) * values + keys
            if not _keep(uvqk, columns, of_k, keys, values, values, stored, users, b, e):
                return False
            if last:
                _take_last(x, dim, uvqk, columns, fresh, b, e)
                count = U(e - b)
            for i in range(count * values):
                attended[i] = F32(0.0)
            for user in range(b, e):
                first, stop_at = offsets[user], offsets[user + 1]
                row = U(user - b) if last else U(fresh[user] - fresh[b])
                tokens[1] = stop_at - first
                queries[1] = 1 if last else fresh[user + 1] - fresh[user]
                kv = _stored(stored, places[first:stop_at], width, copied)
                when, asks = no_times, no_times
                if timed:  # at the time of the next token, the last one at its own
                    when, asks = times[first:stop_at], asked[: tokens[1]]
                    for t in range(tokens[1]):
                        asks[t] = when[min(t + 1, tokens[1] - 1)]
                hstu_attention.forward(
                    uvqk[row * columns + of_q :], columns, qk, kv, width, qk, kv[keys:], width, v_dim, tokens,
                    queries, zeros, zeros, mask, scales, U(0), numbers[3], _of(own, at, 8), I(0), sign,
                    _of(own, at, 9), asks, when, F32(1.0), attended[row * values :], values, v_dim, U(0),
                    U(1), heads, qk, v_dim, U(tokens[1]),
                )  # fmt: skip
            norm.forward(
                attended, values, uvqk, columns, _of(own, at, 4), _of(own, at, 5), numbers[1], NO_DROPOUT,
                no_times, no_times, gated, moments, moments, U(0), count, values,
            )  # fmt: skip
            _add_product(x, gated, values, _of(own, at, 6), _of(own, at, 7), some, count, dim)
        _norm(
            x, _of(shared, shared_at, 1), _of(shared, shared_at, 2), numbers[2], out[U(b) * dim :], count, dim
        )
        b = e
    return True


@njit(cache=True, nogil=True)
def sasrec(layers, at, shared, shared_at, sizes, numbers, rows, users, store, out, start, stop):
    """As `hstu`, of layers with norm, qkv, output, ffn_norm, inner and outer, each weight and bias.

    sizes: d, heads, qk_dim, v_dim, width of inner. numbers: eps of both norms of a layer and of the last one,
    scale of attention, scale of rows.
    """
    dim, heads, qk, v_dim, inner = sizes
    fresh, _, offsets, places, _ = users
    values, keys = heads * v_dim, heads * qk
    columns, width = U(2) * keys + values, keys + values
    none, no_ids = np.empty(0, F32), np.empty(0, np.int64)
    tokens, queries = np.zeros(2, np.int64), np.zeros(2, np.int64)
    b = start
    while b < stop:
        e = _chunk_end(fresh, b, stop)
        count, longest = U(fresh[e] - fresh[b]), (offsets[b + 1 : e + 1] - offsets[b:e]).max()
        x, qkv, some = np.empty(count * dim, F32), np.empty(count * columns, F32), np.empty(count * dim, F32)
        attended, fed = np.empty(count * values, F32), np.empty(count * inner, F32)
        moments, copied = np.empty(count * heads, F32), np.empty(U(longest) * width, F32)
        _place(x, rows, numbers[4], _of(shared, shared_at, 0), users, dim, b, e)
        for layer in range(layers.shape[0]):
            own, last = layers[layer], layer == layers.shape[0] - 1
            stored = store[layer % store.shape[0]]
            _norm(x, _of(own, at, 0), _of(own, at, 1), numbers[0], some, count, dim)
            rows_times(some, dim, _of(own, at, 2), _of(own, at, 3), qkv, U(0), count, dim, columns)
            # | q: keys | k: keys | v: values |
            if not _keep(qkv, columns, keys, keys, U(2) * keys, values, stored, users, b, e):
                return False
            if last:
                _take_last(x, dim, qkv, columns, fresh, b, e)
                count = U(e - b)
            for i in range(count * values):
                attended[i] = F32(0.0)
            for user in range(b, e):
                first, stop_at = offsets[user], offsets[user + 1]
                row = U(user - b) if last else U(fresh[user] - fresh[b])
                tokens[1] = stop_at - first
                queries[1] = 1 if last else fresh[user + 1] - fresh[user]
                kv = _stored(stored, places[first:stop_at], width, copied)
                softmax_attention.forward(
                    qkv[row * columns :], columns, qk, kv, width, qk, kv[keys:], width, v_dim, queries,
                    tokens, numbers[3], True, none, NO_STRIDES, NO_DROPOUT, no_ids, attended[row * values :],
                    moments, moments, True, U(0), U(1), heads, qk, v_dim, U(tokens[1]),
                )  # fmt: skip
            _add_product(x, attended, values, _of(own, at, 4), _of(own, at, 5), some, count, dim)
            _norm(x, _of(own, at, 6), _of(own, at, 7), numbers[1], some, count, dim)
            rows_times(some, dim, _of(own, at, 8), _of(own, at, 9), fed, U(0), count, dim, inner)
            for i in range(count * inner):
                fed[i] = F32(0.0) if fed[i] < F32(0.0) else fed[i]  # as torch, which keeps -0 and NaN
            _add_product(x, fed, inner, _of(own, at, 10), _of(own, at, 11), some, count, dim)
        _norm(
            x, _of(shared, shared_at, 1), _of(shared, shared_at, 2), numbers[2], out[U(b) * dim :], count, dim
        )
        b = e
    return True
