"""Dropout by a mask that is spelled out."""

from __future__ import annotations

import torch

from tritonrec.kernels.norm_mul_dropout.reference import mask
from tritonrec.kernels.philox import DROPOUT


def dropout(
    x: torch.Tensor, p: float, seed: int, sample_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """See `tritonrec.kernels.dropout.op.dropout`."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    return x * mask(seed, DROPOUT, sample_ids, positions, x.shape[1], int(p * 2**32), 1 / (1 - p))
