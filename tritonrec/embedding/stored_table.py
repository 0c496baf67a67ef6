"""A key index and a row storage, in host or in device memory, as one table (MTGRBoost, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels.checksums import first_other_row, row_checksums, write_row_checksums
from ..kernels.deferred import NONE
from ..kernels.dispatch import on_host, usable_device
from ..settings import bytes_of
from .cached_storage import PLACE_BYTES, CachedStorage, HostCachedStorage, HostStorage
from .device_index import DeviceIndex
from .key_index import KeyIndex
from .policy import Placement
from .pools import MAX_ROWS
from .row_file import RowFile
from .row_storage import RowStorage, TieredStorage
from .shared_state import RowColumn, StreamLock


class StoredTable:
    """Rows of float32 values (weights and optimizer state) by int64 key, which grow without moving a row.

    A *handle* is an int64 number of a row of this table. It stays valid until the row is erased: growth,
    moves and inserts do not change it. -1 means no row. The storage location of a row is known to the table
    only. Keys, handles and values are on the table's device.

        keys     [ 7,  -3, 2**63-1]       find_or_insert
        handles  [ 0,   1,   2]           gather, update
        erase([-3]) -> [1]                void, and reserved until release([1])

    One thread may find, insert and gather while another one updates; a gather may then read a row that is
    half updated. All other calls exclude each other.

    A `count` () int64 is the number of valid keys where only the device knows it (`kernels.padding`); handles
    behind it are -1.

    Args:
        index, storage: on one device.
        initial_rows: keys (K,) -> their initial rows (K, row_width) float32.
        file: that the storage ends in, if it does.
    """

    def __init__(
        self,
        index: KeyIndex | DeviceIndex,
        storage: RowStorage,
        initial_rows: Callable[[torch.Tensor], torch.Tensor],
        file: RowFile | None = None,
    ):
        self._index, self._storage, self._initial_rows = index, storage, initial_rows
        self._file = file
        self.device = storage.device
        self.padded = isinstance(index, DeviceIndex)
        """Whether lookups leave their lengths on the device, so that the host does not wait for them."""
        self._lock = StreamLock(self.device)  # for the index
        self._checksums: RowChecksums | None = None

    def __len__(self) -> int:
        return len(self._index)

    @property
    def end(self) -> int:
        """Upper bound of all handles so far: the length of row metadata."""
        return self._index.end

    def find(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """Handles (K,) of `keys` (K,), repeats allowed; -1 where absent."""
        with self._lock:
            return self._index.find(keys, count)

    def find_or_insert(
        self, keys: torch.Tensor, count: torch.Tensor | None = None, initial: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Handles (K,) of `keys` (K,), distinct, and which are new, (K,) bool; new rows hold initial values,
        anything without `initial`, where the caller writes them next.

        Raises MemoryError, or the allocator's error, where they do not fit; the table is then unchanged.
        """
        with self._lock:
            handles, inserted = self._index.find_or_insert(keys, count)
            if self.padded:
                # No host knows how many are new: all places stay, with -1 at the others.
                new, new_keys = torch.where(inserted, handles, -1), keys
            else:
                places = inserted.nonzero().squeeze(1)
                new, new_keys = handles[places], keys[places]
            if new.shape[0]:
                try:
                    self._storage.add(new, self._index.end)
                except BaseException:
                    # All or nothing: keys without room for their rows are taken out again.
                    erased = self._index.erase(keys[inserted])
                    self._index.release(erased)
                    raise
                if initial:
                    self.update(new, self._initial_rows(new_keys))
        return handles, inserted

    def prefetch(self, handles: torch.Tensor) -> None:
        """Bring the rows of a lookup's `handles` (K,), distinct or -1, to where `gather` is fast.

        Call it once a lookup, after the update of the rows of the lookup before the last one.
        """
        self._storage.prefetch(handles)

    def spool(self, rows: int) -> RowFile | None:
        """See `RowFile.spool`; None where the table does not lie in a file."""
        return None if self._file is None else self._file.spool(rows)

    def gather(self, handles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies of rows (K, row_width) float32, repeats allowed, in `out` if given; undefined where a handle
        is -1.
        """
        return self._storage.gather(handles, out)

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        """Overwrite the rows of `handles` (K,), distinct, -1 left out, with `values` (K, row_width) float32.

        `low_precision` (K,) bool marks rows to store in 16 bits where 16 bits hold their values exactly; the
        values never change.
        """
        # No lock: an update does not touch the index, and handles keep their rows until they are released.
        self._storage.update(handles, values, low_precision)
        if self._checksums is not None:
            self._checksums.write(handles, values, self.end)

    def erase(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """Erase the rows of `keys` (K,), distinct; returns their handles (K,), -1 where absent.

        An update of such a handle changes no other row until `release`.
        """
        with self._lock:
            handles = self._index.erase(keys, count)
            # The storage lets the row go now, the index its handle only at `release`.
            self._storage.release(handles)
            return handles

    def release(self, handles: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """Let new rows reuse the `handles` (K,), distinct, of erased rows; a padded table leaves out -1."""
        with self._lock:
            self._index.release(handles, count)

    def items(self, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys (n,) and their handles (n,) of `dtype`, in no particular order."""
        with self._lock:
            return self._index.items(dtype)

    def slots_in_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a padded table: the key of every slot (S,) and its handle (S,), -1 where the slot has none."""
        assert isinstance(self._index, DeviceIndex)
        with self._lock:
            return self._index.slots_in_order()

    def grow(self, rows: int) -> None:
        """Reserve memory for `rows` more rows. Raises MemoryError."""
        with self._lock:
            self._index.grow(rows)
            self._storage.grow(self._index.end + rows)

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        """(K,) bool, which rows of `handles` (K,) are stored in 16 bits; False where a handle is -1."""
        return self._storage.in_low_precision(handles)

    def keep_checksums(self) -> None:
        """Keep a checksum of every row from now on, 8 bytes each; no other call may run meanwhile."""
        if self._checksums is None:
            self._checksums = RowChecksums(self.device)
            _keys, handles = self.items()
            self._checksums.write(handles, self.gather(handles), self.end)

    def first_changed(
        self, handles: torch.Tensor, values: torch.Tensor, skipped: torch.Tensor
    ) -> torch.Tensor | int:
        """See `RowChecksums.first_changed`; `keep_checksums` comes first."""
        assert self._checksums is not None
        return self._checksums.first_changed(handles, values, skipped)

    @property
    def moves(self) -> list[int]:
        """Rows moved so far, the last five numbers of `Counters`; waits for a device."""
        read, written = (0, 0) if self._file is None else (self._file.read_rows, self._file.written_rows)
        return [*self._storage.moved, self._storage.found, read, written]

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by purpose."""
        stored = self._storage.memory()
        stored["metadata"] += self._index.free_nbytes
        if self._checksums is not None:
            stored["metadata"] += self._checksums.nbytes
        stored["disk"] += self._index.disk_nbytes
        return {"key_structure": self._index.nbytes, **stored}


class RowChecksums:
    """Checksums of rows at rest, 8 bytes each, by handle: written with a row, compared when it is read.

    Args:
        device: of the table.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sums = RowColumn(torch.int64, device=device)
        self._lock = StreamLock(device)  # a column that grows loses what is written meanwhile

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._sums.nbytes

    def write(self, handles: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """The rows of `handles` (K,), distinct, -1 left out, below `end`, are `values` (K, row_width) now."""
        with self._lock:
            self._sums.grow(end)
            if on_host(values):
                write_row_checksums(self._sums.rows, handles, values)
            else:
                self._sums[handles] = row_checksums(values)

    def first_changed(
        self, handles: torch.Tensor, values: torch.Tensor, skipped: torch.Tensor
    ) -> torch.Tensor | int:
        """1 + the first of the rows `values` (K, row_width) that is not as it was written; 0: none.

        Rows of -1 are left out, and the positions `skipped` (n,) int64, where -1 is no position. On a device
        positions (K,) int64 of changed rows, with `deferred.NONE` for others.
        """
        if on_host(handles) and on_host(values):
            return 1 + first_other_row(self._sums.rows, handles, values, skipped)
        now = row_checksums(values).to(handles.device)
        changed = (self._sums[handles] != now) & (handles >= 0)
        changed = torch.cat([changed, changed.new_zeros(1)])  # and one for positions of -1
        changed[skipped] = False
        places = torch.arange(len(handles), device=handles.device)
        return torch.where(changed[:-1], places, NONE)


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

    Raises ValueError for a device that is not on this machine, OSError for a directory that takes no file.
    """
    placement = placement.chosen()
    by_host = placement.storage in ("host", "disk")
    device = usable_device("cpu" if by_host else placement.device)
    file: RowFile | None = None
    storage: RowStorage
    if placement.path:
        folder = placement.folder()
        size, memory = 4 * row_width + PLACE_BYTES, bytes_of(placement.memory)
        if memory < size:
            raise ValueError(
                f"memory={memory} bytes of a table on disk hold no row of {size} bytes: two batches' rows "
                "should fit"
            )
        file = RowFile(folder, 4 * row_width, dim)
        home = HostStorage(file, torch.device("cpu"))
        storage = HostCachedStorage(home, min(memory // size, MAX_ROWS // 2), tiers and by_host)
        storage = storage if by_host else HostStorage(storage, device)
    else:
        kind = TieredStorage if tiers else RowStorage
        storage = kind(dim, row_width, chunk_rows, device, on_host=placement.storage == "cached")
    if by_host:
        bound = placement.index_memory
        index = KeyIndex(slots, placement.folder() if bound else "", bytes_of(bound or "0"))
        return StoredTable(index, storage, initial_rows, file)
    if placement.storage == "cached":
        storage = CachedStorage(storage, placement.cache_rows, tiers)
    return StoredTable(DeviceIndex(slots, device), storage, initial_rows, file)
