"""Common keys of two buffers."""

from tritonrec.kernels.intersect.op import intersect

__all__ = ["intersect"]
