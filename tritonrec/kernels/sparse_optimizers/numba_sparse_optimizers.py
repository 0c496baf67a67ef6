"""Fused sparse updates on the CPU: one row at a time, columns vectorised.

Every element sees IEEE multiplications, additions, divisions and square roots in one written order, without
FMA (numba contracts nothing unless asked), so a vector width cannot change a bit. Scalars arrive as float32.
The numpy error model makes a division by zero an infinity, as in the reference, and keeps branches out of the
loop. Weight decay is a pass of its own before them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tritonrec.kernels.padding import first_valid
from tritonrec.kernels.row_layout import contiguous_rows, flat, flat_rows
from tritonrec.kernels.sparse_optimizers.op import LANES, scalars

from ..caches import njit


def update(*arguments: Any, rule: str) -> None:
    """See `tritonrec.kernels.sparse_optimizers`."""
    weight, *states, indices, grad, lr, eps, beta1, beta2, weight_decay, step, count = arguments
    if grad.numel() == 0:
        return
    numbers = scalars(rule, lr, eps, beta1, beta2, weight_decay, step)
    rows = first_valid(indices, count).contiguous().numpy()
    table, gradient, dim = flat_rows(weight), flat_rows(contiguous_rows(grad)), np.uintp(grad.shape[1])
    if numbers.l2 != 0:
        gradient = add_weights(table, rows, gradient, dim, numbers.l2), dim
    if numbers.decay != 1:
        scale_rows(table, rows, dim, numbers.decay)
    tables = (table, *(flat_rows(state) for state in states))
    ROWS[rule](tables, rows, gradient, dim, numbers[:6])


def lazy_decay(
    weight: torch.Tensor,
    last_update: torch.Tensor,
    indices: torch.Tensor,
    factors: torch.Tensor,
    step: int,
    count: torch.Tensor | None,
) -> None:
    """See `tritonrec.kernels.sparse_optimizers.sparse_lazy_decay`."""
    if weight.shape[1]:
        tables = flat_rows(weight), flat_rows(last_update)
        rows = first_valid(indices, count).contiguous().numpy()
        decay_rows(tables, rows, flat(factors), np.int64(step), np.uintp(weight.shape[1]))


@njit(cache=True, nogil=True, error_model="numpy")
def mean_square(grad, first, dim, lanes):
    """Mean of squares of one row: lane j adds columns j, j + 16, ...; then halves are added to halves."""
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
    return lanes[0] / np.float32(dim)


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
    "rowwise_adam": rowwise_adam,
}
"""The loop of each rule, over (flat rows, row stride) of weight and states."""
