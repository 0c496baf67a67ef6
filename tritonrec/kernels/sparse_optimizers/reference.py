"""The updates in numpy float32, one row at a time, one rounding per written operation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from tritonrec.kernels.padding import first_valid

LANES = 16
STATES = {
    "sgd": (),
    "momentum_sgd": ("momentum_buffer",),
    "nesterov_sgd": ("momentum_buffer",),
    "adagrad": ("state",),
    "rowwise_adagrad": ("state",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "rowwise_adam": ("exp_avg", "exp_avg_sq"),
}
"""By rule the names of its states: each (R, D), but the last one of a row-wise rule (R, 1)."""
DECOUPLED = ("adamw", "rowwise_adam")
"""Rules whose weight decay scales the weight; that of the others adds to the gradient."""


def is_row_wise(rule: str) -> bool:
    """Whether the last state has one value a row."""
    return rule.startswith("rowwise")


def has_correction(rule: str) -> bool:
    """Whether the rule corrects the bias of its moments, by the number of the step."""
    return rule.endswith(("adam", "adamw"))


class Scalars(NamedTuple):
    """Numbers of one step in float32: `rest1` is 1 - beta1, `l2` times w goes into g, `decay` scales w."""

    rate: np.float32
    eps: np.float32
    beta1: np.float32
    rest1: np.float32
    beta2: np.float32
    rest2: np.float32
    l2: np.float32
    decay: np.float32


def scalars(
    rule: str, lr: float, eps: float, beta1: float, beta2: float, weight_decay: float, step: int
) -> Scalars:
    """Computed in float64 and rounded once. Adam's rate has the bias correction. In the rules with decoupled
    decay, as in their sources, eps has it as well: sqrt(v / c) + eps is (sqrt(v) + eps * sqrt(c)) / sqrt(c).
    """
    rate, decoupled = lr, rule in DECOUPLED
    if has_correction(rule):
        correction = math.sqrt(1 - beta2**step)
        rate = lr * correction / (1 - beta1**step)
        eps = eps * correction if decoupled else eps
    l2, decay = (0.0, decay_factor(lr, weight_decay)) if decoupled else (weight_decay, 1.0)
    values = rate, eps, beta1, 1 - beta1, beta2, 1 - beta2, l2, decay
    return Scalars(*(np.float32(value) for value in values))


def decay_factor(lr: float, weight_decay: float) -> float:
    """What decoupled decay multiplies a weight with in one update; float32 when it is used."""
    return 1 - lr * weight_decay


def mean_square(row: np.ndarray) -> np.float32:
    """Mean of squares: lane j adds columns j, j + 16, ...; then halves are added to halves."""
    lanes = np.zeros(LANES, np.float32)
    for column, value in enumerate(row):
        lanes[column % LANES] += value * value
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0] / np.float32(len(row))


def _rows(
    indices: torch.Tensor, count: torch.Tensor | None, *tables: torch.Tensor
) -> Iterator[tuple[np.ndarray, ...]]:
    """For each valid index its row of each table, to be written in place."""
    rows = first_valid(indices, count).tolist() if tables[0].shape[1] else []
    for row in rows:
        yield tuple(table.detach()[row].numpy() for table in tables)


def update(*arguments: Any, rule: str) -> None:
    """See `tritonrec.kernels.sparse_optimizers`."""
    weight, *states, indices, grad, lr, eps, beta1, beta2, weight_decay, step, count = arguments
    rate, e, b1, rest1, b2, rest2, l2, decay = scalars(rule, lr, eps, beta1, beta2, weight_decay, step)
    gradients = grad.detach().numpy()
    for (w, *state), g in zip(_rows(indices, count, weight, *states), gradients, strict=False):
        if l2 != 0:
            g = g + l2 * w
        w *= decay
        if rule == "sgd":
            w -= rate * g
        elif rule == "momentum_sgd":
            (m,) = state
            m[:] = b1 * m + g
            w -= rate * m
        elif rule == "nesterov_sgd":
            (m,) = state
            m[:] = b1 * m + g
            w -= rate * (g + b1 * m)
        elif rule == "adagrad":
            (s,) = state
            s += g * g
            w -= (rate * g) / (np.sqrt(s) + e)
        elif rule == "rowwise_adagrad":
            (s,) = state
            s += mean_square(g)
            w -= (rate / (np.sqrt(s[0]) + e)) * g
        else:
            m, v = state
            m[:] = b1 * m + rest1 * g
            v[:] = b2 * v + rest2 * (mean_square(g) if is_row_wise(rule) else g * g)
            w -= (rate * m) / (np.sqrt(v) + e)


def lazy_decay(
    weight: torch.Tensor,
    last_update: torch.Tensor,
    indices: torch.Tensor,
    factors: torch.Tensor,
    step: int,
    count: torch.Tensor | None,
) -> None:
    """See `tritonrec.kernels.sparse_optimizers.sparse_lazy_decay`."""
    for w, last in _rows(indices, count, weight, last_update):
        done = int(min(last[0], step)) if last[0] >= 1 else step - 1
        for factor in factors[done:step].numpy():
            w *= factor
        last[0] = step
