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
    lamb              m, v as adam;  r = (c * m) / (sqrt(v) + eps) + weight_decay * w
                      w -= (lr * |w| / |r|) * r,  c = step_size / lr, eps as in adamw
    rowwise_lamb      as lamb, with mean(g * g) for g * g                         one v per row
    lars_sgd          rate = lr * eta * |w| / (|g| + weight_decay * |w|)
                      m = momentum * m + rate * (g + weight_decay * w);  w -= m
    ftrl              t = s + g * g;  z = (z + g) - ((sqrt(t) - sqrt(s)) / lr) * w;  s = t
                      w = (clip(z, -l1, l1) - z) / ((eps + sqrt(s)) / lr + weight_decay)

Weight decay is, as in the sources, decoupled in adamw, rowwise_adam and rowwise_adagradw (else as
rowwise_adagrad): ``w *= 1 - lr * weight_decay`` before the change. Where no formula above has it, it is L2:
``g + weight_decay * w`` for g. Rows that are not touched do not decay; `sparse_lazy_decay` makes up for the
updates that a row has missed.

The momenta, Adagrad and AdamW are those of `torch.optim` (dampening 0; AdamW: Loshchilov and Hutter 2019).
Row-wise Adagrad is FBGEMM's EXACT_ROWWISE_ADAGRAD (Mudigere et al. 2021, "Software-hardware co-design for
fast and scalable training of deep learning recommendation models", section 4.1), row-wise Adam its
PARTIAL_ROWWISE_ADAM. Adam is lazy, as `torch.optim.SparseAdam` (Kingma and Ba 2015, end of section 2, with
eps outside the correction; dividing by sqrt(1 - beta2**step) above and below gives the form of AdamW).
Row-wise AdagradW is FBGEMM's EXACT_ROWWISE_ADAGRAD with decoupled decay. LAMB (You et al. 2020, algorithm 2),
its row-wise form and LARS (You, Gitman and Ginsburg 2017) are FBGEMM's, a row being the layer, but for norms
of 0, which FBGEMM divides by or multiplies with: there the ratio of LAMB is 1 and the rate of LARS is lr, as
in TensorFlow Addons and Apex. FTRL-Proximal is algorithm 1 of McMahan et al. 2013 with eps for beta, z begins
at 0, so a weight counts from the first gradient on; it is `tf.keras.optimizers.Ftrl` with a power of -0.5, an
accumulator that begins at 0 and half of `weight_decay` as `l2_regularization_strength`.

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

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar, first_valid
from tritonrec.kernels.row_layout import check_matrix, check_rows
from tritonrec.kernels.sparse_optimizers.rules import LANES, RULES, scalars


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


def sparse_rowwise_adagradw(
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
    """Row-wise Adagrad with decoupled decay, in place; arguments as `sparse_rowwise_adagrad`."""
    rest = lr, eps, 0.0, 0.0, weight_decay, 1
    SPARSE_UPDATES["rowwise_adagradw"](weight, state, indices, grad, *rest, count, impl=impl)


def sparse_lars_sgd(
    weight: torch.Tensor,
    momentum_buffer: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    momentum: float = 0.9,
    eta: float = 0.001,
    weight_decay: float = 0.0,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """LARS for the touched rows, each a layer, in place; momentum_buffer: (R, D) float32, mutated."""
    rest = lr, 0.0, momentum, eta, weight_decay, 1
    SPARSE_UPDATES["lars_sgd"](weight, momentum_buffer, indices, grad, *rest, count, impl=impl)


def sparse_ftrl(
    weight: torch.Tensor,
    linear: torch.Tensor,
    state: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    l1: float = 0.0,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """FTRL-Proximal for the touched rows, in place: weights whose sum of gradients is within `l1` are 0.

    Args:
        linear, state: z and the sum of squares, (R, D) float32, mutated; zeros at first. lr: above 0.
    """
    rest = lr, eps, l1, 0.0, weight_decay, 1
    SPARSE_UPDATES["ftrl"](weight, linear, state, indices, grad, *rest, count, impl=impl)


class _WithMoments:
    """The update of a rule with two moments, whose arguments are the same for all five."""

    def __init__(self, rule: str, doc: str):
        self._rule, self.__name__, self.__doc__ = rule, f"sparse_{rule}", doc

    def __call__(
        self,
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
        """In place, for the touched rows; those that are not touched keep weights and moments.

        Args:
            exp_avg: (R, D) float32, mutated. exp_avg_sq: the same, or (R, 1) where the rule is row-wise.
            step: the number of this step, from 1.
        """
        rest = lr, eps, beta1, beta2, weight_decay, step
        SPARSE_UPDATES[self._rule](weight, exp_avg, exp_avg_sq, indices, grad, *rest, count, impl=impl)


sparse_adam = _WithMoments("adam", "Lazy Adam.")
sparse_adamw = _WithMoments("adamw", "Lazy AdamW.")
sparse_rowwise_adam = _WithMoments("rowwise_adam", "Lazy Adam with one second moment per row.")
sparse_lamb = _WithMoments("lamb", "Lazy LAMB, each row a layer.")
sparse_rowwise_lamb = _WithMoments("rowwise_lamb", "Lazy LAMB with one second moment per row.")


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


# Reference: the updates in numpy float32, one row at a time, one rounding per written operation.


def sum_of_squares(row: np.ndarray) -> np.float32:
    """Lane j adds columns j, j + 16, ...; then halves are added to halves."""
    lanes = np.zeros(LANES, np.float32)
    for column, value in enumerate(row):
        lanes[column % LANES] += value * value
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def mean_square(row: np.ndarray) -> np.float32:
    """Mean of squares."""
    return sum_of_squares(row) / np.float32(len(row))


def norms(*rows: np.ndarray) -> tuple[bool, np.float32, np.float32]:
    """Whether a norm is 0, and the norms of two rows."""
    one, other = (np.sqrt(sum_of_squares(row)) for row in rows)
    return one == 0 or other == 0, one, other


def _rows(
    indices: torch.Tensor, count: torch.Tensor | None, *tables: torch.Tensor
) -> Iterator[tuple[np.ndarray, ...]]:
    """For each valid index its row of each table, to be written in place."""
    rows = first_valid(indices, count).tolist() if tables[0].shape[1] else []
    for row in rows:
        yield tuple(table.detach()[row].numpy() for table in tables)


def update_reference(*arguments: Any, rule: str) -> None:
    """See `sparse_optimizers`."""
    weight, *states, indices, grad, lr, eps, beta1, beta2, weight_decay, step, count = arguments
    rate, e, b1, rest1, b2, rest2, l2, decay, scale = scalars(rule, lr, eps, beta1, beta2, weight_decay, step)
    gradients = grad.detach().numpy()
    for (w, *state), g in zip(_rows(indices, count, weight, *states), gradients, strict=False):
        if l2 != 0 and RULES[rule].decay == "l2":
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
        elif rule == "lars_sgd":
            (m,), (without, of_weight, of_gradient) = state, norms(w, g)
            rate_of_row = rate if without else (scale * of_weight) / (of_gradient + l2 * of_weight)
            m[:] = b1 * m + rate_of_row * (g + l2 * w)
            w -= m
        elif rule == "ftrl":
            z, s = state
            total = s + g * g
            z[:] = (z + g) - ((np.sqrt(total) - np.sqrt(s)) / rate) * w
            s[:] = total
            clipped = np.where(z > b1, b1, np.where(z < -b1, -b1, z))
            w[:] = (clipped - z) / ((e + np.sqrt(s)) / rate + l2)
        elif rule == "adagrad":
            (s,) = state
            s += g * g
            w -= (rate * g) / (np.sqrt(s) + e)
        elif rule.startswith("rowwise_adagrad"):
            (s,) = state
            s += mean_square(g)
            w -= (rate / (np.sqrt(s[0]) + e)) * g
        else:
            m, v = state
            m[:] = b1 * m + rest1 * g
            v[:] = b2 * v + rest2 * (mean_square(g) if RULES[rule].row_wise else g * g)
            if rule.endswith("lamb"):
                r = (scale * m) / (np.sqrt(v) + e) + l2 * w
                without, of_weight, of_change = norms(w, r)
                w -= (rate if without else rate * (of_weight / of_change)) * r
            else:
                w -= (rate * m) / (np.sqrt(v) + e)


def lazy_decay_reference(weight, last_update, indices, factors, step, count) -> None:
    """See `sparse_lazy_decay`."""
    for w, last in _rows(indices, count, weight, last_update):
        done = int(min(last[0], step)) if last[0] >= 1 else step - 1
        for factor in factors[done:step].numpy():
            w *= factor
        last[0] = step


MOST_UPDATES = 1 << 24
"""Updates that lazy decay can count: a row's last one is a float32."""


def _check_weight(weight, indices, count) -> None:
    check_matrix("weight", weight, torch.float32, in_place=True)
    if indices.dim() != 1 or indices.dtype != torch.int64:
        raise ValueError(f"indices must be (K,) int64, got {tuple(indices.shape)} {indices.dtype}")
    check_scalar("count", count)


def _check_grad(weight, indices, grad) -> None:
    check_matrix("grad", grad, torch.float32)
    if grad.shape[0] != indices.shape[0] or grad.shape[1] != weight.shape[1]:
        raise ValueError(
            f"grad must be ({indices.shape[0]}, {weight.shape[1]}) to go with indices "
            f"{tuple(indices.shape)} and weight {tuple(weight.shape)}, got {tuple(grad.shape)}"
        )


def _check_state(name: str, state: torch.Tensor, weight: torch.Tensor, columns: int) -> None:
    check_matrix(name, state, torch.float32, in_place=True)
    if state.shape != (weight.shape[0], columns):
        raise ValueError(f"{name} must be ({weight.shape[0]}, {columns}), got {tuple(state.shape)}")


def _check_states(rule: str):
    names = RULES[rule].states
    narrow = names[-1] if RULES[rule].row_wise else None

    def check(weight, momentum_buffer=None, state=None, exp_avg=None, exp_avg_sq=None, linear=None) -> None:
        given = {"momentum_buffer": momentum_buffer, "state": state, "linear": linear}
        given |= {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        for name in names:
            _check_state(name, given[name], weight, 1 if name == narrow else weight.shape[1])

    return check


def _check_numbers(rule: str):
    def check(lr, beta1, beta2, weight_decay, step) -> None:
        if step < 1:
            raise ValueError(f"step counts from 1, got {step}")
        if RULES[rule].corrected and not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"betas must lie in [0, 1), got {beta1} and {beta2}")
        if "momentum_buffer" in RULES[rule].states and not 0 <= beta1 < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {beta1}")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {weight_decay}")
        if rule == "lars_sgd" and not 0 <= beta2 < math.inf:
            raise ValueError(f"eta must be at least 0 and finite, got {beta2}")
        if rule == "ftrl" and not (lr > 0 and 0 <= beta1 < math.inf):
            raise ValueError(
                f"FTRL divides by lr, which must be above 0, and l1 must be at least 0 and finite, got {lr} "
                f"and {beta1}"
            )

    return check


def _check_lazy_decay(weight, last_update, factors, step) -> None:
    _check_state("last_update", last_update, weight, 1)
    if not 1 <= step <= MOST_UPDATES:
        raise ValueError(f"step must be 1 to {MOST_UPDATES}, which a float32 counts exactly, got {step}")
    if factors.dim() != 1 or factors.dtype != torch.float32 or factors.shape[0] < step:
        raise ValueError(
            f"factors must be float32, one for each of the {step} updates, got {tuple(factors.shape)} "
            f"{factors.dtype}"
        )


def _check_rows(weight, indices, count) -> None:
    check_rows("indices", indices, weight.shape[0], count)


def _record(rule: str) -> Op:
    states = "".join(
        f"Tensor({mark}!) {name}, " for mark, name in zip("bc", RULES[rule].states, strict=False)
    )
    return Op(
        f"sparse_{rule}(Tensor(a!) weight, {states}Tensor indices, Tensor grad, float lr, float eps, "
        "float beta1, float beta2, float weight_decay, int step, Tensor? count) -> ()",
        reference=update_reference, cpu="numba_sparse_optimizers:update",
        triton="triton_sparse_optimizers:update", rule=rule,
        check=(_check_weight, _check_grad, _check_states(rule), _check_numbers(rule)),
        check_memory=_check_rows,
    )  # fmt: skip


SPARSE_UPDATES = {rule: _record(rule) for rule in RULES}
SPARSE_LAZY_DECAY = Op(
    "sparse_lazy_decay(Tensor(a!) weight, Tensor(b!) last_update, Tensor indices, Tensor factors, int step, "
    "Tensor? count) -> ()",
    reference=lazy_decay_reference, cpu="numba_sparse_optimizers:lazy_decay",
    triton="triton_sparse_optimizers:lazy_decay", check=(_check_weight, _check_lazy_decay),
    check_memory=_check_rows,
)  # fmt: skip
