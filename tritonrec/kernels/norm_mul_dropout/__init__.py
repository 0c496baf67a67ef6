"""The gate of the HSTU layer, fused: layer norm, product with u, dropout."""

from tritonrec.kernels.norm_mul_dropout.op import norm_mul_dropout

__all__ = ["norm_mul_dropout"]
