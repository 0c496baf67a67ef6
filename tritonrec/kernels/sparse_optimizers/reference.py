"""The updates in numpy float32, one row at a time, one rounding per written operation."""

from __future__ import annotations

import numpy as np
import torch

LANES = 16


def mean_square(row: np.ndarray) -> np.float32:
    """Mean of squares: lane j adds columns j, j + 16, ...; then halves are added to halves."""
    lanes = np.zeros(LANES, np.float32)
    for column, value in enumerate(row):
        lanes[column % LANES] += value * value
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0] / np.float32(len(row))


def sgd(weight: torch.Tensor, indices: torch.Tensor, grad: torch.Tensor, lr: np.float32) -> None:
    for row, g in zip(indices.tolist(), grad.numpy(), strict=True):
        w = weight[row].numpy()
        w -= lr * g


def rowwise_adagrad(
    weight: torch.Tensor,
    state: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: np.float32,
    eps: np.float32,
) -> None:
    for row, g in zip(indices.tolist(), grad.numpy(), strict=True):
        w, total = weight[row].numpy(), state[row].numpy()
        total += mean_square(g)
        w -= (lr / (np.sqrt(total[0]) + eps)) * g


def adam(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    beta1: np.float32,
    rest1: np.float32,
    beta2: np.float32,
    rest2: np.float32,
    eps: np.float32,
    step_size: np.float32,
) -> None:
    for row, g in zip(indices.tolist(), grad.numpy(), strict=True):
        w, m, v = weight[row].numpy(), exp_avg[row].numpy(), exp_avg_sq[row].numpy()
        m[:] = beta1 * m + rest1 * g
        v[:] = beta2 * v + rest2 * (g * g)
        w -= (step_size * m) / (np.sqrt(v) + eps)
