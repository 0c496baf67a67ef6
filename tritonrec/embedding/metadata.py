"""Row metadata: the numbers of policies, pinned rows and the log of changes, by handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .change_log import ChangeLog
from .pinned import PinnedRows
from .row_column import RowColumn


class RowPolicy(Protocol):
    """A policy that keeps one number for each row: `Evictor`, `AccessCounter`."""

    column: str
    """Name of the number in checkpoints."""

    values: RowColumn

    def due(self, step: int) -> bool:
        """Whether the policy acts at `step`."""
        ...

    def add(self, handles: torch.Tensor, keys: torch.Tensor) -> None:
        """New rows that no step has used."""
        ...

    def remove(self, keys: torch.Tensor) -> None:
        """Rows that were erased."""
        ...

    def record(self, handles: torch.Tensor, step: int) -> None:
        """The rows of `handles` (K,), distinct, are used at `step`."""
        ...


class RowMetadata:
    """All metadata of a table's rows.

    Args:
        policies: those that keep a number for each row.
    """

    def __init__(self, policies: Sequence[RowPolicy]):
        self.policies = policies
        self.changes, self.pinned = ChangeLog(), PinnedRows()

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(policy.values.nbytes for policy in self.policies) + self.changes.nbytes

    def add(self, handles: torch.Tensor, keys: torch.Tensor, end: int) -> None:
        """New rows; all handles are below `end`."""
        self.changes.grow(end)
        self.changes.mark(handles)
        for policy in self.policies:
            policy.values.grow(end)
            policy.add(handles, keys)

    def remove(self, keys: torch.Tensor) -> None:
        """Rows that were erased."""
        self.changes.erase(keys)
        for policy in self.policies:
            policy.remove(keys)

    def record(self, handles: torch.Tensor, step: int) -> torch.Tensor:
        """A lookup has found the rows of `handles` (K,); returns reserved handles that are free now."""
        if self.policies:
            self.changes.mark(self.pinned.last)  # recent no longer
        self.changes.mark(handles)
        for policy in self.policies:
            policy.record(handles, step)
        return self.pinned.advance(handles)

    def read(self, handles: torch.Tensor) -> dict[str, torch.Tensor]:
        """The numbers of the rows of `handles` (K,) by column, as checkpoints hold them."""
        columns = {policy.column: policy.values[handles] for policy in self.policies}
        if self.policies:
            columns["recent"] = torch.isin(handles, self.pinned.last)
        return columns

    def restore(self, handles: torch.Tensor, columns: dict[str, torch.Tensor]) -> None:
        """Take over what `read` returned."""
        for policy in self.policies:
            policy.values[handles] = columns[policy.column]
        if self.policies:
            self.pinned.restore(handles[columns["recent"]])
