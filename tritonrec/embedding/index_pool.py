"""A pool of row numbers with a free list."""

from __future__ import annotations

import torch

MAX_ROWS = 1 << 30
"""Rows of one pool at most; the next bit distinguishes the two precision tiers."""


class IndexPool:
    """Allocates the numbers 0, 1, 2, ...; reuses released ones first, the last one before the others."""

    def __init__(self) -> None:
        self.end = 0  # every number allocated so far is below
        # A stack; its first `_count` numbers are on it.
        self._free = torch.empty(0, dtype=torch.int64, device="cpu")
        self._count = 0

    def __len__(self) -> int:
        return self.end - self._count

    @property
    def nbytes(self) -> int:
        """Bytes of the list of free numbers."""
        return self._free.nbytes

    def check_room(self, count: int) -> None:
        """Raise MemoryError where `count` numbers more would leave [0, MAX_ROWS)."""
        if self.end + count - self._count > MAX_ROWS:
            raise MemoryError(
                f"a table holds at most {MAX_ROWS} rows on one rank; it has {len(self)}, and {count} are "
                "new: use more ranks, or evict"
            )

    def end_after(self, count: int) -> int:
        """`end` after the allocation of `count` more numbers."""
        return self.end + max(count - self._count, 0)

    def next_free(self, count: int) -> torch.Tensor:
        """The free numbers among the next `count` ones, in their order; numbers from `end` on follow."""
        return self._free[max(0, self._count - count) : self._count].flip(0)

    def claim(self, count: int) -> None:
        """Allocate the next `count` numbers: those of `next_free`, then from `end` on."""
        self.end = self.end_after(count)
        self._count -= min(count, self._count)

    def allocate(self, count: int) -> torch.Tensor:
        """The next `count` numbers (count,) int64. Raises MemoryError."""
        self.check_room(count)
        again = self.next_free(count)
        numbers = torch.cat(
            [again, torch.arange(self.end, self.end + count - len(again), dtype=torch.int64, device="cpu")]
        )
        self.claim(count)
        return numbers

    def release(self, numbers: torch.Tensor) -> None:
        """Free `numbers` (K,) int64, distinct and allocated."""
        count = self._count + numbers.shape[0]
        if count == self._count:
            return
        if count > len(self._free):
            larger = torch.empty(max(count, 2 * len(self._free)), dtype=torch.int64, device="cpu")
            larger[: self._count] = self._free[: self._count]
            self._free = larger
        self._free[self._count : count] = numbers
        self._count = count
