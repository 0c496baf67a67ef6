"""The front of the HSTU layer, fused: layer norm, linear layer, SiLU."""

from tritonrec.kernels.norm_linear_silu.op import norm_linear_silu

__all__ = ["norm_linear_silu"]
