"""Fused sparse updates on the CPU: one row at a time, columns vectorised.

Every element sees IEEE multiplications, additions, divisions and square roots in one written order, without
FMA (numba contracts nothing unless asked), so a vector width cannot change a bit. Scalars arrive as float32.
The numpy error model makes a division by zero an infinity, as in the reference, and keeps branches out of the
loop. Weight decay is a pass of its own before them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tritonrec.kernels.padding import first_valid
from tritonrec.kernels.row_layout import contiguous_rows, flat, flat_rows
from tritonrec.kernels.sparse_optimizers.rules import LANES, RULES, scalars

from ..caches import njit


def update(*arguments: Any, rule: str) -> None:
    """See `tritonrec.kernels.sparse_optimizers`."""
    weight, *states, indices, grad, lr, eps, beta1, beta2, weight_decay, step, count = arguments
    if grad.numel() == 0:
        return
    numbers, own = scalars(rule, lr, eps, beta1, beta2, weight_decay, step), RULES[rule].decay == "own"
    rows = first_valid(indices, count).contiguous().numpy()
    table, gradient, dim = flat_rows(weight), flat_rows(contiguous_rows(grad)), np.uintp(grad.shape[1])
    if numbers.l2 != 0 and not own:
        gradient = add_weights(table, rows, gradient, dim, numbers.l2), dim
    if numbers.decay != 1:
        scale_rows(table, rows, dim, numbers.decay)
    tables = (table, *(flat_rows(state) for state in states))
    ROWS[rule](tables, rows, gradient, dim, tuple(numbers) if own else numbers[:6])


@cache
def update_of_rows(function: Callable[..., None], boundscheck: bool = False) -> Callable[..., None]:
    """A user's update of one row (`RowOptimizer.custom`), over all rows of (R, dim + S)."""
    plain = getattr(function, "py_func", function)
    one = njit(nogil=True, error_model="numpy", boundscheck=boundscheck)(plain)

    @njit(nogil=True, error_model="numpy")
    def each(table, indices, gradient, dim, width, step, lr):
        (rows, stride), (grad, grad_stride) = table, gradient
        for i in range(indices.shape[0]):
            row, g = np.uintp(indices[i]) * stride, np.uintp(i) * grad_stride
            one(rows[row : row + dim], rows[row + dim : row + width], grad[g : g + dim], step, lr)

    def update(rows, indices, gradient, step, lr, count) -> None:
        (_, width), dim = rows.shape, gradient.shape[1]
        places = first_valid(indices, count).contiguous().numpy()
        tables = flat_rows(rows), places, flat_rows(contiguous_rows(gradient))
        each(*tables, np.uintp(dim), np.uintp(width), np.int64(step), np.float32(lr))

    return update


def lazy_decay(weight, last_update, indices, factors, step, count) -> None:
    """See `tritonrec.ops.sparse_lazy_decay`."""
    if weight.shape[1]:
        tables = flat_rows(weight), flat_rows(last_update)
        rows = first_valid(indices, count).contiguous().numpy()
        decay_rows(tables, rows, flat(factors), np.int64(step), np.uintp(weight.shape[1]))


@njit(cache=True, nogil=True, error_model="numpy")
def sum_of_squares(grad, first, dim, lanes):
    """Of one row: lane j adds columns j, j + 16, ...; then halves are added to halves."""
    for j in range(LANES):
        lanes[j] = np.float32(0)
    whole = dim - dim % np.uintp(LANES)
    for start in range(np.uintp(0), whole, np.uintp(LANES)):
        for j in range(np.uintp(LANES)):
            value = grad[first + start + j]
            lanes[j] += value * value
    for j in range(dim - whole):
        value = grad[first + whole + j]
        lanes[j] += value * value
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[j] += lanes[j + half]
        half //= 2
    return lanes[0]


@njit(cache=True, nogil=True, error_model="numpy")
def mean_square(grad, first, dim, lanes):
    return sum_of_squares(grad, first, dim, lanes) / np.float32(dim)


@njit(cache=True, nogil=True, error_model="numpy")
def norm(row, first, dim, lanes):
    return np.float32(np.sqrt(sum_of_squares(row, first, dim, lanes)))


@njit(cache=True, nogil=True, error_model="numpy")
def add_weights(table, indices, gradient, dim, l2):
    """The gradient with L2 decay, in an array of its own."""
    (weight, weight_stride), (grad, grad_stride) = table, gradient
    decayed = np.empty(indices.shape[0] * dim, np.float32)
    for i in range(indices.shape[0]):
        w, g, to = np.uintp(indices[i]) * weight_stride, np.uintp(i) * grad_stride, np.uintp(i) * dim
        for d in range(dim):
            decayed[to + d] = grad[g + d] + l2 * weight[w + d]
    return decayed


@njit(cache=True, nogil=True, error_model="numpy")
def scale_rows(table, indices, dim, decay):
    """Decoupled decay."""
    weight, weight_stride = table
    for i in range(indices.shape[0]):
        w = np.uintp(indices[i]) * weight_stride
        for d in range(dim):
            weight[w + d] *= decay


@njit(cache=True, nogil=True, error_model="numpy")
def sgd(tables, indices, gradient, dim, numbers):
    ((weight, weight_stride),) = tables
    grad, grad_stride = gradient
    rate, _, _, _, _, _ = numbers
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, g = row * weight_stride, np.uintp(i) * grad_stride
        for d in range(dim):
            weight[w + d] -= rate * grad[g + d]


@njit(cache=True, nogil=True, error_model="numpy")
def momentum_sgd(tables, indices, gradient, dim, numbers):
    (weight, weight_stride), (first, first_stride) = tables
    grad, grad_stride = gradient
    rate, _, beta1, _, _, _ = numbers
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, m, g = row * weight_stride, row * first_stride, np.uintp(i) * grad_stride
        for d in range(dim):
            moment = beta1 * first[m + d] + grad[g + d]
            first[m + d] = moment
            weight[w + d] -= rate * moment


@njit(cache=True, nogil=True, error_model="numpy")
def nesterov_sgd(tables, indices, gradient, dim, numbers):
    (weight, weight_stride), (first, first_stride) = tables
    grad, grad_stride = gradient
    rate, _, beta1, _, _, _ = numbers
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, m, g = row * weight_stride, row * first_stride, np.uintp(i) * grad_stride
        for d in range(dim):
            moment = beta1 * first[m + d] + grad[g + d]
            first[m + d] = moment
            weight[w + d] -= rate * (grad[g + d] + beta1 * moment)


@njit(cache=True, nogil=True, error_model="numpy")
def adagrad(tables, indices, gradient, dim, numbers):
    (weight, weight_stride), (second, second_stride) = tables
    grad, grad_stride = gradient
    rate, eps, _, _, _, _ = numbers
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, v, g = row * weight_stride, row * second_stride, np.uintp(i) * grad_stride
        for d in range(dim):
            total = second[v + d] + grad[g + d] * grad[g + d]
            second[v + d] = total
            weight[w + d] -= (rate * grad[g + d]) / (np.float32(np.sqrt(total)) + eps)


@njit(cache=True, nogil=True, error_model="numpy")
def rowwise_adagrad(tables, indices, gradient, dim, numbers):
    (weight, weight_stride), (second, second_stride) = tables
    grad, grad_stride = gradient
    rate, eps, _, _, _, _ = numbers
    lanes = np.empty(LANES, np.float32)
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, v, g = row * weight_stride, row * second_stride, np.uintp(i) * grad_stride
        total = second[v] + mean_square(grad, g, dim, lanes)
        second[v] = total
        step = rate / (np.float32(np.sqrt(total)) + eps)
        for d in range(dim):
            weight[w + d] -= step * grad[g + d]


@njit(cache=True, nogil=True, error_model="numpy")
def adam(tables, indices, gradient, dim, numbers):
    (weight, weight_stride), (first, first_stride), (second, second_stride) = tables
    grad, grad_stride = gradient
    rate, eps, beta1, rest1, beta2, rest2 = numbers
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, m, v, g = row * weight_stride, row * first_stride, row * second_stride, np.uintp(i) * grad_stride
        for d in range(dim):
            value = grad[g + d]
            mean = beta1 * first[m + d] + rest1 * value
            square = beta2 * second[v + d] + rest2 * (value * value)
            first[m + d] = mean
            second[v + d] = square
            weight[w + d] -= (rate * mean) / (np.float32(np.sqrt(square)) + eps)


@njit(cache=True, nogil=True, error_model="numpy")
def rowwise_adam(tables, indices, gradient, dim, numbers):
    (weight, weight_stride), (first, first_stride), (second, second_stride) = tables
    grad, grad_stride = gradient
    rate, eps, beta1, rest1, beta2, rest2 = numbers
    lanes = np.empty(LANES, np.float32)
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, m, v, g = row * weight_stride, row * first_stride, row * second_stride, np.uintp(i) * grad_stride
        square = beta2 * second[v] + rest2 * mean_square(grad, g, dim, lanes)
        second[v] = square
        divisor = np.float32(np.sqrt(square)) + eps
        for d in range(dim):
            mean = beta1 * first[m + d] + rest1 * grad[g + d]
            first[m + d] = mean
            weight[w + d] -= (rate * mean) / divisor


@njit(cache=True, nogil=True, error_model="numpy")
def lamb(tables, indices, gradient, dim, numbers):
    (weight, weight_stride), (first, first_stride), (second, second_stride) = tables
    grad, grad_stride = gradient
    rate, eps, beta1, rest1, beta2, rest2, decay, _, scale = numbers
    lanes, change = np.empty(LANES, np.float32), np.empty(dim, np.float32)
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, m, v, g = row * weight_stride, row * first_stride, row * second_stride, np.uintp(i) * grad_stride
        for d in range(dim):
            value = grad[g + d]
            mean = beta1 * first[m + d] + rest1 * value
            square = beta2 * second[v + d] + rest2 * (value * value)
            first[m + d] = mean
            second[v + d] = square
            change[d] = (scale * mean) / (np.float32(np.sqrt(square)) + eps) + decay * weight[w + d]
        apply_trusted(weight, w, change, dim, rate, lanes)


@njit(cache=True, nogil=True, error_model="numpy")
def rowwise_lamb(tables, indices, gradient, dim, numbers):
    (weight, weight_stride), (first, first_stride), (second, second_stride) = tables
    grad, grad_stride = gradient
    rate, eps, beta1, rest1, beta2, rest2, decay, _, scale = numbers
    lanes, change = np.empty(LANES, np.float32), np.empty(dim, np.float32)
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, m, v, g = row * weight_stride, row * first_stride, row * second_stride, np.uintp(i) * grad_stride
        square = beta2 * second[v] + rest2 * mean_square(grad, g, dim, lanes)
        second[v] = square
        divisor = np.float32(np.sqrt(square)) + eps
        for d in range(dim):
            mean = beta1 * first[m + d] + rest1 * grad[g + d]
            first[m + d] = mean
            change[d] = (scale * mean) / divisor + decay * weight[w + d]
        apply_trusted(weight, w, change, dim, rate, lanes)


@njit(cache=True, nogil=True, error_model="numpy")
def apply_trusted(weight, w, change, dim, rate, lanes):
    """The change of a row, made as long as the row itself."""
    of_weight = norm(weight, w, dim, lanes)
    of_change = norm(change, np.uintp(0), dim, lanes)
    if of_weight != 0 and of_change != 0:
        rate = rate * (of_weight / of_change)
    for d in range(dim):
        weight[w + d] -= rate * change[d]


@njit(cache=True, nogil=True, error_model="numpy")
def lars_sgd(tables, indices, gradient, dim, numbers):
    (weight, weight_stride), (first, first_stride) = tables
    grad, grad_stride = gradient
    rate, _, beta1, _, _, _, decay, _, scale = numbers
    lanes = np.empty(LANES, np.float32)
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, m, g = row * weight_stride, row * first_stride, np.uintp(i) * grad_stride
        of_weight, of_gradient = norm(weight, w, dim, lanes), norm(grad, g, dim, lanes)
        step = rate
        if of_weight != 0 and of_gradient != 0:
            step = (scale * of_weight) / (of_gradient + decay * of_weight)
        for d in range(dim):
            moment = beta1 * first[m + d] + step * (grad[g + d] + decay * weight[w + d])
            first[m + d] = moment
            weight[w + d] -= moment


@njit(cache=True, nogil=True, error_model="numpy")
def ftrl(tables, indices, gradient, dim, numbers):
    (weight, weight_stride), (first, first_stride), (second, second_stride) = tables
    grad, grad_stride = gradient
    rate, eps, l1, _, _, _, decay, _, _ = numbers
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, z, v, g = row * weight_stride, row * first_stride, row * second_stride, np.uintp(i) * grad_stride
        for d in range(dim):
            total = second[v + d] + grad[g + d] * grad[g + d]
            root = np.float32(np.sqrt(total))
            change = (root - np.float32(np.sqrt(second[v + d]))) / rate
            linear = (first[z + d] + grad[g + d]) - change * weight[w + d]
            first[z + d] = linear
            second[v + d] = total
            clipped = l1 if linear > l1 else (-l1 if linear < -l1 else linear)
            weight[w + d] = (clipped - linear) / ((eps + root) / rate + decay)


@njit(cache=True, nogil=True, error_model="numpy")
def decay_rows(tables, indices, factors, step, dim):
    (weight, weight_stride), (last_update, last_update_stride) = tables
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, at = row * weight_stride, row * last_update_stride
        last = last_update[at]
        done = step - 1
        if last >= 1:
            done = min(np.int64(min(last, np.float32(step))), step)
        # columns inside, so that a row stays in the nearest cache and its columns vectorise
        for update in range(done, step):
            factor = factors[update]
            for d in range(dim):
                weight[w + d] *= factor
        last_update[at] = np.float32(step)


ROWS = {
    "sgd": sgd,
    "momentum_sgd": momentum_sgd,
    "nesterov_sgd": nesterov_sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
    "adamw": adam,
    "rowwise_adagradw": rowwise_adagrad,
    "rowwise_adam": rowwise_adam,
    "lamb": lamb,
    "rowwise_lamb": rowwise_lamb,
    "lars_sgd": lars_sgd,
    "ftrl": ftrl,
}
"""The loop of each rule, over (flat rows, row stride) of weight and states."""
