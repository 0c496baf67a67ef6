"""Dropout whose mask is a function of what an element is, never of the batch."""

from tritonrec.kernels.dropout.op import dropout

__all__ = ["dropout"]
