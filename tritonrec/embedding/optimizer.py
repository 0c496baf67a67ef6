"""Optimizers for rows that carry their state, and for dense parameters seen as rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from .. import ops

OptimizerName = Literal["sgd", "rowwise_adagrad", "adam"]


@dataclass(frozen=True)
class RowOptimizer:
    """Update rule of rows laid out as weight | state.

        sgd               weight (dim)
        rowwise_adagrad   weight (dim) | sum of mean squared gradients (1)
        adam              weight (dim) | first moment (dim) | second moment (dim)

    Adam's bias correction counts the run's steps, once per window, however the window was split.
    """

    name: OptimizerName = "adam"
    lr: float = 1e-3
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        if self.name not in ("sgd", "rowwise_adagrad", "adam"):
            raise ValueError(f"optimizer must be sgd, rowwise_adagrad or adam, got {self.name!r}")
        if not self.lr > 0:
            raise ValueError(f"learning rate must be positive, got {self.lr}")

    def row_width(self, dim: int) -> int:
        """float32 values of one row: its weights and its state."""
        return {"sgd": dim, "rowwise_adagrad": dim + 1, "adam": 3 * dim}[self.name]

    def update(self, rows: torch.Tensor, indices: torch.Tensor, gradient: torch.Tensor, step: int) -> None:
        """Update ``rows[indices]`` in place.

        Args:
            rows: (R, row_width(dim)) float32.
            indices: (K,) int64, distinct.
            gradient: (K, dim) float32, the mean gradient of the step.
            step: the step's number, counted from 1.
        """
        dim = gradient.shape[1]
        weight, state = rows[:, :dim], rows[:, dim:]
        if self.name == "sgd":
            ops.sparse_sgd(weight, indices, gradient, self.lr)
        elif self.name == "rowwise_adagrad":
            ops.sparse_rowwise_adagrad(weight, state, indices, gradient, self.lr, self.eps)
        else:
            first, second = state[:, :dim], state[:, dim:]
            ops.sparse_adam(
                weight, first, second, indices, gradient, self.lr, self.beta1, self.beta2, self.eps, step
            )


class DenseOptimizer:
    """The same rules for dense parameters: each is a block of rows (its last dimension) with state beside it.

    Args:
        parameters: (name, parameter) pairs; a vector counts as one row.
        rule: learning rate and rule.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], rule: RowOptimizer):
        self.rule = rule
        self.parameters = dict(parameters)
        self.rows: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            weight = _as_rows(parameter.detach())
            rows = weight.new_zeros(weight.shape[0], rule.row_width(weight.shape[1]))
            rows[:, : weight.shape[1]] = weight
            self.rows[name] = rows

    def step(self, gradients: dict[str, torch.Tensor], step: int) -> None:
        """Update every parameter from ``gradients[name]``, shaped like it; `step` counts from 1."""
        for name, parameter in self.parameters.items():
            rows, gradient = self.rows[name], _as_rows(gradients[name])
            self.rule.update(rows, torch.arange(rows.shape[0], device=rows.device), gradient, step)
            with torch.no_grad():
                _as_rows(parameter).copy_(rows[:, : gradient.shape[1]])

    def check_current(self) -> None:
        """Raise ValueError naming a parameter changed elsewhere since; `step` would undo the change."""
        for name, parameter in self.parameters.items():
            weight = _as_rows(parameter.detach())
            held = self.rows[name][:, : weight.shape[1]]
            if not torch.equal(weight.contiguous().view(torch.int32), held.contiguous().view(torch.int32)):
                raise ValueError(
                    f"parameter {name} was changed after its optimizer was made, which would undo that; "
                    "load the model first, or use DenseOptimizer.load"
                )

    def load(self, rows: dict[str, torch.Tensor]) -> None:
        """Take over weights and state from `rows`, as another instance's `rows` holds them."""
        if rows.keys() != self.rows.keys():
            raise ValueError(f"expected rows of {sorted(self.rows)}, got {sorted(rows)}")
        for name, parameter in self.parameters.items():
            if rows[name].shape != self.rows[name].shape:
                raise ValueError(
                    f"{name}: expected rows of shape {tuple(self.rows[name].shape)}, got "
                    f"{tuple(rows[name].shape)}; was it saved with another optimizer or model size?"
                )
            self.rows[name].copy_(rows[name])
            with torch.no_grad():
                weight = _as_rows(parameter)
                weight.copy_(rows[name][:, : weight.shape[1]])


def _as_rows(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)
