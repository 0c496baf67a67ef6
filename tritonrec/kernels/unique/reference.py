"""Dedup as a loop over a dict."""

import torch


def unique(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `tritonrec.kernels.unique.unique`."""
    position_of: dict[int, int] = {}
    inverse: list[int] = []
    counts: list[int] = []
    for key in keys.tolist():
        position = position_of.setdefault(key, len(position_of))
        if position == len(counts):
            counts.append(0)
        counts[position] += 1
        inverse.append(position)
    return (
        torch.tensor(list(position_of), dtype=torch.int64, device=keys.device),
        torch.tensor(inverse, dtype=torch.int64, device=keys.device),
        torch.tensor(counts, dtype=torch.int64, device=keys.device),
    )
