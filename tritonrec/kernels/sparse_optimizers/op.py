"""Optimizers that touch only the rows of one step, from sums already deduplicated by key.

R table rows, K touched rows, D dim; w, g, ... are rows. Everything happens in place::

    sgd               w -= lr * g
    rowwise_adagrad   s += mean(g * g);  w -= (lr / (sqrt(s) + eps)) * g          one s per row
    adam              m = beta1 * m + (1 - beta1) * g
                      v = beta2 * v + (1 - beta2) * (g * g)
                      w -= (step_size * m) / (sqrt(v) + eps),
                      step_size = lr * sqrt(1 - beta2**step) / (1 - beta1**step)

Row-wise Adagrad is FBGEMM's EXACT_ROWWISE_ADAGRAD (Mudigere et al. 2021, "Software-hardware co-design for
fast and scalable training of deep learning recommendation models", section 4.1); Adam is lazy, as
`torch.optim.SparseAdam` (Kingma and Ba 2015, end of section 2, with eps outside the correction).

All implementations agree in every bit: float32 with one rounding per written operation, no FMA, the mean in
16 lanes with a fixed tree. Scalars are computed in float64 on the host and rounded to float32 once. Weights
and states may be column ranges of one (R, D + state) buffer: only a row has to be contiguous. `indices`
must be distinct; that is the caller's promise and is not checked.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.sparse_optimizers.register import SPARSE_ADAM, SPARSE_ROWWISE_ADAGRAD, SPARSE_SGD


def sparse_sgd(
    weight: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """w -= lr * g for the touched rows, in place.

    Args:
        weight: (R, D) float32, mutated; indices: (K,) int64, distinct, in [0, R); grad: (K, D) float32;
        count: () int64, the number of valid indices, the others touch nothing (`kernels.padding`).
    Raises:
        IndexError: an index outside [0, R); nothing was changed.
        ValueError: an argument of another shape or dtype; one that is mutated shares memory with another.
    """
    SPARSE_SGD(weight, indices, grad, lr, count, impl=impl)


def sparse_rowwise_adagrad(
    weight: torch.Tensor,
    state: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    eps: float = 1e-8,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """s += mean(g * g); w -= (lr / (sqrt(s) + eps)) * g for the touched rows, in place.

    Args:
        weight: (R, D) float32, mutated; state: (R, 1) float32, mutated; indices: (K,) int64,
            distinct, in [0, R); grad: (K, D) float32; count: () int64, as for `sparse_sgd`.
    Raises:
        IndexError: an index outside [0, R); nothing was changed.
        ValueError: an argument of another shape or dtype; one that is mutated shares memory with another.
    """
    SPARSE_ROWWISE_ADAGRAD(weight, state, indices, grad, lr, eps, count, impl=impl)


def sparse_adam(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    step: int = 1,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Lazy Adam for the touched rows, in place; rows that are not touched keep weights and moments.

    Args:
        weight, exp_avg, exp_avg_sq: (R, D) float32, mutated; indices: (K,) int64, distinct, in [0, R);
        grad: (K, D) float32; step: the number of this step, from 1; count: () int64, as for `sparse_sgd`.
    Raises:
        IndexError: an index outside [0, R); nothing was changed.
        ValueError: an argument of another shape or dtype, step < 1, or a beta outside [0, 1); one that is
            mutated shares memory with another.
    """
    moments = exp_avg, exp_avg_sq
    SPARSE_ADAM(weight, *moments, indices, grad, lr, beta1, beta2, eps, step, count, impl=impl)
