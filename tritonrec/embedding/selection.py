"""Positions where a mask holds and distinct keys, with or without a wait for their number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels import launch


@dataclass(frozen=True)
class Selection:
    """Chosen positions of a list.

    Args:
        positions: (n,) int64, ascending; with a `count` as many as the list has, the chosen ones first.
        count: () int64, the number of chosen positions where only the device knows it; None: all of them.
    """

    positions: torch.Tensor
    count: torch.Tensor | None

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """The chosen `values` first."""
        return values[self.positions]

    def put(self, values: torch.Tensor, chosen: torch.Tensor) -> None:
        """Write `chosen`, as long as the positions, to the chosen places of `values`."""
        if self.count is not None:
            inside = torch.arange(len(self.positions), device=values.device) < self.count
            chosen = torch.where(inside, chosen, values[self.positions])
        values[self.positions] = chosen


def select(mask: torch.Tensor, padded: bool) -> Selection:
    """The positions where `mask` (n,) bool holds; `padded`: nothing waits for their number."""
    if not padded:
        return Selection(mask.nonzero().squeeze(1), None)
    positions, counts = launch.counting_sort((~mask).to(torch.int64), 2)
    return Selection(positions, counts[0])


def valid(size: int, count: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """(size,) bool, true before the count."""
    if count is None:
        return torch.ones(size, dtype=torch.bool, device=device)
    return torch.arange(size, device=device) < count


def trimmed(values: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """`values` before the count; waits for it."""
    return values if count is None else values[: int(count)]


@dataclass(frozen=True)
class Distinct:
    """The distinct keys of a list.

    Args:
        keys: (U,) int64 in order of first occurrence; with a `count` as many as the list has.
        inverse: (n,) int64, occurrence -> key.
        count: () int64, U where only the device knows it; None: all keys.
        table: of the keys, for `ops.intersect`; None: it builds its own.
    """

    keys: torch.Tensor
    inverse: torch.Tensor
    count: torch.Tensor | None
    table: torch.Tensor | None = None


def distinct(keys: torch.Tensor, padded: bool, table: bool = False) -> Distinct:
    """The distinct ones of `keys` (n,) int64; `padded`: no wait for their number; `table`: with one."""
    if not padded:
        found, inverse, _counts = launch.unique(keys)
        return Distinct(found, inverse, None)
    if table:
        found, inverse, _counts, count, slots = launch.unique_table(keys)
        return Distinct(found, inverse, count, slots)
    found, inverse, _counts, count = launch.unique_padded(keys)
    return Distinct(found, inverse, count)
