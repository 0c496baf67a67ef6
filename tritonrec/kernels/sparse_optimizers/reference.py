"""The updates in numpy float32, one row at a time, one rounding per written operation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from tritonrec.kernels.padding import first_valid

LANES = 16


def mean_square(row: np.ndarray) -> np.float32:
    """Mean of squares: lane j adds columns j, j + 16, ...; then halves are added to halves."""
    lanes = np.zeros(LANES, np.float32)
    for column, value in enumerate(row):
        lanes[column % LANES] += value * value
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0] / np.float32(len(row))


def adam_scalars(lr: float, beta1: float, beta2: float, eps: float, step: int) -> tuple[np.float32, ...]:
    """beta1, 1 - beta1, beta2, 1 - beta2, eps and the step size with its bias correction, as float32."""
    step_size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return tuple(np.float32(x) for x in (beta1, 1 - beta1, beta2, 1 - beta2, eps, step_size))


def _updates(
    indices: torch.Tensor, grad: torch.Tensor, count: torch.Tensor | None, *tables: torch.Tensor
) -> Iterator[tuple[np.ndarray, ...]]:
    """For each valid index its gradient, and its row of each table, to be written in place."""
    rows = first_valid(indices, count).tolist() if grad.shape[1] else []
    for row, g in zip(rows, grad.detach().numpy(), strict=False):
        yield (g, *(table.detach()[row].numpy() for table in tables))


def sparse_sgd(
    weight: torch.Tensor, indices: torch.Tensor, grad: torch.Tensor, lr: float, count: torch.Tensor | None
) -> None:
    """See `tritonrec.kernels.sparse_optimizers.sparse_sgd`."""
    for g, w in _updates(indices, grad, count, weight):
        w -= np.float32(lr) * g


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
    for g, w, total in _updates(indices, grad, count, weight, state):
        total += mean_square(g)
        w -= (np.float32(lr) / (np.sqrt(total[0]) + np.float32(eps))) * g


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
    b1, rest1, b2, rest2, e, step_size = adam_scalars(lr, beta1, beta2, eps, step)
    for g, w, m, v in _updates(indices, grad, count, weight, exp_avg, exp_avg_sq):
        m[:] = b1 * m + rest1 * g
        v[:] = b2 * v + rest2 * (g * g)
        w -= (step_size * m) / (np.sqrt(v) + e)
