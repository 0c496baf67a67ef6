"""Registration of the sparse optimizers: one record per rule, all with the same arguments but the states."""

from __future__ import annotations

import math

import torch

from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar
from tritonrec.kernels.row_layout import check_matrix, check_rows
from tritonrec.kernels.sparse_optimizers import reference
from tritonrec.kernels.sparse_optimizers.reference import STATES, has_correction, is_row_wise

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
    names = STATES[rule]
    narrow = names[-1] if is_row_wise(rule) else None

    def check(weight, momentum_buffer=None, state=None, exp_avg=None, exp_avg_sq=None) -> None:
        given = {"momentum_buffer": momentum_buffer, "state": state}
        given |= {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        for name in names:
            _check_state(name, given[name], weight, 1 if name == narrow else weight.shape[1])

    return check


def _check_numbers(rule: str):
    def check(beta1, beta2, weight_decay, step) -> None:
        if step < 1:
            raise ValueError(f"step counts from 1, got {step}")
        if has_correction(rule) and not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"betas must lie in [0, 1), got {beta1} and {beta2}")
        if "momentum_buffer" in STATES[rule] and not 0 <= beta1 < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {beta1}")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {weight_decay}")

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
    states = "".join(f"Tensor({mark}!) {name}, " for mark, name in zip("bc", STATES[rule], strict=False))
    return Op(
        f"sparse_{rule}(Tensor(a!) weight, {states}Tensor indices, Tensor grad, float lr, float eps, "
        "float beta1, float beta2, float weight_decay, int step, Tensor? count) -> ()",
        reference=reference.update, cpu="numba_sparse_optimizers:update",
        triton="triton_sparse_optimizers:update", rule=rule,
        check=(_check_weight, _check_grad, _check_states(rule), _check_numbers(rule)),
        check_memory=_check_rows,
    )  # fmt: skip


SPARSE_UPDATES = {rule: _record(rule) for rule in STATES}
SPARSE_LAZY_DECAY = Op(
    "sparse_lazy_decay(Tensor(a!) weight, Tensor(b!) last_update, Tensor indices, Tensor factors, int step, "
    "Tensor? count) -> ()",
    reference=reference.lazy_decay, cpu="numba_sparse_optimizers:lazy_decay",
    triton="triton_sparse_optimizers:lazy_decay", check=(_check_weight, _check_lazy_decay),
    check_memory=_check_rows,
)  # fmt: skip
