"""Rows in a file, and those of recent lookups in memory, which are read a batch before they are used."""

from __future__ import annotations

import errno
import warnings

import torch

from ..kernels import chunked_rows
from . import numba_disk
from .lookup import Moves
from .row_column import RowColumn
from .row_file import RowFile
from .row_storage import RowStorage, TierMarks
from .stream_lock import StreamLock

PLACE_BYTES = 4 + 8 + 1 + 1
"""Of a row in memory, beside its values."""
SPOOLED = 1 << 26
"""Bytes of rows from which on a save copies them; the page cache holds fewer, and then each read is short."""


class DiskStorage(RowStorage):
    """Each handle has a row in a file. While a row is in memory, memory has its value.

    A lookup brings the rows of its batch into memory (NestPipe, section IV.A: they are known a batch
    ahead). Other rows leave: those that the hand of a clock comes to, which passes a row over once for each
    of its last uses, and the rows of the last two lookups always, since they are in the pipeline's buffers::

        place             0   1   2   3   4         lookup 10 misses row 9, the hand is at 1
        row               4   7   1   0   2
        last lookup       8   9   6   7   3         place 1 is of the last lookup, 2 was used once more,
        uses              0   2   1   0   0    ->   and row 0 leaves place 3; it is written if it was updated

    A new row gets a place at once, and is written when it leaves. Rows that find no place are read and
    written in the file. Which rows are in memory changes no value. A lookup that fails changes none.

    Args:
        path: the directory of the file; see `RowFile`. memory: bytes of the rows in memory.
        tiered: rows may be rounded to 16 bits; they take 32 bits a value here.

    Raises ValueError where the memory holds no row.
    """

    def __init__(self, dim: int, row_width: int, path: str, memory: int, tiered: bool = False):
        self.dim, self.row_width, self.tiered, self.device = dim, row_width, tiered, torch.device("cpu")
        size = 4 * row_width
        count = memory // (size + PLACE_BYTES)
        if count < 1:
            raise ValueError(
                f"memory={memory} bytes of a table on disk hold no row of {size + PLACE_BYTES} bytes: two "
                "batches' rows should fit"
            )
        self._file = RowFile(path, size)
        self._memory = torch.empty(count, row_width, dtype=torch.float32, device="cpu")
        self._chunk = chunked_rows.addresses([self._memory], self.device)
        self._places = RowColumn(torch.int32)  # by handle: 1 + its place
        self._low = TierMarks(dim, self.device)
        # of a place: the last lookup of its row, the uses since the hand passed; 1 + its handle, updated
        self._recent, self._uses = (
            torch.zeros(count, dtype=torch.int32, device="cpu"),
            torch.zeros(count, dtype=torch.uint8, device="cpu"),
        )
        self._handles, self._dirty = (
            torch.zeros(count, dtype=dtype, device="cpu") for dtype in (torch.int64, torch.bool)
        )
        self._hand, self._lookup, self._found = 0, 1, 0
        self._all_used = -1  # the last lookup since which all places were used: looked at once, as in a load
        # Handles of the last lookup without a place.
        self._outside = torch.empty(0, dtype=torch.int64, device="cpu")
        self._moving = StreamLock(
            self.device
        )  # for rows that move while another lane reads the table's state

    @property
    def moves(self) -> Moves:
        file = self._file
        return self._low.moves._replace(
            cached=self._found, disk_read=file.read_rows, disk_written=file.written_rows
        )

    def grow(self, end: int) -> None:
        self._file.reserve(end)
        self._places.grow(end)

    def add(self, handles: torch.Tensor, end: int) -> None:
        with self._moving:
            self.grow(end)
            if self.tiered:
                self._low.add(handles, end)
            self._places[handles] = 0
            self._bring(handles, self._lookup, new=True)

    def release(self, handles: torch.Tensor) -> None:
        own = self._place(handles)
        own = own[own >= 0]
        # The row is gone: nothing is written for it when its place is given away.
        self._handles[own], self._dirty[own], self._uses[own] = 0, False, 0
        self._places[handles] = 0

    def gather(self, handles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        with self._moving:
            places = self._place(handles)
            values = chunked_rows.read_rows(self._kernel_chunks(), places, out)
            # Rows without a place, as where a lookup has more rows than memory.
            outside = ((places < 0) & (handles >= 0)).nonzero().squeeze(1)
            if len(outside):
                self._file.read(handles[outside], values, outside)
            return values

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        values = values.contiguous()
        if self.tiered:
            self._low.update(handles, values, low_precision)
        places = self._place(handles)
        chunked_rows.write_rows(self._kernel_chunks(), places, values)
        self._dirty[places[places >= 0]] = True
        outside = ((places < 0) & (handles >= 0)).nonzero().squeeze(1)
        if len(outside):
            self._file.write(handles[outside], values, outside)

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        return self._low[handles] if self.tiered else super().in_low_precision(handles)

    def spool(self, rows: int) -> RowFile | None:
        size = rows * self._file.row_bytes
        if size <= SPOOLED:
            return None
        file = RowFile(self._file.path, self._file.row_bytes)
        try:
            file.reserve(rows)
        except OSError as error:
            file.close()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            warnings.warn(
                f"tritonrec: {self._file.path!r} has no space for a copy of {size:,} bytes of rows during a "
                "save: each is read by itself, which takes longer",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return file

    def prefetch(self, handles: torch.Tensor) -> None:
        with self._moving:
            self._lookup += 1
            places = self._place(handles)
            self._found += numba_disk.use(
                places.numpy(), self._recent.numpy(), self._uses.numpy(), self._lookup
            )
            missing = handles[(handles >= 0) & (places < 0)]
            # a row of the last lookup without a place is being updated in the file
            here = missing[~torch.isin(missing, self._outside)] if len(self._outside) else missing
            brought = self._bring(here, self._lookup - 1)
            self._recent[self._place(brought)] = self._lookup
            self._outside = missing[self._place(missing) < 0]

    def _bring(self, handles: torch.Tensor, before: int, new: bool = False) -> torch.Tensor:
        """Give places to rows of `handles` (K,), of rows that no lookup since `before` has used, and read
        them unless they are `new`; returns the handles of the first ones, for which there were places.
        """
        places = torch.empty(len(handles) if before > self._all_used else 0, dtype=torch.int64, device="cpu")
        count, hand = numba_disk.choose(
            self._recent.numpy(), self._uses.numpy(), self._hand, before, places.numpy()
        )
        if count < len(places):
            self._all_used = before
        self._hand = int(hand)
        places, handles = places[:count], handles[:count]
        # A row that leaves is written before its place is
        # read over, and only if it was updated since it came.
        leaving = self._handles[places] - 1
        updated = self._dirty[places]
        self._file.write(leaving[updated], self._memory, places[updated])
        self._places[leaving] = 0  # a reader waits, and no lane updates these rows
        self._handles[places], self._dirty[places] = 0, False
        if not new:
            self._file.read(handles, self._memory, places)
        self._places[handles] = (places + 1).to(torch.int32)
        self._handles[places] = handles + 1
        return handles

    def memory(self) -> dict[str, int]:
        columns = (self._places, self._recent, self._uses, self._handles, self._dirty)
        metadata = sum(column.nbytes for column in columns) + self._low.nbytes
        values = {"fp32_values": self._memory.nbytes, "fp16_values": 0, "saved_by_fp16": 0}
        return {"metadata": metadata, **values, "disk": self._file.nbytes}

    def _place(self, handles: torch.Tensor) -> torch.Tensor:
        """Places (K,) int64 in memory of the rows of `handles` (K,); -1: in the file alone."""
        return self._places[self._locate(handles)].to(torch.int64) - 1

    def _kernel_chunks(self) -> chunked_rows.Chunks:
        count = len(self._memory)
        return chunked_rows.Chunks(self._chunk, self._chunk, count, 0, count, self.dim, self.row_width)
