"""Where a table's rows lie: chunks that never move, and which of their rows are free."""

from __future__ import annotations

import numpy as np
import torch

MAX_ROWS = 1 << 30
"""Rows of one `Chunks`; the bit above tells row numbers of two of them apart."""


class Chunks:
    """Rows of one width and type, and what is noted about each; numbers of freed rows are used again.

        chunk 0 (full) | chunk 1 (current) | chunk 2 (next: there before it is needed)
        ^ row 0          ^ row chunk_rows ... ^ used

    Growth appends a chunk and moves no row, so rows may be copied while others are added. Row numbers and
    notes are for one thread at a time.

    Args:
        width, dtype: values per row and their type.
        chunk_rows: rows of a chunk.
        notes: name and type of what is noted about a row; not initialised.
    """

    def __init__(self, width: int, dtype: torch.dtype, chunk_rows: int, notes: dict[str, torch.dtype]):
        self.width, self.dtype, self.chunk_rows = width, dtype, chunk_rows
        self.chunks: list[torch.Tensor] = []
        self.addresses = np.empty(0, np.uint64)
        self.used = 0  # rows ever handed out: numbers below are taken or free
        self.notes = {name: torch.empty(0, dtype=kind) for name, kind in notes.items()}
        self._free = torch.empty(0, dtype=torch.int64)  # a stack; its first `free` numbers are on it
        self.free = 0
        self.reserve(0)

    def __len__(self) -> int:
        return self.used - self.free

    @property
    def value_bytes(self) -> int:
        """Bytes of all chunks, rows in use or not."""
        return len(self.chunks) * self.chunk_rows * self.width * self.dtype.itemsize

    @property
    def note_bytes(self) -> int:
        """Bytes of notes and of the list of free rows."""
        return sum(note.nbytes for note in self.notes.values()) + self._free.nbytes

    def reserve(self, count: int) -> None:
        """Have room for `count` rows more, and a whole chunk beyond."""
        if self.used + count > MAX_ROWS:
            raise MemoryError(
                f"a table holds at most {MAX_ROWS} rows of a kind on one rank; use more ranks, or evict"
            )
        needed = max(-(-(self.used + count) // self.chunk_rows), 1) + 1
        while len(self.chunks) < needed:
            self.chunks.append(torch.empty(self.chunk_rows, self.width, dtype=self.dtype))
            self.addresses = np.array([chunk.data_ptr() for chunk in self.chunks], np.uint64)
        for name, note in self.notes.items():
            if len(note) < self.used + count:
                larger = note.new_empty(max(self.used + count, 2 * len(note), self.chunk_rows))
                larger[: len(note)] = note
                self.notes[name] = larger

    def next_free(self, count: int) -> torch.Tensor:
        """The free row numbers that the next `count` rows take, in their order; fewer if there are fewer."""
        return self._free[max(0, self.free - count) : self.free].flip(0)

    def claim(self, count: int) -> None:
        """The next `count` rows are taken: those of `next_free` first, then `used` and on."""
        again = min(count, self.free)
        self.reserve(count - again)
        self.free -= again
        self.used += count - again

    def take(self, count: int) -> torch.Tensor:
        """Numbers (count,) int64 of rows that were free."""
        again = self.next_free(count)
        rows = torch.cat([again, torch.arange(self.used, self.used + count - len(again))])
        self.claim(count)
        return rows

    def give_back(self, rows: torch.Tensor) -> None:
        """The rows (K,) int64, distinct and taken, are free."""
        if self.free + len(rows) > len(self._free):
            larger = torch.empty(max(self.free + len(rows), 2 * len(self._free)), dtype=torch.int64)
            larger[: self.free] = self._free[: self.free]
            self._free = larger
        self._free[self.free : self.free + len(rows)] = rows
        self.free += len(rows)
