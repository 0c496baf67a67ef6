"""Rows changed and keys erased since the last checkpoint."""

from __future__ import annotations

import torch

from .device_index import DeviceIndex
from .key_index import KeyIndex
from .row_column import RowColumn
from .selection import trimmed
from .stored_table import StoredTable


class ChangeLog:
    """Changed rows and erased keys; off until `start`.

    In host memory the log has each changed row once, with its key: what `take` costs goes by the changed
    rows. Where a key is not known to who marks a row, `take` searches all rows, as on a device.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._changed: RowColumn | None = None
        self._marked: list[tuple[torch.Tensor | None, torch.Tensor]] = []  # in host memory: keys, handles
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
        self._changed = RowColumn(torch.bool, end=end, device=self._device)
        self._marked, self._erased = [], []

    def add(self, handles: torch.Tensor, end: int) -> None:
        """Make room for new rows at `handles` (K,), or -1, below `end`; no mark is theirs yet.

        A mark of a row that was erased, from its handle in a buffer, is of another key.
        """
        if self._changed is not None:
            self._changed.grow(end)
            self._changed[handles] = False

    def mark(self, handles: torch.Tensor, keys: torch.Tensor | None = None) -> None:
        """Mark the rows of `handles` (K,), which belong to `keys` (K,), as changed; -1 is skipped."""
        if self._changed is None:
            return
        if self._device is None:
            new = (handles >= 0) & ~self._changed[handles]
            handles = handles[new]
            if not len(handles):
                return
            self._marked.append((None if keys is None else keys[new], handles))
        self._changed[handles] = True

    def erase(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """Record the erasure of `keys` (K,)."""
        if self._changed is not None:
            self._erased.append((keys, count))

    def take(
        self, rows: StoredTable | KeyIndex | DeviceIndex
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What changed in `rows` since the start or the last call.

        Returns:
            keys (n,) int64, ascending, and handles (n,) of changed rows that are there, and erased keys (m,)
            int64, ascending, that are not.
        """
        erased = self.erased()
        erased = erased[rows.find(erased) < 0]
        none = torch.empty(0, dtype=torch.int64)
        marked = [none, *(handles for _, handles in self._marked)]
        known = [none, *(keys for keys, _ in self._marked if keys is not None)]
        if self._device is None and self._changed is not None and len(known) == len(marked):
            keys, handles = torch.cat(known), torch.cat(marked)
            self._changed[handles] = False
            there = rows.find(keys) == handles
            keys, order = keys[there].sort()
            once = torch.ones(len(keys), dtype=torch.bool)  # erased and inserted again, a row is there twice
            torch.ne(keys[1:], keys[:-1], out=once[1:])
            keys, handles = keys[once], handles[there][order][once]
            self._marked, self._erased = [], []
        else:
            keys, handles = rows.items()
            keys, order = keys.sort()
            handles = handles[order]
            changed = self.changed(handles)
            keys, handles = keys[changed], handles[changed]
            self.start(rows.end)
        return keys, handles, erased

    def changed(self, handles: torch.Tensor) -> torch.Tensor:
        """(K,) bool, which rows of `handles` (K,) changed. Raises ValueError where `start` was not called."""
        if self._changed is None:
            raise ValueError("changes are not logged: call track_changes() first")
        return self._changed[handles]

    def erased(self) -> torch.Tensor:
        """Erased keys (n,) int64, ascending, distinct; some may have been inserted again since."""
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        return torch.cat([none, *(trimmed(*each) for each in self._erased)]).unique()
