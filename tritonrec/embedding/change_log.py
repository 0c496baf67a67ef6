"""Rows changed and keys erased since the last checkpoint."""

from __future__ import annotations

import torch

from .row_column import RowColumn


class ChangeLog:
    """Changed rows by handle, and erased keys; off until `start`."""

    def __init__(self) -> None:
        self._changed: RowColumn | None = None
        self._erased: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the marks."""
        return 0 if self._changed is None else self._changed.nbytes

    def start(self, end: int) -> None:
        """Clear the log and record changes from now on; all handles so far are below `end`."""
        self._changed, self._erased = RowColumn(torch.bool, end=end), []

    def grow(self, end: int) -> None:
        """Make room for handles below `end`."""
        if self._changed is not None:
            self._changed.grow(end)

    def mark(self, handles: torch.Tensor) -> None:
        """Mark the rows of `handles` (K,) as changed; -1 is skipped."""
        if self._changed is not None:
            self._changed[handles] = True

    def erase(self, keys: torch.Tensor) -> None:
        """Record the erasure of `keys` (K,)."""
        if self._changed is not None:
            self._erased.append(keys)

    def changed(self, handles: torch.Tensor) -> torch.Tensor:
        """(K,) bool, which rows of `handles` (K,) changed. Raises ValueError where `start` was not called."""
        if self._changed is None:
            raise ValueError("changes are not logged: call track_changes() first")
        return self._changed[handles]

    def erased(self) -> torch.Tensor:
        """Erased keys (n,) int64, ascending, distinct; some may have been inserted again since."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *self._erased]).unique()
