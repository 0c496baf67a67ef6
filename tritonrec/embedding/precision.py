"""Precision tiers: the choice of rows to store in 16 bits, and their rounding (MTGRBoost, section 5.2)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .interface import EmbeddingTable
from .policy import PrecisionTiers
from .row_column import RowColumn
from .select import unpinned_rows


class AccessCounter:
    """Counts, up to 255, the steps that use each row; rows below the threshold are in low precision."""

    column = "heat"

    def __init__(self, tiers: PrecisionTiers, device: torch.device | None = None):
        self.tiers = tiers
        self.values = RowColumn(torch.uint8, absent=255, device=device)  # below no threshold

    def due(self, step: int) -> bool:
        """Whether the counts are halved at `step`."""
        return step % self.tiers.every == 0

    def add(self, handles: torch.Tensor, keys: torch.Tensor) -> None:
        """Initialise the counts of new rows, which no step has used."""
        self.values[handles] = 0

    def remove(self, keys: torch.Tensor) -> None:
        """Nothing to do for erased rows."""

    def record(self, handles: torch.Tensor, step: int) -> None:
        """Record the access of `step` to the rows of `handles` (K,), distinct or -1."""
        counts = self.values[handles]
        self.values[handles] = counts + (counts < 255)

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        """(K,) bool, whether to store each row of `handles` (K,) in 16 bits; False for a handle of -1."""
        return self.values[handles] < self.tiers.threshold

    def used(self) -> torch.Tensor:
        """Handles (n,) of rows with a count above 0."""
        return self.values.rows.nonzero().squeeze(1)

    def halve(self) -> None:
        """Halve all counts."""
        self.values.rows.bitwise_right_shift_(1)

    def demotable(self, rows: EmbeddingTable, pinned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,), ascending, and handles (n,) of float32 rows below the threshold, none `pinned`."""
        keys, handles, counts = unpinned_rows(rows, pinned, self.values)
        below = counts < self.tiers.threshold
        keys, handles = keys[below].to(rows.device), handles[below].to(rows.device)
        full = ~rows.in_low_precision(handles)
        keys, order = keys[full].sort()  # a table's own order differs from process to process
        return keys, handles[full][order]


def round_low(values: torch.Tensor, dim: int, describe: Callable[[int], str]) -> torch.Tensor:
    """`values` (K, row_width) float32 with weights rounded to float16 and state to bfloat16, as float32.

    Raises ValueError where a finite value overflows; ``describe(i)`` names row i in the message.
    """
    weights, state = values[:, :dim].to(torch.float16), values[:, dim:].to(torch.bfloat16)
    rounded = torch.cat([weights.to(torch.float32), state.to(torch.float32)], 1)
    overflows = (values.isfinite() & ~rounded.isfinite()).nonzero()
    if len(overflows):
        row, column = overflows[0].tolist()
        raise ValueError(
            f"{describe(row)}, and {float(values[row, column])} in its column {column} does not fit 16 bits; "
            "lower the learning rate, or the threshold of PrecisionTiers so that such rows stay in float32"
        )
    return rounded
