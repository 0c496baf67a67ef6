"""Jagged HSTU attention: pointwise SiLU instead of softmax, over sequences stored end to end."""

from tritonrec.kernels.hstu_attention.call import HSTUBias, HSTUMask
from tritonrec.kernels.hstu_attention.op import hstu_attention

__all__ = ["HSTUBias", "HSTUMask", "hstu_attention"]
