"""Precision tiers: the choice of rows to store in 16 bits, and their rounding (MTGRBoost, section 5.2)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels.deferred import NONE, first_bad
from ..kernels.dispatch import on_host
from ..kernels.padding import report
from .policy import PrecisionTiers
from .pools import Arriving
from .select import chosen_slots, in_order_of_keys, unpinned_rows, unpinned_slots
from .selection import valid
from .shared_state import RowColumn
from .stored_table import StoredTable


class AccessCounter:
    """Counts, up to 255, the steps that use each row; rows below the threshold are in low precision."""

    column = "heat"

    def __init__(self, tiers: PrecisionTiers, device: torch.device | None = None):
        self.tiers = tiers
        self.values = RowColumn(torch.uint8, absent=255, device=device)  # below no threshold

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.values.nbytes

    def due(self, step: int) -> bool:
        """Whether the counts are halved at `step`."""
        return step % self.tiers.every == 0

    def add(self, handles: torch.Tensor, keys: torch.Tensor) -> None:
        """Initialise the counts of new rows, which no step has used."""
        self.values[handles] = 0

    def remove(self, keys: torch.Tensor, which: torch.Tensor) -> None:
        """Nothing to do for erased rows."""

    def record(self, keys: torch.Tensor, handles: torch.Tensor, step: int) -> None:
        """Record the access of `step` to the rows of `handles` (K,), distinct or -1."""
        counts = self.values[handles]
        self.values[handles] = counts + (counts < 255)

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        """(K,) bool, whether to store each row of `handles` (K,) in 16 bits; False for a handle of -1."""
        return self.values[handles] < self.tiers.threshold

    def used(self) -> torch.Tensor:
        """Handles (n,) of rows with a count above 0, or -1."""
        counts = self.values.rows
        return torch.where(counts > 0, torch.arange(len(counts), device=counts.device), -1)

    def halve(self) -> None:
        """Halve all counts."""
        self.values.rows.bitwise_right_shift_(1)

    def demotable(self, rows: StoredTable, pinned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,), ascending, and handles (n,) of float32 rows below the threshold, none `pinned`."""
        keys, handles, counts = unpinned_rows(rows, pinned, self.values)
        below = counts < self.tiers.threshold
        keys, handles = keys[below], handles[below]
        full = ~rows.in_low_precision(handles)
        keys, order = keys[full].sort()  # a table's own order differs from process to process
        return keys, handles[full][order]

    def foresee(self, rows: StoredTable, in_buffers: int) -> Arriving:
        """Of the next halving, by a table that is padded: at most how many rows it makes `demotable`.

        Updates of the rows `in_buffers` may come before it, which store any of them in float32.
        """
        _keys, handles = rows.slots_in_order()
        # Counts as they will be after the halving.
        below = (handles >= 0) & (self.values[handles] >> 1 < self.tiers.threshold)
        return Arriving((below & ~rows.in_low_precision(handles)).sum().view(1) + in_buffers)

    def demotable_padded(
        self, rows: StoredTable, pinned: torch.Tensor, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`demotable` for a table that is padded, without a wait: handles are -1 behind the last."""
        keys, handles, among = unpinned_slots(rows, pinned)
        below = among & (self.values[handles] < self.tiers.threshold) & ~rows.in_low_precision(handles)
        positions, count = chosen_slots(below, most)
        keys, positions = in_order_of_keys(keys[positions], positions, count)
        return keys, torch.where(valid(len(keys), count, keys.device), handles[positions], -1)


def round_low(
    values: torch.Tensor, low: torch.Tensor, dim: int, describe: Callable[[int], str]
) -> torch.Tensor:
    """`values` (K, row_width) float32, where `low` (K,) bool says so with weights rounded to float16 and
    state to bfloat16, as float32.

    Raises ValueError where a finite value overflows; ``describe(i)`` names row i in the message.
    """
    if not len(values):
        return values
    weights, state = values[:, :dim].to(torch.float16), values[:, dim:].to(torch.bfloat16)
    rounded = torch.cat([weights.to(torch.float32), state.to(torch.float32)], 1)
    overflows = (values.isfinite() & ~rounded.isfinite() & low.unsqueeze(1)).view(-1)

    def message(row: int, what: str) -> ValueError:
        return ValueError(
            f"{describe(row)}, and {what} does not fit 16 bits; lower the learning rate, or the threshold of "
            "PrecisionTiers so that such rows stay in float32"
        )

    def late(code: int) -> ValueError:
        row, column = divmod(code - 1, width)
        return message(row, f"its value in column {column}")

    def error(code: int) -> ValueError:
        row, column = divmod(code - 1, width)
        return message(row, f"{float(values[row, column])} in its column {column}")

    width = values.shape[1]
    first = torch.where(overflows.any(), overflows.to(torch.int8).argmax(), NONE).view(1)
    report(first_bad(first) if on_host(values) else first, None, error, late)
    return torch.where(low.unsqueeze(1), rounded, values)
