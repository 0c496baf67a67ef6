"""What CPU kernels over (L, H, D) tensors share: a flat view whose inner loop is contiguous."""

from __future__ import annotations

import numpy as np
import torch


def flat_heads(tensor: torch.Tensor) -> tuple[np.ndarray, np.uintp, np.uintp]:
    """(flat, token_stride, head_stride): row (t, h) starts at ``flat[t * token_stride + h * head_stride]``.

    A view of `tensor`, or of a copy where its last dimension is not contiguous.
    """
    tensor = tensor.detach()
    if tensor.stride(2) != 1 and tensor.shape[2] > 1:
        tensor = tensor.contiguous()
    token_stride, head_stride, _ = tensor.stride()
    if not tensor.is_contiguous():
        tokens, heads, dim = tensor.shape
        tensor = tensor.as_strided(((tokens - 1) * token_stride + (heads - 1) * head_stride + dim,), (1,))
    return tensor.numpy().reshape(-1), np.uintp(token_stride), np.uintp(head_stride)
