"""Keys that have been asked for, but not often enough to get a row."""

from __future__ import annotations

import torch

from .chunks import Chunks
from .key_index import KeyIndex


class Candidates:
    """How often keys without a row have been asked for: a count each, and no values.

    Args:
        admission: requests that a key needs.
        slots: of its key structure at the start.
    """

    def __init__(self, admission: int, slots: int):
        self.admission = admission
        self._index = KeyIndex(slots)
        self._counts = Chunks(0, torch.int32, 65536, {"count": torch.int32})

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and counts."""
        return self._index.nbytes + self._counts.note_bytes

    def count(self, keys: torch.Tensor) -> torch.Tensor:
        """Count one request for each of `keys` (K,), distinct.

        Returns:
            (R,) int64, positions of those that are now admitted; they are candidates no longer.
        """
        rows = self._add(keys)
        counts = self._counts.notes["count"]
        counts[rows] += 1
        admitted = (counts[rows] >= self.admission).nonzero().squeeze(1)
        self.forget(keys[admitted])
        return admitted

    def forget(self, keys: torch.Tensor) -> None:
        """Drop what was counted of `keys` (K,), distinct."""
        rows = self._index.erase(keys)
        self._counts.give_back(rows[rows >= 0])

    def has(self, keys: torch.Tensor) -> torch.Tensor:
        """(K,) bool, which of `keys` have been counted."""
        return self._index.find(keys) >= 0

    def keys(self) -> torch.Tensor:
        """All of them (n,) int64, ascending."""
        return self._index.items()[0].sort().values

    def columns(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """``keys`` and ``counts`` (n,) int32 of candidates."""
        return {"keys": keys, "counts": self._counts.notes["count"][self._index.find(keys)]}

    def load(self, keys: torch.Tensor, counts: torch.Tensor) -> None:
        """Set the counts of `keys` (n,), distinct."""
        rows = self._add(keys)
        self._counts.notes["count"][rows] = counts

    def _add(self, keys: torch.Tensor) -> torch.Tensor:
        """Row numbers (K,) of `keys`, with a count of 0 where new."""
        store = self._counts
        rows, inserted = self._index.insert(keys, store.used, store.next_free(len(keys)))
        new = rows[inserted]
        store.claim(len(new))
        store.notes["count"][new] = 0
        return rows
