"""Keys that have been asked for, but not often enough to get a row."""

from __future__ import annotations

import torch

from .chunks import Chunks
from .key_index import KeyIndex


class Candidates:
    """How often keys without a row have been asked for, and the last step that did: two notes, no values.

    Args:
        admission: requests that a key needs.
        window: steps; `sweep` forgets what none of as many has asked for.
        slots: of its key structure at the start.
    """

    def __init__(self, admission: int, window: int, slots: int):
        self.admission, self.window = admission, window
        self._index = KeyIndex(slots)
        self._notes = Chunks(0, torch.int32, 65536, {"counts": torch.int32, "last": torch.int32})

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, counts and steps."""
        return self._index.nbytes + self._notes.note_bytes

    def sweep(self, step: int) -> torch.Tensor:
        """Forget what is due at `step`, before its requests are counted; the keys (n,) int64 that went.

        A function of the step and of the key's own requests: the same at any world size.
        """
        if step % self.window:
            return torch.empty(0, dtype=torch.int64)
        keys, rows = self._index.items()
        forgotten = keys[step - self._notes.notes["last"][rows] > self.window]
        self.forget(forgotten)
        return forgotten

    def count(self, keys: torch.Tensor, step: int) -> torch.Tensor:
        """Count one request of `step` for each of `keys` (K,), distinct.

        Returns:
            (R,) int64, positions of those that are now admitted; they are candidates no longer.
        """
        rows = self._add(keys)
        counts = self._notes.notes["counts"]
        counts[rows] += 1
        self._notes.notes["last"][rows] = step
        admitted = (counts[rows] >= self.admission).nonzero().squeeze(1)
        self.forget(keys[admitted])
        return admitted

    def forget(self, keys: torch.Tensor) -> None:
        """Drop what was counted of `keys` (K,), distinct."""
        rows = self._index.erase(keys)
        self._notes.give_back(rows[rows >= 0])

    def has(self, keys: torch.Tensor) -> torch.Tensor:
        """(K,) bool, which of `keys` have been counted."""
        return self._index.find(keys) >= 0

    def keys(self) -> torch.Tensor:
        """All of them (n,) int64, ascending."""
        return self._index.items()[0].sort().values

    def columns(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """``keys``, ``counts`` and the ``last`` step that asked, both (n,) int32, of candidates."""
        rows = self._index.find(keys)
        return {"keys": keys, **{name: note[rows] for name, note in self._notes.notes.items()}}

    def load(self, columns: dict[str, torch.Tensor]) -> None:
        """Take over `columns`."""
        rows = self._add(columns["keys"])
        for name, note in self._notes.notes.items():
            note[rows] = columns[name]

    def _add(self, keys: torch.Tensor) -> torch.Tensor:
        """Row numbers (K,) of `keys`, with a count of 0 where new."""
        store = self._notes
        rows, inserted = self._index.insert(keys, store.used, store.next_free(len(keys)))
        new = rows[inserted]
        store.claim(len(new))
        store.notes["counts"][new] = 0
        return rows
