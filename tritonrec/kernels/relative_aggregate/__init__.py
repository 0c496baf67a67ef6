"""Causal sums with a learned weight for each relative place or time, over sequences stored end to end."""

from tritonrec.kernels.relative_aggregate.op import relative_aggregate

__all__ = ["relative_aggregate"]
