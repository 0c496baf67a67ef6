# mypy: ignore-errors
"""Common keys of two buffers: a scratch table over the right one, probed by the left one."""

import torch

from tritonrec.kernels import triton_scratch


def intersect(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.intersect.intersect`."""
    if left.numel() == 0 or right.numel() == 0:
        return left.new_empty(0), left.new_empty(0)
    left, right = left.contiguous(), right.contiguous()
    holders, _ = triton_scratch.build(right)
    matched = triton_scratch.lookup(left, right, holders)
    left_positions = torch.nonzero(matched >= 0).flatten()
    return left_positions, matched[left_positions]
