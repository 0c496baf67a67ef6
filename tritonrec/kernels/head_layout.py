"""What kernels over (L, H, D) tensors share: features side by side, and a flat view of them for the CPU."""

from __future__ import annotations

import numpy as np
import torch


def contiguous_heads(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it where its last dimension is not contiguous."""
    return tensor if tensor.stride(2) == 1 or tensor.shape[2] <= 1 else tensor.contiguous()


def flat_heads(tensor: torch.Tensor) -> tuple[np.ndarray, np.uintp, np.uintp]:
    """(flat, token_stride, head_stride): row (t, h) starts at ``flat[t * token_stride + h * head_stride]``.

    A view of `tensor`, or of a copy where its last dimension is not contiguous.
    """
    tensor = contiguous_heads(tensor.detach())
    token_stride, head_stride, _ = tensor.stride()
    if not tensor.is_contiguous():
        tokens, heads, dim = tensor.shape
        tensor = tensor.as_strided(((tokens - 1) * token_stride + (heads - 1) * head_stride + dim,), (1,))
    return tensor.numpy().reshape(-1), np.uintp(token_stride), np.uintp(head_stride)
