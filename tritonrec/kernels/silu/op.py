"""SiLU whose value at an element depends on that element alone.

    y = x / (1 + exp(-x)),   dx = dy * s * (1 + x * (1 - s)) with s = 1 / (1 + exp(-x))

`torch.nn.functional.silu` on a CPU computes the last elements of an array by another path than the rest, so
the same number may give two results; a sample's activations would depend on its place in the batch.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.silu.register import SILU


def silu(x: torch.Tensor, *, impl: Impl = "auto") -> torch.Tensor:
    """x / (1 + exp(-x)) of a tensor of any shape; contiguous result of its dtype, differentiable.

    In float32 inside; x may be float32, bf16 or fp16.

    Raises:
        ValueError: another dtype.
    """
    return SILU(x, impl=impl)
