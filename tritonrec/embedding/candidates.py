"""Admission: lookup counts of keys that have no row yet."""

from __future__ import annotations

import torch

from .change_log import ChangeLog
from .device_index import DeviceIndex
from .key_index import KeyIndex
from .selection import Selection, select
from .shared_state import RowColumn


class Candidates:
    """Keys without a row, with the number of steps that looked each up and the last such step.

    Args:
        admission: steps after which a key gets a row.
        window: steps; a key without a lookup for longer is forgotten.
        slots: initial slots of the key structure.
        device: of the keys of a padded table; None: the host's memory.
    """

    def __init__(self, admission: int, window: int, slots: int, device: torch.device | None = None):
        self.admission, self.window = admission, window
        self._padded = device is not None
        self._index = KeyIndex(slots) if device is None else DeviceIndex(slots, device)
        self._columns = {name: RowColumn(torch.int32, device=device) for name in ("counts", "last")}
        self._changes = ChangeLog(device)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, counts and steps."""
        columns = sum(column.nbytes for column in self._columns.values())
        return self._index.nbytes + self._index.free_nbytes + columns

    def forget(self, step: int) -> None:
        """At multiples of `window`, forget keys whose last lookup is more than `window` steps ago.

        Call it before the lookups of `step` are counted. The result is the same at any world size.
        """
        if step % self.window:
            return
        if isinstance(self._index, KeyIndex):
            keys, handles = self._index.items()
            self.erase(keys[step - self._columns["last"][handles] > self.window])
            return
        keys, handles = self._index.slots_in_order()
        old = select((handles >= 0) & (step - self._columns["last"][handles] > self.window), padded=True)
        self._remove(old.take(keys), old.count)

    def count(self, keys: torch.Tensor, step: int, count: torch.Tensor | None = None) -> Selection:
        """Count a lookup at `step` of each of `keys` (K,), distinct.

        Returns:
            Those keys that are now admitted; they are candidates no longer.
        """
        # With a count of 0 where the key is new, so its first lookup makes it 1.
        handles = self._add(keys, count)
        counts = self._columns["counts"][handles] + 1
        self._columns["counts"][handles] = counts
        self._columns["last"][handles] = step
        admitted = select((counts >= self.admission) & (handles >= 0), self._padded)
        self._remove(admitted.take(keys), admitted.count)
        return admitted

    def erase(self, keys: torch.Tensor) -> None:
        """Forget `keys` (K,), distinct."""
        handles = self._index.erase(keys)
        self._index.release(handles[handles >= 0])
        self._changes.erase(keys)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Load a `state`, or the part of it of some keys."""
        handles = self._add(state["keys"])
        for name, column in self._columns.items():
            column[handles] = state[name]

    def state(self) -> dict[str, torch.Tensor]:
        """``keys`` (n,) int64, ascending, their ``counts`` and the ``last`` step of each, both (n,) int32."""
        return self.read(*self._index.items())

    def track_changes(self) -> None:
        """Log changes from now on."""
        self._changes.start(self._index.end)

    def take_changes(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """`state` of the keys that changed since the last call, and the erased keys (n,) int64."""
        keys, handles, erased = self._changes.take(self._index)
        return self.read(keys, handles), erased

    def read(self, keys: torch.Tensor, handles: torch.Tensor) -> dict[str, torch.Tensor]:
        """`state` of `keys` (n,) and their handles (n,)."""
        keys, order = keys.sort()
        return {"keys": keys} | {name: column[handles[order]] for name, column in self._columns.items()}

    def _remove(self, keys: torch.Tensor, count: torch.Tensor | None) -> None:
        """Forget `keys` (K,), distinct, all of which are here."""
        self._index.release(self._index.erase(keys, count), count)
        self._changes.erase(keys, count)

    def _add(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """Handles (K,) of `keys`, with a count of 0 where new."""
        handles, inserted = self._index.find_or_insert(keys, count)
        new = torch.where(inserted, handles, -1)
        self._changes.add(new, self._index.end)
        for column in self._columns.values():
            column.grow(self._index.end)
        self._columns["counts"][new] = 0
        self._changes.mark(handles, keys)
        return handles
