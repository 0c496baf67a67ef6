"""Optimizers that touch only the rows of one step."""

from tritonrec.kernels.sparse_optimizers.op import sparse_adam, sparse_rowwise_adagrad, sparse_sgd

__all__ = ["sparse_adam", "sparse_rowwise_adagrad", "sparse_sgd"]
