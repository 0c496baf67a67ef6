"""Softmax attention over sequences stored end to end."""

from tritonrec.kernels.softmax_attention.op import softmax_attention

__all__ = ["softmax_attention"]
