"""Key routing: the rank that owns a key, and keys grouped by owner."""

from tritonrec.kernels.bucketize.op import bucketize, owner_of

__all__ = ["bucketize", "owner_of"]
