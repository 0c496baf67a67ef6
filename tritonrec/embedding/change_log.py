"""Rows changed and keys erased since a reader, such as a checkpoint, last took them."""

from __future__ import annotations

import numpy as np
import torch

from .device_index import DeviceIndex
from .key_index import KeyIndex
from .selection import trimmed
from .shared_state import RowColumn
from .stored_table import StoredTable

CHECKPOINT = "checkpoint"
"""The reader that saves checkpoints of changes."""


class ChangeLog:
    """Changed rows and erased keys; off until `start`.

    In host memory the log has each changed row once, with its key: what `take` costs goes by the changed
    rows. Where a key is not known to who marks a row, `take` searches all rows, as on a device.

    Each reader gets every change once: what one takes, the others have still to take, by its keys.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._changed: RowColumn | None = None
        self._marked: list[tuple[torch.Tensor | None, torch.Tensor]] = []  # in host memory: keys, handles
        self._erased: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._left: dict[str, list[torch.Tensor]] = {}  # by reader, keys that others have taken since

    @property
    def nbytes(self) -> int:
        """Bytes of the marks."""
        return 0 if self._changed is None else self._changed.nbytes

    @property
    def active(self) -> bool:
        """Whether changes are recorded."""
        return self._changed is not None

    @property
    def readers(self) -> list[str]:
        """Who takes changes."""
        return list(self._left)

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

    def restart(self, rows: StoredTable | KeyIndex | DeviceIndex, reader: str = CHECKPOINT) -> None:
        """As `start`, for one `reader`: others keep what they have not taken."""
        if any(other != reader for other in self._left):
            self.take(rows, reader)
        else:
            self.start(rows.end)
        self._left[reader] = []

    def stop(self, reader: str) -> None:
        """Keep nothing for `reader` any more; off after the last one."""
        self._left.pop(reader, None)
        if not self._left:
            self._changed, self._marked, self._erased = None, [], []

    def continue_from(self, other: ChangeLog) -> None:
        """Take over what readers of another log have still to take; all its rows are erased here."""
        for reader, keys in other._left.items():
            self._left[reader] += keys

    def take(
        self, rows: StoredTable | KeyIndex | DeviceIndex, reader: str = CHECKPOINT
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What changed in `rows` since the start or the last call of this `reader`.

        Returns:
            keys (n,) int64, ascending, and handles (n,) of changed rows that are there, and erased keys (m,)
            int64, ascending, that are not.
        """
        keys, handles, erased = self._take(rows)
        # What this reader takes is no longer marked; the others
        # find it by key, whatever becomes of its row until then.
        for other, left in self._left.items():
            if other != reader:
                left += [keys, erased]
        missed = self._left.get(reader)
        if missed:
            self._left[reader] = []
            known = torch.cat([keys, erased, *missed]).unique()
            handles = rows.find(known)
            there = handles >= 0
            keys, handles, erased = known[there], handles[there], known[~there]
        return keys, handles, erased

    def _take(
        self, rows: StoredTable | KeyIndex | DeviceIndex
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        erased = self.erased()
        erased = erased[rows.find(erased) < 0]
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        marked = [none, *(handles for _, handles in self._marked)]
        known = [none, *(keys for keys, _ in self._marked if keys is not None)]
        if self._device is None and self._changed is not None and len(known) == len(marked):
            self._changed[torch.cat(marked)] = False
            # numpy's sort takes a tenth of the time of torch's, which also starts threads.
            keys = torch.from_numpy(np.sort(torch.cat(known).numpy()))
            # Erased and inserted again, a row is there twice.
            once = torch.ones(len(keys), dtype=torch.bool, device="cpu")
            torch.ne(keys[1:], keys[:-1], out=once[1:])
            keys = keys[once]
            handles = rows.find(keys)
            there = handles >= 0  # a marked row may have been erased since
            keys, handles = keys[there], handles[there]
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
        none = torch.empty(0, dtype=torch.int64, device=self._device or "cpu")
        return torch.cat([none, *(trimmed(*each) for each in self._erased)]).unique()
