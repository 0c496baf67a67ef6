"""The values of a table's rows by handle: in float32, or in two tiers of precision."""

from __future__ import annotations

import torch

from ..kernels import chunked_rows
from ..kernels.chunked_rows import LOW
from .index_pool import MAX_ROWS, IndexPool
from .row_column import RowColumn
from .turn import Replaceable, Turn


class Chunks:
    """Rows of one width and type, in chunks that never move, so that rows can be read while others are added.

    chunk 0 (full) | chunk 1 (current) | chunk 2 (allocated ahead)
    ^ row 0          ^ row chunk_rows ... ^ row `rows`

    Args:
        device: where rows are read and written.
        on_host: the chunks are in page-locked host memory, which an accelerator reads by address.
    """

    def __init__(
        self, width: int, dtype: torch.dtype, chunk_rows: int, device: torch.device, on_host: bool = False
    ):
        self._shape, self._dtype, self._device = (chunk_rows, width), dtype, device
        self._pinned = on_host and device.type != "cpu"
        self._chunks: list[torch.Tensor] = []
        self._table = Replaceable(torch.empty(0, dtype=torch.int64, device=device))
        self.rows = 0
        self.reserve(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, rows in use or not."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def reserve(self, rows: int) -> None:
        """Allocate memory for rows below `rows`, and one chunk more."""
        needed = max(-(-rows // self._shape[0]), 1) + 1
        if len(self._chunks) < needed:
            device = torch.device("cpu") if self._pinned else self._device
            self._chunks += [
                torch.empty(self._shape, dtype=self._dtype, device=device, pin_memory=self._pinned)
                for _ in range(needed - len(self._chunks))
            ]
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

    waits = False
    """Whether adding rows waits for their number."""

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
        self._full = Chunks(row_width, torch.float32, chunk_rows, device, on_host)

    def grow(self, end: int) -> None:
        """Reserve memory for handles below `end`."""
        self._full.reserve(end)

    def add(self, handles: torch.Tensor, end: int) -> None:
        """Add rows for `handles` (K,), all below `end`, with undefined values; all of them or none.

        A handle of -1 is left out, unless the storage `waits`: then there must be none.
        """
        self._full.grow(end)

    def release(self, handles: torch.Tensor) -> None:
        """Free the rows of `handles` (K,), which were erased."""

    def gather(self, handles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `EmbeddingTable.gather`; a handle of -1 leaves the row of `out` as it is."""
        locations = self._locate(handles)  # first: a concurrent update may move rows to new chunks
        return chunked_rows.read_rows(self._kernel_chunks(), locations, out)

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        """See `EmbeddingTable.update`."""
        chunked_rows.write_rows(self._kernel_chunks(), self._locate(handles), values.contiguous())

    def prefetch(self, handles: torch.Tensor) -> None:
        """See `EmbeddingTable.prefetch`."""

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        """See `EmbeddingTable.in_low_precision`."""
        return torch.zeros(len(handles), dtype=torch.bool, device=self.device)

    @property
    def moved(self) -> tuple[int, int]:
        """See `EmbeddingTable.moved`."""
        return 0, 0

    @property
    def cached(self) -> int:
        """See `EmbeddingTable.cached`."""
        return 0

    def memory(self) -> dict[str, int]:
        """Bytes of values and of locations; `saved_by_fp16` counts rows in use."""
        return {"metadata": 0, "fp32_values": self._full.nbytes, "fp16_values": 0, "saved_by_fp16": 0}

    def _locate(self, handles: torch.Tensor) -> torch.Tensor:
        """Locations (K,) int64 of the rows of `handles` (K,); -1 for a handle of -1."""
        if handles.is_cpu and len(handles) and int(handles.min()) < -1:
            raise IndexError(f"handles are -1 or more, got {int(handles.min())}")
        return handles

    def _kernel_chunks(self) -> chunked_rows.Chunks:
        full = self._full
        return chunked_rows.Chunks(
            full.addresses, full.addresses, full.rows, 0, self._chunk_rows, self.dim, self.row_width
        )


class TieredStorage(RowStorage):
    """Rows in float32 or in 16 bits (float16 weights, bfloat16 state); a row moves as it is updated.

    The location of a row changes with its tier, and its handle does not::

        handle       0   1   2      3
        location     0   1   2**30  -1 (erased)
    """

    waits = True

    def __init__(
        self,
        dim: int,
        row_width: int,
        chunk_rows: int,
        device: torch.device | None = None,
        on_host: bool = False,
    ):
        super().__init__(dim, row_width, chunk_rows, device, on_host)
        self._low = Chunks(row_width, torch.int16, chunk_rows, self.device, on_host)
        self._pools = IndexPool(), IndexPool()  # of float32 rows, of 16-bit rows
        self._locations = RowColumn(torch.int32, absent=-1, device=self.device)
        self._moved = [0, 0]  # to float32, to 16 bits
        self._lock = Turn(self.device)  # for pools and locations

    def grow(self, end: int) -> None:
        with self._lock:
            self._full.reserve(end)
            self._locations.grow(end)

    def add(self, handles: torch.Tensor, end: int) -> None:
        with self._lock:
            self._reserve(0, len(handles))
            self._locations.grow(end)
            self._locations[handles] = self._allocate(0, len(handles)).to(torch.int32)

    def release(self, handles: torch.Tensor) -> None:
        with self._lock:
            locations = self._locate(handles)
            for tier, there in enumerate((locations < LOW, locations >= LOW)):
                self._release(tier, locations[there])
            self._locations[handles] = -1

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        handles, values, low = tiers_of(handles, values, low_precision, self.dim)
        with self._lock:
            before = self._locate(handles)
            locations = before.clone()
            moving = ~low & (before >= LOW), low & (before >= 0) & (before < LOW)
            positions = [mask.nonzero().squeeze(1) for mask in moving]
            for tier, here in enumerate(positions):
                self._reserve(tier, len(here))  # both tiers first: where memory is short nothing moves
            for tier, here in enumerate(positions):
                locations[here] = self._allocate(tier, len(here))
                self._locations[handles[here]] = locations[here].to(torch.int32)
                self._release(1 - tier, before[here])
                self._moved[tier] += len(here)
        chunked_rows.write_rows(self._kernel_chunks(), locations, values)

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        return self._locate(handles) >= LOW

    @property
    def moved(self) -> tuple[int, int]:
        return self._moved[0], self._moved[1]

    def memory(self) -> dict[str, int]:
        return {
            "metadata": self._locations.nbytes + sum(pool.nbytes for pool in self._pools),
            "fp32_values": self._full.nbytes,
            "fp16_values": self._low.nbytes,
            "saved_by_fp16": 2 * self.row_width * len(self._pools[1]),
        }

    def _reserve(self, tier: int, count: int) -> None:
        """Reserve room for `count` more rows. Raises MemoryError."""
        self._pools[tier].check_room(count)
        (self._full, self._low)[tier].grow(self._pools[tier].end_after(count))

    def _allocate(self, tier: int, count: int) -> torch.Tensor:
        """Locations (count,) int64 of free rows, for which room is reserved."""
        return self._pools[tier].allocate(count).to(self.device) + tier * LOW

    def _release(self, tier: int, locations: torch.Tensor) -> None:
        self._pools[tier].release((locations - tier * LOW).cpu())

    def _locate(self, handles: torch.Tensor) -> torch.Tensor:
        return self._locations[super()._locate(handles)].to(torch.int64)

    def _kernel_chunks(self) -> chunked_rows.Chunks:
        full, low = self._full, self._low
        return chunked_rows.Chunks(
            full.addresses, low.addresses, full.rows, low.rows, self._chunk_rows, self.dim, self.row_width
        )


def tiers_of(
    handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`handles` (K,) but those of -1, their `values`, and (K,) bool, which of them to store in 16 bits."""
    present = (handles != -1).nonzero().squeeze(1)
    if len(present) < len(handles):
        handles, values = handles[present], values[present]
        low_precision = None if low_precision is None else low_precision[present]
    values = values.contiguous()
    if low_precision is None:
        return handles, values, torch.zeros_like(handles, dtype=torch.bool)
    return handles, values, chunked_rows.fits(values, dim) & low_precision
