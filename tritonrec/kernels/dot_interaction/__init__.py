"""Dot products of all pairs of a sample's vectors."""

from tritonrec.kernels.dot_interaction.op import dot_interaction

__all__ = ["dot_interaction"]
