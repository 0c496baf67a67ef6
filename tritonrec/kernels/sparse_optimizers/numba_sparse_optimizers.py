"""Fused sparse updates on the CPU: one row at a time, columns vectorised.

Every element sees IEEE multiplications, additions, divisions and square roots in one written order, without
FMA (numba contracts nothing unless asked), so a vector width cannot change a bit. Scalars arrive as float32.
The numpy error model makes a division by zero an infinity, as in the reference, and keeps branches out of the
loop. A state that a rule lacks is passed as an empty array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tritonrec.kernels.padding import first_valid
from tritonrec.kernels.row_layout import contiguous_rows, flat, flat_rows
from tritonrec.kernels.sparse_optimizers.reference import LANES, scalars

from ..caches import njit

SGD, MOMENTUM, NESTEROV, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM = range(7)
KINDS = {
    "sgd": SGD, "momentum_sgd": MOMENTUM, "nesterov_sgd": NESTEROV, "adagrad": ADAGRAD,
    "rowwise_adagrad": ROWWISE_ADAGRAD, "adam": ADAM, "adamw": ADAM, "rowwise_adam": ROWWISE_ADAM,
}  # fmt: skip
NOTHING = np.empty(0, np.float32), np.uintp(0)


def update(*arguments: Any, rule: str) -> None:
    """See `tritonrec.kernels.sparse_optimizers`."""
    weight, *states, indices, grad, lr, eps, beta1, beta2, weight_decay, step, count = arguments
    if grad.numel() == 0:
        return
    given = [flat_rows(state) for state in states]
    if rule.endswith("adagrad"):  # whose state is a second moment
        given.insert(0, NOTHING)
    first, second, *_ = (*given, NOTHING, NOTHING)
    rows = first_valid(indices, count).contiguous().numpy()
    update_rows(
        KINDS[rule], *flat_rows(weight), *first, *second, rows, *flat_rows(contiguous_rows(grad)),
        np.uintp(grad.shape[1]), *scalars(rule, lr, eps, beta1, beta2, weight_decay, step),
    )  # fmt: skip


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
        rows, tables = first_valid(indices, count).contiguous().numpy(), (weight, last_update)
        parts = [part for table in tables for part in flat_rows(table)]
        decay_rows(*parts, rows, flat(factors), np.int64(step), np.uintp(weight.shape[1]))


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
def update_rows(
    kind,
    weight,
    weight_stride,
    first,
    first_stride,
    second,
    second_stride,
    indices,
    grad,
    grad_stride,
    dim,
    rate,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
    l2,
    decay,
):
    lanes, decayed = np.empty(LANES, np.float32), np.empty(dim, np.float32)
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w, m, v = row * weight_stride, row * first_stride, row * second_stride
        values, g = grad, np.uintp(i) * grad_stride
        if l2 != 0:
            for d in range(dim):
                decayed[d] = grad[g + d] + l2 * weight[w + d]
            values, g = decayed, np.uintp(0)
        if decay != 1:
            for d in range(dim):
                weight[w + d] *= decay
        if kind == SGD:
            for d in range(dim):
                weight[w + d] -= rate * values[g + d]
        elif kind == MOMENTUM:
            for d in range(dim):
                moment = beta1 * first[m + d] + values[g + d]
                first[m + d] = moment
                weight[w + d] -= rate * moment
        elif kind == NESTEROV:
            for d in range(dim):
                gradient = values[g + d]
                moment = beta1 * first[m + d] + gradient
                first[m + d] = moment
                weight[w + d] -= rate * (gradient + beta1 * moment)
        elif kind == ADAGRAD:
            for d in range(dim):
                gradient = values[g + d]
                total = second[v + d] + gradient * gradient
                second[v + d] = total
                weight[w + d] -= (rate * gradient) / (np.float32(np.sqrt(total)) + eps)
        elif kind == ROWWISE_ADAGRAD:
            total = second[v] + mean_square(values, g, dim, lanes)
            second[v] = total
            step = rate / (np.float32(np.sqrt(total)) + eps)
            for d in range(dim):
                weight[w + d] -= step * values[g + d]
        elif kind == ADAM:
            for d in range(dim):
                gradient = values[g + d]
                mean = beta1 * first[m + d] + rest1 * gradient
                square = beta2 * second[v + d] + rest2 * (gradient * gradient)
                first[m + d] = mean
                second[v + d] = square
                weight[w + d] -= (rate * mean) / (np.float32(np.sqrt(square)) + eps)
        else:
            square = beta2 * second[v] + rest2 * mean_square(values, g, dim, lanes)
            second[v] = square
            divisor = np.float32(np.sqrt(square)) + eps
            for d in range(dim):
                mean = beta1 * first[m + d] + rest1 * values[g + d]
                first[m + d] = mean
                weight[w + d] -= (rate * mean) / divisor


@njit(cache=True, nogil=True, error_model="numpy")
def decay_rows(weight, weight_stride, last_update, last_update_stride, indices, factors, step, dim):
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
