"""Dedup as a loop over a dict."""

from __future__ import annotations

import torch

from tritonrec.kernels.padding import num_valid, pad


def unique(
    keys: torch.Tensor, count: torch.Tensor | None, padded: bool, table: bool = False
) -> tuple[torch.Tensor, ...]:
    """See `tritonrec.kernels.unique.unique`."""
    position_of: dict[int, int] = {}
    inverse: list[int] = []
    counts: list[int] = []
    for key in keys[: num_valid(count, keys.numel())].tolist():
        position = position_of.setdefault(key, len(position_of))
        if position == len(counts):
            counts.append(0)
        counts[position] += 1
        inverse.append(position)
    order, inverse_, counts_ = (
        torch.tensor(values, dtype=torch.int64, device=keys.device)
        for values in (list(position_of), inverse, counts)
    )
    return pad_unique(order, inverse_, counts_, keys.numel(), padded, table)


def pad_unique(
    order: torch.Tensor,
    inverse: torch.Tensor,
    counts: torch.Tensor,
    size: int,
    padded: bool,
    table: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Results over the valid keys as results over all `size` keys; a `table` without slots."""
    inverse = pad(inverse, size, -1)
    if not padded:
        return order, inverse, counts
    slots = (order.new_empty(0, dtype=torch.int32),) * table
    return pad(order, size, 0), inverse, pad(counts, size, 0), order.new_full((), order.numel()), *slots
