"""Sampled-softmax cross entropy of each token: its label against K sampled items."""

from tritonrec.kernels.sampled_softmax.op import sampled_softmax

__all__ = ["sampled_softmax"]
