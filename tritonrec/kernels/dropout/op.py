"""Dropout whose mask is a function of (seed, sample, position, column), never of the batch.

    y[t, d] = x[t, d] * kept[t, d] / (1 - p),   dx[t, d] = dy[t, d] * kept[t, d] / (1 - p)

Dimensions: L rows, D columns. The words are those of `norm_mul_dropout`: column d survives if word d % 4 of
Philox block d // 4 is at least floor(p * 2**32). All implementations agree in every bit, and nothing but the
seed is stored for backward.
"""

from __future__ import annotations

import torch

from tritonrec.kernels.dispatch import Impl
from tritonrec.kernels.dropout.register import DROPOUT_ROWS
from tritonrec.kernels.philox import Seed


def dropout(
    x: torch.Tensor,
    p: float,
    seed: Seed,
    sample_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Zero elements with probability p and divide the others by 1 - p.

    Args:
        x: (L, D) float32, bf16 or fp16. p: in [0, 1). seed: int64; where a graph is recorded, one that
            the kernel loads (`kernels.philox.device_seed`).
        sample_ids, positions: (L,) int64 of each row; positions count by their low 32 bits.
    Returns:
        (L, D) of x's dtype, contiguous. Differentiable in x.
    Raises:
        ValueError: shapes, dtypes or p that do not fit.
    """
    return DROPOUT_ROWS(x, p, seed, sample_ids, positions, impl=impl)
