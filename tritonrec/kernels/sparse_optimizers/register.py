"""Registration of the sparse optimizers."""

from __future__ import annotations

import torch

from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar
from tritonrec.kernels.row_layout import check_matrix, check_rows
from tritonrec.kernels.sparse_optimizers import reference


def _check(weight, indices, grad, count, state=None, exp_avg=None, exp_avg_sq=None) -> None:
    check_matrix("weight", weight, torch.float32, in_place=True)
    check_matrix("grad", grad, torch.float32)
    if indices.dim() != 1 or indices.dtype != torch.int64:
        raise ValueError(f"indices must be (K,) int64, got {tuple(indices.shape)} {indices.dtype}")
    if grad.shape[0] != indices.shape[0] or grad.shape[1] != weight.shape[1]:
        raise ValueError(
            f"grad must be ({indices.shape[0]}, {weight.shape[1]}) to go with indices "
            f"{tuple(indices.shape)} and weight {tuple(weight.shape)}, got {tuple(grad.shape)}"
        )
    check_scalar("count", count)
    for name, of_rows in (("state", state), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if of_rows is None:
            continue
        check_matrix(name, of_rows, torch.float32, in_place=True)
        columns = 1 if name == "state" else weight.shape[1]
        if of_rows.shape != (weight.shape[0], columns):
            raise ValueError(f"{name} must be ({weight.shape[0]}, {columns}), got {tuple(of_rows.shape)}")


def _check_adam(beta1, beta2, step) -> None:
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas must lie in [0, 1), got {beta1} and {beta2}")


def _check_rows(weight, indices, count) -> None:
    check_rows("indices", indices, weight.shape[0], count)


SPARSE_SGD = Op(
    "sparse_sgd(Tensor(a!) weight, Tensor indices, Tensor grad, float lr, Tensor? count) -> ()",
    reference=reference.sparse_sgd, cpu="numba_sparse_optimizers:sparse_sgd",
    triton="triton_sparse_optimizers:sparse_sgd", check=_check, check_memory=_check_rows,
)  # fmt: skip
SPARSE_ROWWISE_ADAGRAD = Op(
    "sparse_rowwise_adagrad(Tensor(a!) weight, Tensor(b!) state, Tensor indices, Tensor grad, float lr, "
    "float eps, Tensor? count) -> ()",
    reference=reference.sparse_rowwise_adagrad, cpu="numba_sparse_optimizers:sparse_rowwise_adagrad",
    triton="triton_sparse_optimizers:sparse_rowwise_adagrad", check=_check, check_memory=_check_rows,
)  # fmt: skip
SPARSE_ADAM = Op(
    "sparse_adam(Tensor(a!) weight, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor indices, Tensor grad, "
    "float lr, float beta1, float beta2, float eps, int step, Tensor? count) -> ()",
    reference=reference.sparse_adam, cpu="numba_sparse_optimizers:sparse_adam",
    triton="triton_sparse_optimizers:sparse_adam", check=(_check, _check_adam), check_memory=_check_rows,
)  # fmt: skip
