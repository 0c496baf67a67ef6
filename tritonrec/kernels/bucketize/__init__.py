"""Key routing: the rank that owns a key, keys grouped by owner, and elements grouped by any small number."""

from tritonrec.kernels.bucketize.op import bucketize, counting_sort, owner_of

__all__ = ["bucketize", "counting_sort", "owner_of"]
