"""Precision tiers: the choice of rows to store in 16 bits, and their rounding (MTGRBoost, section 5.2)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels.deferred import NONE, first_bad
from ..kernels.dispatch import on_host
from ..kernels.padding import report
from ..settings import bytes_of
from .key_layout import KeyLayout
from .metadata import RowPolicy
from .policy import ROW_BYTES, PrecisionTiers
from .pools import Arriving
from .select import (
    AllReduce,
    chosen_slots,
    in_order_of_keys,
    select_smallest,
    smallest_slots,
    unpinned_rows,
    unpinned_slots,
)
from .selection import valid
from .shared_state import RowColumn
from .stored_table import StoredTable


class AccessCounter(RowPolicy):
    """Counts, up to 255, the steps that use each row; rows below the threshold are in low precision, or the
    least used ones of a table beyond its size.

    Args:
        tiers: see `PrecisionTiers`. layout: maps keys to logical tables. row_width: of the table.
    """

    def __init__(
        self,
        tiers: PrecisionTiers,
        device: torch.device | None = None,
        layout: KeyLayout | None = None,
        row_width: int = 0,
    ):
        self.by_size = isinstance(tiers.threshold, str)
        # the count of a handle of -1 is below no threshold
        super().__init__(
            "heat", tiers.every, RowColumn(torch.uint8, absent=255, device=device),
            layout if self.by_size else None, device,
        )  # fmt: skip
        self._size, self._row_width = bytes_of(tiers.threshold) if self.by_size else 0, row_width
        self.threshold = tiers.threshold if isinstance(tiers.threshold, int) else 0  # no count is below

    def record(self, keys: torch.Tensor, handles: torch.Tensor, step: int) -> None:
        counts = self.values[handles]
        self.values[handles] = counts + (counts < 255)

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        """(K,) bool, whether to store each row of `handles` (K,) in 16 bits; False for a handle of -1."""
        return self.values[handles] < self.threshold

    def loaded_low(self, handles: torch.Tensor) -> torch.Tensor:
        """As `in_low_precision`, of rows that are loaded: by a size all that 16 bits hold, which were there,
        so that a table does not outgrow its memory until the next pass.
        """
        return handles >= 0 if self.by_size else self.in_low_precision(handles)

    def too_many(self, all_reduce: AllReduce | None) -> torch.Tensor:
        """How many rows of each logical table are to be in 16 bits by a size, (m,) int64; (0,) without one.
        Collective by a size.
        """
        if not self.by_size:
            return self._sizes
        rows, low = self.sizes(all_reduce), 2 * self._row_width
        left = self._size - rows * (low + ROW_BYTES)  # were all of them in 16 bits
        return (rows - left.clamp(min=0) // low).clamp(min=0)

    def used(self) -> torch.Tensor:
        """Handles (n,) of rows with a count above 0, or -1."""
        counts = self.values.rows
        return torch.where(counts > 0, torch.arange(len(counts), device=counts.device), -1)

    def halve(self) -> None:
        """Halve all counts."""
        self.values.rows.bitwise_right_shift_(1)

    def foresee(
        self, rows: StoredTable, step: int, in_buffers: int, all_reduce: AllReduce | None
    ) -> Arriving:
        """First that, and by a size `too_many` behind it."""
        _keys, handles = rows.slots_in_order()
        # Counts as they will be after the halving; updates of rows in buffers may make them float32 before.
        below = handles >= 0
        if not self.by_size:
            below &= self.values[handles] >> 1 < self.threshold
        most = (below & ~rows.in_low_precision(handles)).sum().view(1) + in_buffers
        return Arriving(torch.cat([most, self.too_many(all_reduce)]))

    def choose(
        self,
        rows: StoredTable,
        pinned: torch.Tensor,
        most: list[int],
        all_reduce: AllReduce | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,), ascending, and handles (n,) of float32 rows below the threshold, or among the least used
        by a size, none `pinned` (P,).

        `most` is what `foresee` has found, whose first number a table on the host does not need. One that is
        padded waits for nothing: handles are -1 behind the last. Collective by a size.
        """
        if self.by_size and not any(most[1:]):
            return pinned[:0], pinned[:0]
        if rows.padded:
            keys, handles, below = unpinned_slots(rows, pinned)
            heat = self.values[handles]
            if self.by_size:
                members, _ids = self._layout.unpack(keys)
                positions, count = smallest_slots(heat.int(), keys, members, below, most[1:], all_reduce)
                keys, handles = keys[positions], handles[positions]
                below = valid(len(keys), count, keys.device)
            else:
                below &= heat < self.threshold
            positions, count = chosen_slots(below & ~rows.in_low_precision(handles), most[0])
            keys, positions = in_order_of_keys(keys[positions], positions, count)
            return keys, torch.where(valid(len(keys), count, keys.device), handles[positions], -1)
        keys, handles, counts = unpinned_rows(rows, pinned, self.values)
        below = counts < self.threshold
        if self.by_size:
            members, ids = self._layout.unpack(keys)
            below = select_smallest(
                counts, ids, members, torch.tensor(most[1:], dtype=torch.int64, device="cpu"), all_reduce
            )
        keys, handles = keys[below], handles[below]
        full = ~rows.in_low_precision(handles)
        keys, order = keys[full].sort()  # a table's own order differs from process to process
        return keys, handles[full][order]


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
