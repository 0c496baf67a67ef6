"""Pools of row numbers, with free lists: on the host, and on a device, which alone knows which are taken."""

from __future__ import annotations

import torch

from ..kernels.dispatch import on_host
from .shared_state import use_here

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


class Arriving:
    """A copy of `values` (n,) int64 on its way from the device to the host."""

    def __init__(self, values: torch.Tensor):
        self._copy = values
        self._event: torch.Event | None = None
        if values.device.type != "cpu":
            self._copy = torch.empty(values.shape, dtype=torch.int64, pin_memory=True, device="cpu")
            self._copy.copy_(values, non_blocking=True)
            self._event = torch.accelerator.current_stream(values.device).record_event()

    @property
    def there(self) -> bool:
        """Whether it has arrived; asked, not waited for."""
        return self._event is None or self._event.query()

    def take(self) -> list[int]:
        """The numbers; waits where they have not arrived."""
        if self._event is not None and not self.there:
            self._event.synchronize()
        return self._copy.tolist()


class DeviceNumbers:
    """`count` int64 numbers on a device, 0 at first; the host knows them, or bounds of them, without a wait.

    On the CPU the bounds are the numbers. On an accelerator each change queues a copy to the host, unless one
    is on its way; until the next copy arrives, the bounds rise with every change.
    """

    def __init__(self, count: int, device: torch.device):
        self.values = torch.zeros(count, dtype=torch.int64, device=device)
        self._on_host = device.type == "cpu"
        self._known = [0] * count
        self._rises: list[tuple[int, ...]] = []  # since `_known`
        self._copy: Arriving | None = None
        self._copied = 0  # of these rises are in the copy on its way

    def add(self, change: torch.Tensor, rise: tuple[int, ...]) -> None:
        """Add `change` (count,) to the numbers; no entry of it is above that of `rise`."""
        self.values += change
        if self._on_host:
            return
        self._rises.append(rise)
        self._arrive()
        if self._copy is None:
            # The copy holds what was queued before it: these
            # rises are in it, later ones still have to be added.
            self._copy, self._copied = Arriving(self.values), len(self._rises)

    def bound(self, index: int) -> int:
        """An upper bound of one number."""
        if self._on_host:
            return int(self.values[index])
        self._arrive()
        return self._known[index] + sum(rise[index] for rise in self._rises)

    def reset(self, index: int) -> None:
        """Set one number to 0; a copy on its way still brings what it was, which is a bound."""
        self.values[index] = 0
        self._known[index] = 0
        self._rises = [(*rise[:index], 0, *rise[index + 1 :]) for rise in self._rises]

    def exact(self) -> list[int]:
        """The numbers; waits for the device."""
        return self.values.tolist()

    def _arrive(self) -> None:
        """Take a copy that has arrived."""
        if self._copy is not None and self._copy.there:
            self._known, self._rises, self._copy = self._copy.take(), self._rises[self._copied :], None


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

    def extend(self, numbers: torch.Tensor, which: torch.Tensor) -> None:
        """Have those of `numbers` (K,) int64 that `which` (K,) bool marks, which it had not, as free ones. A
        pool that is extended gives these alone: the caller takes no more than there are.
        """
        count = which.sum()
        self._add([count, torch.zeros_like(count)], (most_of(which), 0))
        self.release(numbers, which)

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
