"""Row metadata by handle: scores and access counts, pinned rows, and the log of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .change_log import ChangeLog
from .pinned import PinnedRows
from .row_column import RowColumn


class RowPolicy(Protocol):
    """A policy with one number for each row: `Evictor`, `AccessCounter`."""

    column: str
    """Name of the numbers' column in checkpoints."""

    values: RowColumn

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        ...

    def due(self, step: int) -> bool:
        """Whether the policy acts at `step`."""
        ...

    def add(self, handles: torch.Tensor, keys: torch.Tensor) -> None:
        """Initialise the numbers of new rows, which no step has used; a handle of -1 is left out."""
        ...

    def remove(self, keys: torch.Tensor, which: torch.Tensor) -> None:
        """Handle the erasure of those of `keys` (K,) that `which` (K,) bool marks."""
        ...

    def record(self, keys: torch.Tensor, handles: torch.Tensor, step: int) -> None:
        """Record the access of `step` to the rows of `keys` (K,) and `handles` (K,), distinct or -1."""
        ...


class RowMetadata:
    """All metadata of a table's rows.

    Args:
        policies: those with a number for each row. device: of the table.
    """

    def __init__(self, policies: Sequence[RowPolicy], device: torch.device | None = None):
        self.policies = policies
        self.changes, self.pinned = ChangeLog(device), PinnedRows(device)
        self._last_keys: torch.Tensor | None = torch.empty(0, dtype=torch.int64)  # of the pinned rows

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(policy.nbytes for policy in self.policies) + self.changes.nbytes

    def add(self, handles: torch.Tensor, keys: torch.Tensor, end: int) -> None:
        """Add new rows (K,); all handles are below `end`, and -1 is left out."""
        self.changes.add(handles, end)
        for policy in self.policies:
            policy.values.grow(end)
            policy.add(handles, keys)

    def remove(self, keys: torch.Tensor, which: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """Handle the erasure of those of `keys` (K,) that `which` (K,) bool marks, all before the count."""
        self.changes.erase(keys, count)
        for policy in self.policies:
            policy.remove(keys, which)

    def record(self, keys: torch.Tensor, handles: torch.Tensor, step: int) -> torch.Tensor:
        """Record a lookup of `keys` (K,), whose rows are at `handles` (K,), distinct or -1; returns reserved
        handles that are free now.
        """
        if self.policies:
            self.changes.mark(self.pinned.last, self._last_keys)  # their column `recent` changes
            self._last_keys = keys
        self.changes.mark(handles, keys)
        for policy in self.policies:
            policy.record(keys, handles, step)
        return self.pinned.advance(handles)

    def read(self, handles: torch.Tensor) -> dict[str, torch.Tensor]:
        """Metadata (K,) of the rows of `handles` (K,) by column of a checkpoint."""
        columns = {policy.column: policy.values[handles] for policy in self.policies}
        if self.policies:
            columns["recent"] = torch.isin(handles, self.pinned.last)
        return columns

    def read_by_handle(self, handles: torch.Tensor, end: int) -> dict[str, torch.Tensor]:
        """As `read`, by column values (end,) by handle, of which only those of `handles` are written."""
        columns = {}
        for name, values in self.read(handles).items():
            columns[name] = torch.empty(end, dtype=values.dtype, device=values.device)
            columns[name][handles] = values
        return columns

    def copy(self, end: int) -> dict[str, torch.Tensor]:
        """By column of a checkpoint a copy of the values (end,) by handle."""
        columns = {policy.column: policy.values.rows[:end].clone() for policy in self.policies}
        if self.policies:
            columns["recent"] = torch.zeros(end, dtype=torch.bool, device=self.pinned.last.device)
            columns["recent"][self.pinned.last[self.pinned.last >= 0]] = True
        return columns

    def restore(self, handles: torch.Tensor, columns: dict[str, torch.Tensor]) -> None:
        """Load the result of `read`."""
        for policy in self.policies:
            policy.values[handles] = columns[policy.column]
        if self.policies:
            self.pinned.restore(handles[columns["recent"]])
            self._last_keys = None
