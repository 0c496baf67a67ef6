"""A pool of row numbers in device memory: which ones are taken only the device knows."""

from __future__ import annotations

import torch

from ..kernels.dispatch import on_host
from .device_numbers import DeviceNumbers
from .index_pool import MAX_ROWS
from .stream_lock import use_here

END, FREE = range(2)


def most_of(which: torch.Tensor) -> int:
    """Upper bound of the marks of `which` (K,) bool: their number, where reading it waits for no device."""
    return int(which.sum()) if on_host(which) else len(which)


class DevicePool:
    """Allocates the numbers 0, 1, 2, ...; reuses released ones first, as `IndexPool`, without a wait.

        released 3, then 5, of the numbers 0 to 6        numbers [END 7, FREE 2], stack 3 5
        next(4)   5 3 7 8                                claim of 3   numbers [8, 0]

    Args:
        others: further numbers that change with those of the pool (`DeviceNumbers`), at index 2 and up.
    """

    def __init__(self, device: torch.device, others: int = 0):
        self._device, self._others = device, others
        self.numbers = DeviceNumbers(2 + others, device)
        self._stack = torch.empty(0, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        """Numbers in use; waits for the device."""
        end, free, *_others = self.numbers.exact()
        return end - free

    @property
    def end(self) -> int:
        """Upper bound of all numbers so far."""
        return min(self.numbers.bound(END), MAX_ROWS)

    @property
    def nbytes(self) -> int:
        """Bytes of the list of free numbers."""
        return self._stack.nbytes

    def end_after(self, most: int) -> int:
        """Upper bound of all numbers once up to `most` more are taken. Raises MemoryError."""
        if self.numbers.bound(END) + most > MAX_ROWS and len(self) + most > MAX_ROWS:
            raise MemoryError(
                f"a table holds at most {MAX_ROWS} rows on one rank; it has {len(self)}, and up to {most} "
                "are new: use more ranks, or evict"
            )
        anew = max(most - self.numbers.bound(FREE), 0) if on_host(self._stack) else most
        return min(self.numbers.bound(END) + anew, MAX_ROWS)

    def next(self, size: int) -> torch.Tensor:
        """The next `size` numbers (size,) int64, of which `claim` takes the first."""
        end, free = self.numbers.values[END], self.numbers.values[FREE]
        place = torch.arange(size, device=self._device)
        numbers = end + (place - free).clamp(min=0)
        if not len(self._stack):
            return numbers
        # The top of the stack first; behind `free` numbers the clamp reads anything, and `numbers` are taken.
        stacked = self._stack[(free - 1 - place).clamp(0, len(self._stack) - 1)]
        return torch.where(place < free, stacked, numbers)

    def claim(self, taken: torch.Tensor, most: int, others: tuple[int, ...] = ()) -> None:
        """Take the first `taken` () int64, at most `most`, of `next`; the others rise by at most `others`."""
        reused = torch.minimum(taken, self.numbers.values[FREE])
        self._add([taken - reused, -reused], (most, 0, *others))

    def release(self, numbers: torch.Tensor, which: torch.Tensor) -> None:
        """Free those of `numbers` (K,) int64, distinct and taken, that `which` (K,) bool marks, in order."""
        most = most_of(which)
        if not most:
            return
        needed = min(self.numbers.bound(FREE) + most, self.end)  # no more are free than there are
        if needed + 1 > len(self._stack):
            larger = self._stack.new_empty(max(needed, 2 * len(self._stack)) + 1)
            larger[: len(self._stack)] = self._stack
            use_here(self._stack)
            self._stack = larger
        rank = which.cumsum(0)
        place = self.numbers.values[FREE] + rank - 1
        self._stack[torch.where(which, place, len(self._stack) - 1)] = numbers  # the last place is none
        freed = rank[-1]
        self._add([torch.zeros_like(freed), freed], (0, most))

    def _add(self, change: list[torch.Tensor], rise: tuple[int, ...]) -> None:
        none = [torch.zeros_like(change[0])] * self._others
        self.numbers.add(torch.stack([*change, *none]), rise + (0,) * (2 + self._others - len(rise)))
