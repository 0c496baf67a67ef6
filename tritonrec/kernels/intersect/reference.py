"""Common keys of two buffers as a loop over a dict."""

from __future__ import annotations

import torch

from tritonrec.kernels.padding import first_valid, pad


def intersect(
    left: torch.Tensor,
    right: torch.Tensor,
    left_count: torch.Tensor | None,
    right_count: torch.Tensor | None,
    _table: torch.Tensor | None,
    padded: bool,
) -> tuple[torch.Tensor, ...]:
    """See `tritonrec.kernels.intersect.intersect`."""
    valid = first_valid(right, right_count).tolist()
    position_in_right = {key: position for position, key in enumerate(valid)}
    left_positions, right_positions = [], []
    for position, key in enumerate(first_valid(left, left_count).tolist()):
        if key in position_in_right:
            left_positions.append(position)
            right_positions.append(position_in_right[key])
    here, there = (
        torch.tensor(positions, dtype=torch.int64, device=left.device)
        for positions in (left_positions, right_positions)
    )
    return pad_common(here, there, min(left.numel(), right.numel()), padded)


def pad_common(
    left_positions: torch.Tensor, right_positions: torch.Tensor, size: int, padded: bool
) -> tuple[torch.Tensor, ...]:
    """The results of `intersect`; where keys of `left` are there twice, there may be more than `size`."""
    if not padded:
        return left_positions, right_positions
    found = (pad(positions[:size], size, -1) for positions in (left_positions, right_positions))
    return *found, left_positions.new_full((), min(left_positions.numel(), size))
