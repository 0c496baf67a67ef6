"""Rows in host memory, or on disk, behind a cache in device memory, filled a batch before they are used."""

from __future__ import annotations

import torch

from .disk_storage import DiskStorage
from .lookup import Moves
from .row_column import RowColumn
from .row_file import RowFile
from .row_storage import RowStorage, TierMarks
from .selection import select
from .stream_lock import StreamLock


class CachedStorage(RowStorage):
    """Rows in host memory, and those of recent lookups in device memory.

    Each handle has a row in host memory. While a row is cached, the cache has its value. Cache rows are given
    out in a ring. Those of the last two lookups, which are in the pipeline's buffers, are passed over::

        cache row         0   1   2   3   4   5       lookup 10 misses two rows, the hand is at 2
        last lookup       9   6   8   5   9   3
        row               4   7   1   0   2   3  ->   rows 1 and 0 go back to host memory

    Rows that find no cache row are read and written in host memory directly. Which rows are cached changes no
    value.

    Args:
        home: the rows in host memory, which the device reads and writes, or a `DiskHome`.
        cache_rows: rows of the cache, at most `policy.MAX_CACHE_ROWS`.
    """

    ahead = 0  # it never grows

    def __init__(self, home: RowStorage, cache_rows: int):
        device = home.device
        super().__init__(home.dim, home.row_width, cache_rows, device)
        self._home, self._cache_rows, self.tiered = home, cache_rows, home.tiered
        super().add(torch.empty(0, dtype=torch.int64, device=device), cache_rows)
        # of a row, by handle: 1 + its cache row, the last lookup that used it, whether to store it in 16 bits
        self._places = RowColumn(torch.int32, device=device)
        self._used = RowColumn(torch.int32, device=device)
        self._low = TierMarks(self.dim, device)
        # of a cache row: 1 + its handle, the last lookup that used it
        self._handles = RowColumn(torch.int32, end=cache_rows, device=device)
        self._recent = RowColumn(torch.int32, end=cache_rows, device=device)
        self._hand = torch.zeros((), dtype=torch.int64, device=device)
        self._lookup, self._size = 1, 0  # lookups so far, and keys of the last one
        self._found = torch.zeros((), dtype=torch.int64, device=device)
        self._lock = StreamLock(device)  # for columns that grow
        self._moving = StreamLock(device)  # for rows that move while another lane reads the table's state

    def grow(self, end: int) -> None:
        with self._lock:
            self._home.grow(end)
            for column in (self._places, self._used):
                column.grow(end)

    def add(self, handles: torch.Tensor, end: int) -> None:
        self.grow(end)
        self._home.add(handles, end)
        self._low.add(handles, end)
        with self._lock:
            for column in (self._places, self._used):
                column[handles] = 0

    def release(self, handles: torch.Tensor) -> None:
        self._handles[self._place(handles)] = 0
        self._places[handles] = 0
        self._home.release(handles)

    def gather(self, handles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        with self._moving:
            places = self._place(handles)
            values = self._home.gather(torch.where(places < 0, handles, -1), out)
            # Two gathers into one tensor: each leaves alone the rows that have -1 for it.
            return super().gather(places, values)

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        values = values.contiguous()
        if self.tiered:
            low_precision = self._low.update(handles, values, low_precision)
        places = self._place(handles)
        super().update(places, values)
        self._home.update(torch.where(places < 0, handles, -1), values, low_precision)

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        with self._moving:
            at_home = self._place(handles) < 0
            return torch.where(at_home, self._home.in_low_precision(handles), self._low[handles])

    def spool(self, rows: int) -> RowFile | None:
        return self._home.spool(rows)

    def prefetch(self, handles: torch.Tensor) -> None:
        with self._moving:
            self._prefetch(handles)

    def _prefetch(self, handles: torch.Tensor) -> None:
        self._lookup += 1
        now, before, self._size = self._lookup, self._size, len(handles)
        places = self._place(handles)
        if isinstance(self._home, DiskHome):  # rows on disk of what is not cached come into host memory
            self._home.prefetch(torch.where(places < 0, handles, -1))
        self._found += (places >= 0).sum()
        self._recent[places] = now
        # a row of the last lookup that has no cache row now is being updated in host memory
        missing = (handles >= 0) & (places < 0) & (self._used[handles] != now - 1)
        self._used[handles] = now
        # at most 2 K + K' of the cache rows from the hand on are passed over or given out
        reach = min(self._cache_rows, 2 * len(handles) + before)
        ring = (self._hand + torch.arange(reach, device=self.device)) % self._cache_rows
        free = select(self._recent[ring] < now - 1, padded=True)
        wanted = select(missing, padded=True)
        assert free.count is not None and wanted.count is not None
        most = min(reach, len(handles))
        number = torch.minimum(free.count, wanted.count)
        given = torch.arange(most, device=self.device) < number
        to = torch.where(given, free.take(ring)[:most], -1)
        arriving = torch.where(given, wanted.take(handles)[:most], -1)
        leaving = self._handles[to].to(torch.int64) - 1
        # Rows leave their cache rows before others arrive there. None of this or the last lookup leaves.
        values = super().gather(torch.where(leaving >= 0, to, -1))
        self._home.update(leaving, values, self._low[leaving] if self.tiered else None)
        super().update(to, self._home.gather(arriving))
        self._places[leaving] = 0
        self._places[arriving] = (to + 1).to(torch.int32)
        self._handles[to] = (arriving + 1).to(torch.int32)
        self._recent[to] = now
        if most:
            last = to.gather(0, (number - 1).clamp(min=0).view(1))[0]  # an index () would wait for the device
            self._hand.copy_(torch.where(number > 0, (last + 1) % self._cache_rows, self._hand))

    @property
    def moves(self) -> Moves:
        # In host memory a cached row moves when it leaves.
        home = self._home.moves
        return self._low.moves._replace(
            cached=int(self._found), disk_read=home.disk_read, disk_written=home.disk_written
        )

    def memory(self) -> dict[str, int]:
        columns = (self._places, self._used, self._low, self._handles, self._recent)
        stored = {name: bytes_ + self._home.memory()[name] for name, bytes_ in super().memory().items()}
        stored["metadata"] += sum(column.nbytes for column in columns)
        return stored

    def _place(self, handles: torch.Tensor) -> torch.Tensor:
        """Cache rows (K,) int64 of the rows of `handles` (K,); -1: not cached."""
        return self._places[handles].to(torch.int64) - 1


class DiskHome(RowStorage):
    """Rows on disk as the home of a cache on a device, whose handles and rows are there.

    The host learns which rows move, so that a lookup waits for the device: a batch before the rows are used.
    """

    def __init__(self, disk: DiskStorage, device: torch.device):
        self.dim, self.row_width, self.tiered, self.device = disk.dim, disk.row_width, disk.tiered, device
        self._disk = disk

    def grow(self, end: int) -> None:
        self._disk.grow(end)

    def add(self, handles: torch.Tensor, end: int) -> None:
        self._disk.add(self._present(handles)[1], end)

    def release(self, handles: torch.Tensor) -> None:
        self._disk.release(self._present(handles)[1])

    def gather(self, handles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        places, there = self._present(handles)
        values = self._disk.gather(there).to(self.device)
        if out is None:
            out = torch.empty(len(handles), self.row_width, dtype=torch.float32, device=self.device)
        out[places] = values
        return out

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        places, there = self._present(handles)
        low = None if low_precision is None else low_precision[places].cpu()
        self._disk.update(there, values[places].cpu(), low)

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        places, there = self._present(handles)
        low = torch.zeros(len(handles), dtype=torch.bool, device=self.device)
        low[places] = self._disk.in_low_precision(there).to(self.device)
        return low

    def prefetch(self, handles: torch.Tensor) -> None:
        self._disk.prefetch(self._present(handles)[1])

    def spool(self, rows: int) -> RowFile | None:
        return self._disk.spool(rows)

    @property
    def moves(self) -> Moves:
        return self._disk.moves

    def memory(self) -> dict[str, int]:
        return self._disk.memory()

    def _present(self, handles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (n,) of the `handles` (K,) that are not -1, and those handles on the host."""
        places = (handles >= 0).nonzero().squeeze(1)
        return places, handles[places].cpu()
