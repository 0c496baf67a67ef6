"""SiLU whose value at an element depends on that element alone."""

from tritonrec.kernels.silu.op import silu

__all__ = ["silu"]
