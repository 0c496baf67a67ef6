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

import math

import numpy as np
import torch

from tritonrec.kernels.arguments import check_tensors
from tritonrec.kernels.dispatch import Impl, implementation
from tritonrec.kernels.overlap import check_no_overlap
from tritonrec.kernels.padding import check_scalar, num_valid
from tritonrec.kernels.registration import custom_op
from tritonrec.kernels.row_layout import check_matrix, check_rows, contiguous_rows, flat_rows
from tritonrec.kernels.sparse_optimizers import reference

__all__ = ["sparse_adam", "sparse_rowwise_adagrad", "sparse_sgd"]


def _check(
    weight: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    count: torch.Tensor | None,
    **states: torch.Tensor,
) -> None:
    check_tensors(weight=weight, indices=indices, grad=grad, **states)
    check_matrix("weight", weight, torch.float32, in_place=True)
    check_matrix("grad", grad, torch.float32)
    if indices.dim() != 1 or indices.dtype != torch.int64:
        raise ValueError(f"indices must be (K,) int64, got {tuple(indices.shape)} {indices.dtype}")
    if grad.shape[0] != indices.shape[0] or grad.shape[1] != weight.shape[1]:
        raise ValueError(
            f"grad must be ({indices.shape[0]}, {weight.shape[1]}) to go with indices "
            f"{tuple(indices.shape)} and weight {tuple(weight.shape)}, got {tuple(grad.shape)}"
        )
    check_scalar("count", count, weight)
    for name, state in states.items():
        check_matrix(name, state, torch.float32, in_place=True)
        columns = 1 if name == "state" else weight.shape[1]
        if state.shape[0] != weight.shape[0] or state.shape[1] != columns:
            raise ValueError(f"{name} must be ({weight.shape[0]}, {columns}), got {tuple(state.shape)}")


def _check_adam(beta1: float, beta2: float, step: int) -> None:
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas must lie in [0, 1), got {beta1} and {beta2}")


def _first(
    chosen: str,
    weight: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    count: torch.Tensor | None,
    **states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices, checked, and gradients as a kernel takes them; on the host, the first `count`."""
    check_no_overlap({"weight": weight, **states}, {"indices": indices, "grad": grad, "count": count})
    check_rows("indices", indices, weight.shape[0], count)
    if count is not None and chosen != "triton":
        first = num_valid(count, indices.numel())
        indices, grad = indices[:first], grad[:first]
    return indices.contiguous(), contiguous_rows(grad)


def sparse_sgd(
    weight: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    impl: Impl = "auto",
    *,
    count: torch.Tensor | None = None,
) -> None:
    """w -= lr * g for the touched rows, in place.

    Args:
        weight: (R, D) float32, mutated; indices: (K,) int64, distinct, in [0, R); grad: (K, D) float32;
        count: () int64, the indices that hold, the others touch nothing (`kernels.padding`).
    Raises:
        IndexError: an index outside [0, R); nothing was changed.
        ValueError: an argument of another shape or dtype; one that is mutated shares memory with another.
    """
    _check(weight, indices, grad, count)
    _sparse_sgd(weight, indices, grad, lr, impl, count)


@custom_op("tritonrec::sparse_sgd", mutates_args=("weight",))
def _sparse_sgd(
    weight: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    impl: str,
    count: torch.Tensor | None = None,
) -> None:
    _check(weight, indices, grad, count)
    chosen = implementation(impl, weight)  # type: ignore[arg-type]
    indices, grad = _first(chosen, weight, indices, grad, count)
    if grad.numel() == 0:
        return
    if chosen == "reference":
        reference.sgd(weight.detach(), indices, grad.detach(), np.float32(lr))
    elif chosen == "cpu":
        from tritonrec.kernels.sparse_optimizers import numba_sparse_optimizers as cpu

        dim = np.uintp(grad.shape[1])
        cpu.sgd(*flat_rows(weight), indices.numpy(), *flat_rows(grad), dim, np.float32(lr))
    else:
        from tritonrec.kernels.sparse_optimizers import triton_sparse_optimizers

        triton_sparse_optimizers.sgd(weight, indices, grad, count, lr)


@_sparse_sgd.register_fake
def _(weight, indices, grad, lr, impl, count=None):
    return None


def sparse_rowwise_adagrad(
    weight: torch.Tensor,
    state: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    eps: float = 1e-8,
    impl: Impl = "auto",
    *,
    count: torch.Tensor | None = None,
) -> None:
    """s += mean(g * g); w -= (lr / (sqrt(s) + eps)) * g for the touched rows, in place.

    Args:
        weight: (R, D) float32, mutated; state: (R, 1) float32, mutated; indices: (K,) int64, distinct,
        in [0, R); grad: (K, D) float32; count: () int64, as for `sparse_sgd`.
    Raises:
        IndexError: an index outside [0, R); nothing was changed.
        ValueError: an argument of another shape or dtype; one that is mutated shares memory with another.
    """
    _check(weight, indices, grad, count, state=state)
    _sparse_rowwise_adagrad(weight, state, indices, grad, lr, eps, impl, count)


@custom_op("tritonrec::sparse_rowwise_adagrad", mutates_args=("weight", "state"))
def _sparse_rowwise_adagrad(
    weight: torch.Tensor,
    state: torch.Tensor,
    indices: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    eps: float,
    impl: str,
    count: torch.Tensor | None = None,
) -> None:
    _check(weight, indices, grad, count, state=state)
    chosen = implementation(impl, weight)  # type: ignore[arg-type]
    indices, grad = _first(chosen, weight, indices, grad, count, state=state)
    if grad.numel() == 0:
        return
    scalars = (np.float32(lr), np.float32(eps))
    if chosen == "reference":
        reference.rowwise_adagrad(weight.detach(), state.detach(), indices, grad.detach(), *scalars)
    elif chosen == "cpu":
        from tritonrec.kernels.sparse_optimizers import numba_sparse_optimizers as cpu

        tables = (*flat_rows(weight), *flat_rows(state))
        dim = np.uintp(grad.shape[1])
        cpu.rowwise_adagrad(*tables, indices.numpy(), *flat_rows(grad), dim, *scalars)
    else:
        from tritonrec.kernels.sparse_optimizers import triton_sparse_optimizers

        triton_sparse_optimizers.rowwise_adagrad(weight, state, indices, grad, count, lr, eps)


@_sparse_rowwise_adagrad.register_fake
def _(weight, state, indices, grad, lr, eps, impl, count=None):
    return None


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
    impl: Impl = "auto",
    *,
    count: torch.Tensor | None = None,
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
    _check(weight, indices, grad, count, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    _check_adam(beta1, beta2, step)
    _sparse_adam(weight, exp_avg, exp_avg_sq, indices, grad, lr, beta1, beta2, eps, step, impl, count)


@custom_op("tritonrec::sparse_adam", mutates_args=("weight", "exp_avg", "exp_avg_sq"))
def _sparse_adam(
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
    impl: str,
    count: torch.Tensor | None = None,
) -> None:
    _check(weight, indices, grad, count, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    _check_adam(beta1, beta2, step)
    chosen = implementation(impl, weight)  # type: ignore[arg-type]
    indices, grad = _first(chosen, weight, indices, grad, count, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    if grad.numel() == 0:
        return
    step_size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    scalars = tuple(np.float32(x) for x in (beta1, 1 - beta1, beta2, 1 - beta2, eps, step_size))
    tables = (weight.detach(), exp_avg.detach(), exp_avg_sq.detach())
    if chosen == "reference":
        reference.adam(*tables, indices, grad.detach(), *scalars)
    elif chosen == "cpu":
        from tritonrec.kernels.sparse_optimizers import numba_sparse_optimizers as cpu

        flat = [item for table in tables for item in flat_rows(table)]
        rest = (indices.numpy(), *flat_rows(grad), np.uintp(grad.shape[1]), *scalars)
        cpu.adam(*flat, *rest)
    else:
        from tritonrec.kernels.sparse_optimizers import triton_sparse_optimizers

        triton_sparse_optimizers.adam(*tables, indices, grad, count, *map(float, scalars))


@_sparse_adam.register_fake
def _(weight, exp_avg, exp_avg_sq, indices, grad, lr, beta1, beta2, eps, step, impl, count=None):
    return None
