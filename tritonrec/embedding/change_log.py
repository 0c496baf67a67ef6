"""Rows changed and keys erased since the last checkpoint."""

from __future__ import annotations

import torch

from .row_column import RowColumn
from .selection import trimmed


class ChangeLog:
    """Changed rows by handle, and erased keys; off until `start`."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._changed: RowColumn | None = None
        self._erased: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the marks."""
        return 0 if self._changed is None else self._changed.nbytes

    @property
    def active(self) -> bool:
        """Whether changes are recorded."""
        return self._changed is not None

    def start(self, end: int) -> None:
        """Clear the log and record changes from now on; all handles so far are below `end`."""
        self._changed, self._erased = RowColumn(torch.bool, end=end, device=self._device), []

    def grow(self, end: int) -> None:
        """Make room for handles below `end`."""
        if self._changed is not None:
            self._changed.grow(end)

    def mark(self, handles: torch.Tensor) -> None:
        """Mark the rows of `handles` (K,) as changed; -1 is skipped."""
        if self._changed is not None:
            self._changed[handles] = True

    def erase(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """Record the erasure of `keys` (K,)."""
        if self._changed is not None:
            self._erased.append((keys, count))

    def changed(self, handles: torch.Tensor) -> torch.Tensor:
        """(K,) bool, which rows of `handles` (K,) changed. Raises ValueError where `start` was not called."""
        if self._changed is None:
            raise ValueError("changes are not logged: call track_changes() first")
        return self._changed[handles]

    def erased(self) -> torch.Tensor:
        """Erased keys (n,) int64, ascending, distinct; some may have been inserted again since."""
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        return torch.cat([none, *(trimmed(*each) for each in self._erased)]).unique()
