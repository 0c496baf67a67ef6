"""Exact sums of squares, the same for any order: the norm of gradients that every rank agrees on."""
