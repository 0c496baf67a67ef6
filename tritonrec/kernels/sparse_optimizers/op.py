"""Optimizers that touch only the rows of one step, from sums already deduplicated by key.

R table rows, K touched rows, D dim; w, g, ... are rows. Everything happens in place::

    sgd               w -= lr * g
    momentum_sgd      m = momentum * m + g;  w -= lr * m
    nesterov_sgd      m = momentum * m + g;  w -= lr * (g + momentum * m)
    adagrad           s += g * g;  w -= (lr * g) / (sqrt(s) + eps)
    rowwise_adagrad   s += mean(g * g);  w -= (lr / (sqrt(s) + eps)) * g          one s per row
    adam              m = beta1 * m + (1 - beta1) * g
                      v = beta2 * v + (1 - beta2) * (g * g)
                      w -= (step_size * m) / (sqrt(v) + eps),
                      step_size = lr * sqrt(1 - beta2**step) / (1 - beta1**step)
    adamw             as adam, with eps * sqrt(1 - beta2**step) for eps
    rowwise_adam      as adamw, with mean(g * g) for g * g                        one v per row

Weight decay is, as in the sources, decoupled in adamw and rowwise_adam: ``w *= 1 - lr * weight_decay`` before
the change. In the others it is L2: ``g + weight_decay * w`` for g. Rows that are not touched do not decay;
`sparse_lazy_decay` makes up for the updates that a row has missed.

The momenta, Adagrad and AdamW are those of `torch.optim` (dampening 0; AdamW: Loshchilov and Hutter 2019).
Row-wise Adagrad is FBGEMM's EXACT_ROWWISE_ADAGRAD (Mudigere et al. 2021, "Software-hardware co-design for
fast and scalable training of deep learning recommendation models", section 4.1), row-wise Adam its
PARTIAL_ROWWISE_ADAM. Adam is lazy, as `torch.optim.SparseAdam` (Kingma and Ba 2015, end of section 2, with
eps outside the correction; dividing by sqrt(1 - beta2**step) above and below gives the form of AdamW).

All implementations agree in every bit: float32 with one rounding per written operation, no FMA, the mean in
16 lanes with a fixed tree. Scalars are computed in float64 on the host and rounded to float32 once. Weights
and states may be column ranges of one (R, D + state) buffer: only a row has to be contiguous. `indices`
must be distinct; that is the caller's promise and is not checked.

All functions take, beside what they name: weight (R, D) float32, mutated, as are the states; indices (K,)
int64, distinct, in [0, R); grad (K, D) float32; count () int64, the number of valid indices, the others touch
nothing (`kernels.padding`). They raise

- IndexError for an index outside [0, R); nothing was changed.
- ValueError for an argument of another shape or dtype; step < 1; a beta or momentum outside [0, 1); a weight
  decay that is negative or not finite; an argument that is mutated and shares memory with another.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.sparse_optimizers.register import SPARSE_LAZY_DECAY, SPARSE_UPDATES


def sparse_sgd(
    weight: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    weight_decay: float = 0.0,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """SGD for the touched rows, in place; arguments and errors are those of the module."""
    SPARSE_UPDATES["sgd"](weight, indices, grad, lr, 0.0, 0.0, 0.0, weight_decay, 1, count, impl=impl)


def sparse_momentum_sgd(
    weight: torch.Tensor,
    momentum_buffer: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """SGD with momentum for the touched rows, in place; the momentum of other rows waits.

    Args:
        momentum_buffer: (R, D) float32, mutated; zeros at first.
    """
    rule = SPARSE_UPDATES["nesterov_sgd" if nesterov else "momentum_sgd"]
    rule(weight, momentum_buffer, indices, grad, lr, 0.0, momentum, 0.0, weight_decay, 1, count, impl=impl)


def sparse_adagrad(
    weight: torch.Tensor,
    state: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Adagrad with one sum of squares per element, for the touched rows, in place.

    Args:
        state: (R, D) float32, mutated.
    """
    rest = lr, eps, 0.0, 0.0, weight_decay, 1
    SPARSE_UPDATES["adagrad"](weight, state, indices, grad, *rest, count, impl=impl)


def sparse_rowwise_adagrad(
    weight: torch.Tensor,
    state: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Row-wise Adagrad for the touched rows, in place.

    Args:
        state: (R, 1) float32, mutated.
    """
    rest = lr, eps, 0.0, 0.0, weight_decay, 1
    SPARSE_UPDATES["rowwise_adagrad"](weight, state, indices, grad, *rest, count, impl=impl)


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
    weight_decay: float = 0.0,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Lazy Adam for the touched rows, in place; rows that are not touched keep weights and moments.

    Args:
        exp_avg, exp_avg_sq: (R, D) float32, mutated; step: the number of this step, from 1.
    """
    rest = lr, eps, beta1, beta2, weight_decay, step
    SPARSE_UPDATES["adam"](weight, exp_avg, exp_avg_sq, indices, grad, *rest, count, impl=impl)


def sparse_adamw(
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
    weight_decay: float = 0.0,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Lazy AdamW for the touched rows, in place; rows that are not touched keep weights and moments.

    Args:
        exp_avg, exp_avg_sq: (R, D) float32, mutated; step: the number of this step, from 1.
    """
    rest = lr, eps, beta1, beta2, weight_decay, step
    SPARSE_UPDATES["adamw"](weight, exp_avg, exp_avg_sq, indices, grad, *rest, count, impl=impl)


def sparse_rowwise_adam(
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
    weight_decay: float = 0.0,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Lazy row-wise Adam for the touched rows, in place: the second moment is one per row.

    Args:
        exp_avg: (R, D), exp_avg_sq: (R, 1), float32, mutated; step: the number of this step, from 1.
    """
    rest = lr, eps, beta1, beta2, weight_decay, step
    SPARSE_UPDATES["rowwise_adam"](weight, exp_avg, exp_avg_sq, indices, grad, *rest, count, impl=impl)


def sparse_lazy_decay(
    weight: torch.Tensor,
    last_update: torch.Tensor,
    indices: torch.Tensor,
    factors: torch.Tensor,
    step: int,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Decoupled decay of the touched rows, for this update and those they have missed, in place::

        for update in range(last_update + 1, step + 1): w *= factors[update - 1]
        last_update = step

    The bits are those of a row that was decayed in every update: each factor is a multiplication of its own.
    A row whose `last_update` is below 1 begins with this update and has missed none. A row costs one
    multiplication per column and update since its last one, so all calls together never cost more than
    decaying every row in every update.

    Args:
        last_update: (R, 1) float32, mutated; zeros at first.
        factors: (T,) float32, of update u at u - 1; T >= step.
        step: the number of this update, 1 to 2**24.
    """
    SPARSE_LAZY_DECAY(weight, last_update, indices, factors, step, count, impl=impl)
