"""The values of a table's rows by handle, in chunks of memory: in float32, or in two tiers of precision.

A table's storage is a *home* that has all rows, host or device memory here or a file (`RowFile`),
alone or behind one or two caches (`cached_storage.CachedStorage`)::

    host, device      RowStorage, or with precision tiers TieredStorage
    cached            CachedStorage on the device, before these in page-locked host memory
    disk              HostCachedStorage, before a RowFile
    cached, on disk   CachedStorage on the device, before that
"""

from __future__ import annotations

import torch

from ..kernels import chunked_rows
from ..kernels.chunked_rows import LOW
from ..kernels.dispatch import on_host
from .pools import END, FREE, MAX_ROWS, DevicePool, most_of
from .shared_state import Replaceable, RowColumn, StreamLock


class Chunks:
    """Rows of one width and type, in chunks that never move, so that rows can be read while others are added.

    chunk 0 (full) | chunk 1 (current) | chunk 2 (allocated ahead)
    ^ row 0          ^ row chunk_rows ... ^ row `rows`

    Args:
        device: where rows are read and written.
        on_host: the chunks are in page-locked host memory, which an accelerator reads by address.
        ahead: chunks allocated beyond those in use.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, chunk_rows: int, device: torch.device, on_host: bool, ahead: int
    ):
        self._shape, self._dtype, self._device = (chunk_rows, width), dtype, device
        self._pinned, self._ahead = on_host and device.type != "cpu", ahead
        self._chunks: list[torch.Tensor] = []
        self._table = Replaceable(torch.empty(0, dtype=torch.int64, device=device))
        self.rows = 0
        self.reserve(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, rows in use or not."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def reserve(self, rows: int) -> None:
        """Allocate memory for rows below `rows`, and the chunks ahead."""
        # One chunk is always ahead: a lookup that fills the current one finds the next one allocated.
        needed = max(-(-rows // self._shape[0]), 1) + self._ahead
        if len(self._chunks) < needed:
            device = torch.device("cpu") if self._pinned else self._device
            self._chunks += [
                torch.empty(self._shape, dtype=self._dtype, device=device, pin_memory=self._pinned)
                for _ in range(needed - len(self._chunks))
            ]
            # Kernels find rows by the chunks' addresses. Another lane
            # may still use the old list, which lasts until then.
            self._table.replace(chunked_rows.addresses(self._chunks, self._device))

    @property
    def addresses(self) -> torch.Tensor:
        """(chunks,) int64, of the chunks."""
        return self._table.get()

    def grow(self, rows: int) -> None:
        """Make rows below `rows` usable."""
        self.reserve(rows)
        self.rows = max(self.rows, rows)


class RowStorage:
    """Rows in float32; a handle is the row's place in the chunks.

    Args:
        dim: weights of a row. row_width: its float32 values, at least `dim`.
        chunk_rows: rows of one chunk.
        device, on_host: see `Chunks`.
    """

    ahead = 1
    """Chunks allocated beyond those in use."""
    wants_misses = False
    """Whether, as the home of a cache, it is to `prefetch` the rows that the cache misses."""

    def __init__(
        self,
        dim: int,
        row_width: int,
        chunk_rows: int,
        device: torch.device | None = None,
        on_host: bool = False,
    ):
        device = device or torch.device("cpu")
        if dim < 1 or row_width < dim:
            raise ValueError(f"a row of {row_width} values cannot hold {dim} weights")
        if not 1 <= chunk_rows <= MAX_ROWS // 2:
            raise ValueError(f"a chunk holds 1 to {MAX_ROWS // 2} rows, got {chunk_rows}")
        self.dim, self.row_width, self._chunk_rows, self.device = dim, row_width, chunk_rows, device
        self._full = Chunks(row_width, torch.float32, chunk_rows, device, on_host, self.ahead)

    def grow(self, end: int) -> None:
        """Reserve memory for handles below `end`."""
        self._full.reserve(end)

    def add(self, handles: torch.Tensor, end: int) -> None:
        """Add rows for `handles` (K,), all below `end`, with undefined values; all of them or none.

        A handle of -1 is left out.
        """
        self._full.grow(end)

    def release(self, handles: torch.Tensor) -> None:
        """Free the rows of `handles` (K,), which were erased; -1 is left out."""

    def gather(self, handles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `StoredTable.gather`; a handle of -1 leaves the row of `out` as it is."""
        locations = self._locate(handles)  # first: a concurrent update may move rows to new chunks
        return chunked_rows.read_rows(self._kernel_chunks(), locations, out)

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        """See `StoredTable.update`."""
        chunked_rows.write_rows(self._kernel_chunks(), self._locate(handles), values.contiguous())

    def prefetch(self, handles: torch.Tensor) -> None:
        """See `StoredTable.prefetch`."""

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        """See `StoredTable.in_low_precision`."""
        return torch.zeros_like(handles, dtype=torch.bool)

    @property
    def moved(self) -> list[int]:
        """How many rows changed to float32, and to 16 bits; waits for a device."""
        return [0, 0]

    @property
    def found(self) -> int:
        """How many rows of lookups were in the cache, of a storage that has one; waits for a device."""
        return 0

    def memory(self) -> dict[str, int]:
        """Bytes of values and of locations; `saved_by_fp16` counts rows in use."""
        values = {"fp32_values": self._full.nbytes, "fp16_values": 0, "saved_by_fp16": 0}
        return {"metadata": 0, **values, "disk": 0}

    def _locate(self, handles: torch.Tensor) -> torch.Tensor:
        """Locations (K,) int64 of the rows of `handles` (K,); -1 for a handle of -1."""
        if handles.is_cpu and handles.shape[0] and int(handles.min()) < -1:
            raise IndexError(f"handles are -1 or more, got {int(handles.min())}")
        return handles

    def _kernel_chunks(self) -> chunked_rows.Chunks:
        full, rows = self._full.addresses, self._full.rows
        return chunked_rows.Chunks(full, full, rows, 0, self._chunk_rows, self.dim, self.row_width)


class TieredStorage(RowStorage):
    """Rows in float32 or in 16 bits (float16 weights, bfloat16 state); a row moves as it is updated.

    The location of a row changes with its tier, and its handle does not. Two rows in 16 bits lie in the place
    of one in float32, so that what a tier gives up the other one takes::

        handle       0   1   2          3            4
        location     0   1   2**30 + 4  -1 (erased)  2**30 + 5
        place        0   1   2          -            2           rows 2 and 4 are its halves

    A place that was halved stays so.
    """

    def __init__(
        self,
        dim: int,
        row_width: int,
        chunk_rows: int,
        device: torch.device | None = None,
        on_host: bool = False,
    ):
        super().__init__(dim, row_width, chunk_rows, device, on_host)
        self._pools = DevicePool(self.device), DevicePool(self.device)  # of places, of halves
        self._locations = RowColumn(torch.int32, absent=-1, device=self.device)
        self._moved = torch.zeros(2, dtype=torch.int64, device=self.device)  # to float32, to 16 bits
        self._lock = StreamLock(self.device)  # for pools and locations

    def grow(self, end: int) -> None:
        with self._lock:
            self._full.reserve(end)
            self._locations.grow(end)

    def add(self, handles: torch.Tensor, end: int) -> None:
        with self._lock:
            new = handles >= 0
            self._reserve(most_of(new))
            self._locations.grow(end)
            # New rows begin in float32.
            self._locations[handles] = self._allocate(0, new).to(torch.int32)

    def release(self, handles: torch.Tensor) -> None:
        with self._lock:
            locations = self._locate(handles)
            for tier, there in enumerate(_tiers(locations)):
                self._pools[tier].release(locations - tier * LOW, there)
            self._locations[handles] = -1

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        values = values.contiguous()
        low = stored_low(handles, values, low_precision, self.dim)
        with self._lock:
            locations = before = self._locate(handles)
            full, half = _tiers(before)
            moving = half & ~low, full & low
            # moving[0]: from 16 bits to float32; moving[1]: the other way.
            # Both tiers first: where memory is short nothing moves.
            self._reserve(most_of(moving[0]), self._to_halve(moving[1]))
            for tier, which in enumerate(moving):
                locations = torch.where(which, self._allocate(tier, which), locations)
                self._pools[1 - tier].release(before - (1 - tier) * LOW, which)
            moved = torch.stack(moving)
            self._locations[torch.where(moved.any(0), handles, -1)] = locations.to(torch.int32)
            self._moved += moved.sum(1)
        chunked_rows.write_rows(self._kernel_chunks(), locations, values)

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        return self._locate(handles) >= LOW

    @property
    def moved(self) -> list[int]:
        return self._moved.tolist()

    def memory(self) -> dict[str, int]:
        halved = 2 * self.row_width * self._pools[1].numbers.exact()[END]
        return {
            "metadata": self._locations.nbytes + sum(pool.nbytes for pool in self._pools),
            "fp32_values": self._full.nbytes - halved,
            "fp16_values": halved,
            "saved_by_fp16": 2 * self.row_width * len(self._pools[1]),
            "disk": 0,
        }

    def _reserve(self, rows: int, halved: int = 0) -> None:
        """Reserve room for so many more rows in float32, and places to halve. Raises MemoryError."""
        end = self._pools[0].end_after(rows + halved)
        if halved and end > MAX_ROWS // 2:
            raise MemoryError(
                f"a table with rows in 16 bits has room for {MAX_ROWS // 2} in float32 on one rank: use more "
                "ranks, or evict"
            )
        self._full.grow(end)

    def _to_halve(self, which: torch.Tensor) -> int:
        """Places to halve at most before the rows that `which` (K,) bool marks find room."""
        free = self._pools[1].numbers.bound(FREE) if on_host(which) else 0
        return (max(most_of(which) - free, 0) + 1) // 2

    def _halve(self, which: torch.Tensor) -> None:
        """Halve places for the rows that `which` (K,) bool marks; room for them is reserved."""
        size, (places, halves) = self._to_halve(which), self._pools
        if size:
            count = ((which.sum() - halves.numbers.values[FREE]).clamp(min=0) + 1) // 2
            taken = places.next(size)
            places.claim(count, size)
            among = torch.arange(size, device=self.device) < count
            both = torch.stack([2 * taken, 2 * taken + 1], 1).flatten()
            halves.extend(both, among.repeat_interleave(2))

    def _allocate(self, tier: int, which: torch.Tensor) -> torch.Tensor:
        """Locations (K,) int64 of free rows for those that `which` (K,) bool marks; room is reserved."""
        size, pool = len(which), self._pools[tier]
        if not size:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        if tier:
            self._halve(which)
        # rank[i] - 1 = how many marked rows come before row i: which of the pool's next numbers it gets.
        rank = which.cumsum(0)
        free = pool.next(size)[(rank - 1).clamp(min=0)]
        pool.claim(rank[-1], size)
        return free + tier * LOW

    def _locate(self, handles: torch.Tensor) -> torch.Tensor:
        return self._locations[super()._locate(handles)].to(torch.int64)

    def _kernel_chunks(self) -> chunked_rows.Chunks:
        full, rows = self._full.addresses, self._full.rows
        half = 2 * self.row_width * self._chunk_rows
        low = torch.stack([full, full + half], 1).flatten()  # two chunks of 16-bit rows in each
        return chunked_rows.Chunks(
            full, low, rows, min(2 * rows, LOW), self._chunk_rows, self.dim, self.row_width
        )


def _tiers(locations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(K,) bool each, which `locations` (K,) are of float32 rows, and which of 16-bit rows."""
    return (locations >= 0) & (locations < LOW), locations >= LOW


class TierMarks:
    """Which rows are to be stored in 16 bits, by handle, of a storage that holds them in float32 meanwhile.

    Args:
        dim: weights of a row.
    """

    def __init__(self, dim: int, device: torch.device):
        self._dim, self._low = dim, RowColumn(torch.bool, device=device)
        self._moved = torch.zeros(2, dtype=torch.int64, device=device)  # to float32, to 16 bits
        self._lock = StreamLock(device)  # a column that grows loses what is written meanwhile

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._low.nbytes

    @property
    def moved(self) -> list[int]:
        """See `RowStorage.moved`."""
        return self._moved.tolist()

    def add(self, handles: torch.Tensor, end: int) -> None:
        """New rows at `handles` (K,), or -1, below `end`."""
        with self._lock:
            self._low.grow(end)
            self._low[handles] = False

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None
    ) -> torch.Tensor:
        """Note an update as `StoredTable.update` has it; (K,) bool, the rows to store in 16 bits."""
        low = stored_low(handles, values, low_precision, self._dim)
        with self._lock:
            before = self._low[handles]
            self._low[handles] = low
        self._moved += torch.stack([before & ~low, low & ~before]).sum(1)
        return low

    def __getitem__(self, handles: torch.Tensor) -> torch.Tensor:
        return self._low[handles]


def stored_low(
    handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None, dim: int
) -> torch.Tensor:
    """(K,) bool, which rows of `values` (K, row_width) to store in 16 bits; a handle of -1 is none."""
    if low_precision is None:
        return torch.zeros_like(handles, dtype=torch.bool)
    present = handles >= 0
    written = torch.where(present.unsqueeze(1), values, 0.0)  # the rows of a handle of -1 may be undefined
    return chunked_rows.fits(written, dim) & low_precision & present
