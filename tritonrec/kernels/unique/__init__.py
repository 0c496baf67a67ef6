"""Dedup of embedding keys."""

from tritonrec.kernels.unique.op import unique

__all__ = ["unique"]
