"""Common keys of two buffers as a loop over a dict."""

import torch


def intersect(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.intersect.intersect`."""
    position_in_right = {key: position for position, key in enumerate(right.tolist())}
    left_positions, right_positions = [], []
    for position, key in enumerate(left.tolist()):
        if key in position_in_right:
            left_positions.append(position)
            right_positions.append(position_in_right[key])
    return (
        torch.tensor(left_positions, dtype=torch.int64, device=left.device),
        torch.tensor(right_positions, dtype=torch.int64, device=left.device),
    )
