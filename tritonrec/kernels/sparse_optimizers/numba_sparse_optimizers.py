"""Fused sparse updates on the CPU: one row at a time, columns vectorised.

Every element sees IEEE multiplications, additions, divisions and square roots in one written order, without
FMA (numba contracts nothing unless asked), so a vector width cannot change a bit. Scalars arrive as float32.
The numpy error model makes a division by zero an infinity, as in the reference, and keeps branches out of the
loop.
"""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.padding import first_valid
from tritonrec.kernels.row_layout import contiguous_rows, flat_rows
from tritonrec.kernels.sparse_optimizers.reference import LANES, adam_scalars

from ..caches import njit


def _gradients(indices: torch.Tensor, grad: torch.Tensor, count: torch.Tensor | None) -> tuple:
    """The valid indices, and the rows of the gradient as the kernels take them."""
    rows = first_valid(indices, count).contiguous().numpy()
    return rows, *flat_rows(contiguous_rows(grad)), np.uintp(grad.shape[1])


def sparse_sgd(
    weight: torch.Tensor, indices: torch.Tensor, grad: torch.Tensor, lr: float, count: torch.Tensor | None
) -> None:
    """See `tritonrec.kernels.sparse_optimizers.sparse_sgd`."""
    if grad.numel():
        sgd(*flat_rows(weight), *_gradients(indices, grad, count), np.float32(lr))


def sparse_rowwise_adagrad(
    weight: torch.Tensor,
    state: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    eps: float,
    count: torch.Tensor | None,
) -> None:
    """See `tritonrec.kernels.sparse_optimizers.sparse_rowwise_adagrad`."""
    if grad.numel():
        tables, scalars = (*flat_rows(weight), *flat_rows(state)), (np.float32(lr), np.float32(eps))
        rowwise_adagrad(*tables, *_gradients(indices, grad, count), *scalars)


def sparse_adam(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    count: torch.Tensor | None,
) -> None:
    """See `tritonrec.kernels.sparse_optimizers.sparse_adam`."""
    if grad.numel():
        tables = [part for table in (weight, exp_avg, exp_avg_sq) for part in flat_rows(table)]
        scalars = adam_scalars(lr, beta1, beta2, eps, step)
        adam(*tables, *_gradients(indices, grad, count), *scalars)


@njit(cache=True, nogil=True, error_model="numpy")
def sgd(weight, weight_stride, indices, grad, grad_stride, dim, lr):
    for i in range(indices.shape[0]):
        w = np.uintp(indices[i]) * weight_stride
        g = np.uintp(i) * grad_stride
        for d in range(dim):
            weight[w + d] -= lr * grad[g + d]


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
def rowwise_adagrad(weight, weight_stride, state, state_stride, indices, grad, grad_stride, dim, lr, eps):
    lanes = np.empty(LANES, np.float32)
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w = row * weight_stride
        g = np.uintp(i) * grad_stride
        total = state[row * state_stride] + mean_square(grad, g, dim, lanes)
        state[row * state_stride] = total
        step = lr / (np.float32(np.sqrt(total)) + eps)
        for d in range(dim):
            weight[w + d] -= step * grad[g + d]


@njit(cache=True, nogil=True, error_model="numpy")
def adam(
    weight,
    weight_stride,
    exp_avg,
    exp_avg_stride,
    exp_avg_sq,
    exp_avg_sq_stride,
    indices,
    grad,
    grad_stride,
    dim,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    step_size,
):
    for i in range(indices.shape[0]):
        row = np.uintp(indices[i])
        w = row * weight_stride
        m = row * exp_avg_stride
        v = row * exp_avg_sq_stride
        g = np.uintp(i) * grad_stride
        for d in range(dim):
            gradient = grad[g + d]
            mean = beta1 * exp_avg[m + d] + rest1 * gradient
            square = beta2 * exp_avg_sq[v + d] + rest2 * (gradient * gradient)
            exp_avg[m + d] = mean
            exp_avg_sq[v + d] = square
            weight[w + d] -= (step_size * mean) / (np.float32(np.sqrt(square)) + eps)
