"""Optimizers that touch only the rows of one step."""

from tritonrec.kernels.sparse_optimizers.op import (
    sparse_adagrad,
    sparse_adam,
    sparse_adamw,
    sparse_ftrl,
    sparse_lamb,
    sparse_lars_sgd,
    sparse_lazy_decay,
    sparse_momentum_sgd,
    sparse_rowwise_adagrad,
    sparse_rowwise_adagradw,
    sparse_rowwise_adam,
    sparse_rowwise_lamb,
    sparse_sgd,
)

__all__ = [
    "sparse_adagrad",
    "sparse_adam",
    "sparse_adamw",
    "sparse_ftrl",
    "sparse_lamb",
    "sparse_lars_sgd",
    "sparse_lazy_decay",
    "sparse_momentum_sgd",
    "sparse_rowwise_adagrad",
    "sparse_rowwise_adagradw",
    "sparse_rowwise_adam",
    "sparse_rowwise_lamb",
    "sparse_sgd",
]
