"""A key index and a row storage, in host or in device memory, as one table (MTGRBoost, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels.dispatch import usable_device
from .cached_storage import CachedStorage
from .device_index import DeviceIndex
from .key_index import KeyIndex
from .policy import Placement
from .row_checksums import RowChecksums
from .row_storage import RowStorage, TieredStorage
from .turn import Turn


class StoredTable:
    """An `EmbeddingTable` of a key index and a row storage, which grow without moving a row.

    Args:
        index, storage: on one device.
        initial_rows: keys (K,) -> their initial rows (K, row_width) float32.
    """

    def __init__(
        self,
        index: KeyIndex | DeviceIndex,
        storage: RowStorage,
        initial_rows: Callable[[torch.Tensor], torch.Tensor],
    ):
        self._index, self._storage, self._initial_rows = index, storage, initial_rows
        self.device, self.padded = storage.device, isinstance(index, DeviceIndex)
        self._lock = Turn(self.device)  # for the index
        self._checksums: RowChecksums | None = None
        # calls that do not need the index
        self.gather, self.update = storage.gather, storage.update
        self.in_low_precision, self.prefetch = storage.in_low_precision, storage.prefetch

    def __len__(self) -> int:
        return len(self._index)

    @property
    def end(self) -> int:
        """See `EmbeddingTable.end`."""
        return self._index.end

    def find(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """See `EmbeddingTable.find`."""
        with self._lock:
            return self._index.find(keys, count)

    def find_or_insert(
        self, keys: torch.Tensor, count: torch.Tensor | None = None, initial: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `EmbeddingTable.find_or_insert`."""
        with self._lock:
            handles, inserted = self._index.find_or_insert(keys, count)
            if self.padded:
                new, new_keys = torch.where(inserted, handles, -1), keys
            else:
                places = inserted.nonzero().squeeze(1)
                new, new_keys = handles[places], keys[places]
            if len(new):
                try:
                    self._storage.add(new, self._index.end)
                except BaseException:
                    erased = self._index.erase(keys[inserted])
                    self._index.release(erased)
                    raise
                if initial:
                    self.update(new, self._initial_rows(new_keys))
        return handles, inserted

    def erase(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """See `EmbeddingTable.erase`."""
        with self._lock:
            handles = self._index.erase(keys, count)
            self._storage.release(handles)
            return handles

    def release(self, handles: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """See `EmbeddingTable.release`."""
        with self._lock:
            self._index.release(handles, count)

    def items(self, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
        """See `EmbeddingTable.items`."""
        with self._lock:
            return self._index.items(dtype)

    def slots_in_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `EmbeddingTable.slots_in_order`."""
        assert isinstance(self._index, DeviceIndex)
        with self._lock:
            return self._index.slots_in_order()

    def grow(self, rows: int) -> None:
        """See `EmbeddingTable.grow`."""
        with self._lock:
            self._index.grow(rows)
            self._storage.grow(self._index.end + rows)

    def keep_checksums(self) -> None:
        """See `EmbeddingTable.keep_checksums`."""
        if self._checksums is None:
            self._checksums = RowChecksums(self.device)
            _keys, handles = self.items()
            self._checksums.write(handles, self.gather(handles), self.end)
            self.update = self._update_with_checksums

    def first_changed(
        self, handles: torch.Tensor, values: torch.Tensor, skipped: torch.Tensor
    ) -> torch.Tensor | int:
        """See `EmbeddingTable.first_changed`."""
        assert self._checksums is not None
        return self._checksums.first_changed(handles, values, skipped)

    def _update_with_checksums(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        assert self._checksums is not None
        self._storage.update(handles, values, low_precision)
        self._checksums.write(handles, values, self.end)

    @property
    def moved(self) -> tuple[int, int]:
        """See `EmbeddingTable.moved`."""
        return self._storage.moved

    @property
    def cached(self) -> int:
        """See `EmbeddingTable.cached`."""
        return self._storage.cached

    def memory(self) -> dict[str, int]:
        """See `EmbeddingTable.memory`: key_structure, metadata, fp32_values, fp16_values, saved_by_fp16."""
        stored = self._storage.memory()
        stored["metadata"] += self._index.free_nbytes
        if self._checksums is not None:
            stored["metadata"] += self._checksums.nbytes
        return {"key_structure": self._index.nbytes, **stored}


def make_table(
    placement: Placement,
    dim: int,
    row_width: int,
    initial_rows: Callable[[torch.Tensor], torch.Tensor],
    slots: int,
    chunk_rows: int,
    tiers: bool,
) -> StoredTable:
    """A table where `placement` says; `tiers`: with rows in 16 bits.

    Raises ValueError for a device that is not on this machine.
    """
    device = usable_device("cpu" if placement.storage == "host" else placement.device)
    kind = TieredStorage if tiers else RowStorage
    storage = kind(dim, row_width, chunk_rows, device, on_host=placement.storage == "cached")
    if placement.storage == "host":
        return StoredTable(KeyIndex(slots), storage, initial_rows)
    if placement.storage == "cached":
        storage = CachedStorage(storage, placement.cache_rows)
    return StoredTable(DeviceIndex(slots, device), storage, initial_rows)
