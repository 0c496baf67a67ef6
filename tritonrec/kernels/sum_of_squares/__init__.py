"""Exact sums of squares, the same for any order: the norm of gradients that every rank agrees on."""

from tritonrec.kernels.sum_of_squares.op import sum_of_squares

__all__ = ["sum_of_squares"]
