"""A table in host memory: a key index and a row storage (MTGRBoost, section 4.1)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from .key_index import KeyIndex
from .row_storage import RowStorage


class HostTable:
    """An `EmbeddingTable` of a key index and a row storage, which grow without moving a row.

    Args:
        storage: of the rows.
        initial_rows: keys (K,) -> their initial rows (K, row_width) float32.
        slots: initial slots of the key structure, a power of two.
    """

    def __init__(
        self, storage: RowStorage, initial_rows: Callable[[torch.Tensor], torch.Tensor], slots: int = 1024
    ):
        self._storage, self._initial_rows, self._index = storage, initial_rows, KeyIndex(slots)
        self._lock = threading.Lock()  # for the index
        # calls that do not need the index
        self.gather, self.update = storage.gather, storage.update
        self.in_low_precision = storage.in_low_precision

    def __len__(self) -> int:
        return len(self._index)

    @property
    def end(self) -> int:
        """See `EmbeddingTable.end`."""
        return self._index.end

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """See `EmbeddingTable.find`."""
        with self._lock:
            return self._index.find(keys)

    def find_or_insert(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `EmbeddingTable.find_or_insert`."""
        with self._lock:
            handles, inserted = self._index.find_or_insert(keys)
            new = inserted.nonzero().squeeze(1)
            if len(new):
                try:
                    self._storage.add(handles[new], self._index.end)
                except BaseException:
                    self._index.release(self._index.erase(keys[new]))
                    raise
                self._storage.update(handles[new], self._initial_rows(keys[new]))
        return handles, inserted

    def erase(self, keys: torch.Tensor) -> torch.Tensor:
        """See `EmbeddingTable.erase`."""
        with self._lock:
            handles = self._index.erase(keys)
            self._storage.release(handles[handles >= 0])
            return handles

    def release(self, handles: torch.Tensor) -> None:
        """See `EmbeddingTable.release`."""
        with self._lock:
            self._index.release(handles)

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `EmbeddingTable.items`."""
        with self._lock:
            return self._index.items()

    def grow(self, rows: int) -> None:
        """See `EmbeddingTable.grow`."""
        with self._lock:
            self._index.grow(rows)
            self._storage.grow(self._index.end + rows)

    @property
    def moved(self) -> tuple[int, int]:
        """See `EmbeddingTable.moved`."""
        return self._storage.moved

    def memory(self) -> dict[str, int]:
        """See `EmbeddingTable.memory`: key_structure, metadata, fp32_values, fp16_values, saved_by_fp16."""
        stored = self._storage.memory()
        stored["metadata"] += self._index.free_nbytes
        return {"key_structure": self._index.nbytes, **stored}
