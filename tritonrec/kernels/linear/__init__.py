"""A linear layer whose every row is a function of that row and the weights, and its exact weight gradient."""

from tritonrec.kernels.linear.op import linear, linear_weight_grad

__all__ = ["linear", "linear_weight_grad"]
