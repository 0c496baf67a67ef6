"""Rows of recent lookups in a fast memory, before all rows in a slower one: they are known a batch ahead.

Of device memory before host memory, and of host memory before a file, and of both in a row (NestPipe, section
IV.A). Which rows are in the cache changes no value.
"""

from __future__ import annotations

import torch

from ..kernels.dispatch import on_host
from . import numba_disk
from .row_storage import RowStorage, TierMarks
from .selection import select
from .shared_state import RowColumn, StreamLock

PLACE_BYTES = 4 + 4 + 1 + 1
"""Of a row in a cache in host memory, beside its values."""


class CachedStorage(RowStorage):
    """All rows have a place at home. While a row is in the cache, the cache has its value.

    A lookup brings the rows of its batch into the cache. Rows of the last two lookups, which are in the
    pipeline's buffers, stay there. Of the others those leave that a hand comes to, in a ring::

        place             0   1   2   3   4   5       lookup 10 misses two rows, the hand is at 2
        last lookup       9   6   8   5   9   3
        row               4   7   1   0   2   3  ->   rows 1 and 0 leave; they are written home if they were
                                                      updated since they came

    Rows that find no place are read and written at home directly. A lookup that fails changes no row.

    Args:
        home: of all rows; one on the host is behind a `HostStorage`.
        rows: of the cache.
        tiers: rows may be in 16 bits at home, or rounded to them: only where no other cache is before this.
    """

    ahead = 0  # it never grows
    wants_misses = True
    takes_new = False
    """Whether a new row enters the cache at once, before it is looked up."""

    def __init__(self, home: RowStorage, rows: int, tiers: bool = False):
        device = home.device
        super().__init__(home.dim, home.row_width, rows, device)
        super().add(torch.empty(0, dtype=torch.int64, device=device), rows)
        self._home, self._rows = home, rows
        self._low = TierMarks(home.dim, device) if tiers else None
        # by handle: 1 + its place; 0: at home, and -1: there and of the last lookup
        self._places = RowColumn(torch.int32, device=device)
        # by place: 1 + its handle, the last lookup that used it, whether it was updated since it came
        self._handles, self._recent, self._updated = (
            RowColumn(dtype, end=rows, device=device) for dtype in (torch.int32, torch.int32, torch.bool)
        )
        self._hand = torch.zeros((), dtype=torch.int64, device=device)
        self._lookup, self._size = 1, 0  # lookups so far, and keys of the last one
        self._outside = torch.empty(0, dtype=torch.int64, device=device)  # rows at home, of the last one
        self._found = torch.zeros((), dtype=torch.int64, device=device)
        self._moving = StreamLock(device)  # for rows that move while another lane reads the table's state

    def grow(self, end: int) -> None:
        with self._moving:
            self._grow(end)

    def add(self, handles: torch.Tensor, end: int) -> None:
        with self._moving:
            self._grow(end)
            self._home.add(handles, end)
            if self._low is not None:
                self._low.add(handles, end)
            self._places[handles] = 0
            if self.takes_new:
                self._bring(handles, self._lookup, new=True)

    def release(self, handles: torch.Tensor) -> None:
        # The row is gone: nothing is written for it when its place is given away.
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
        low = None if self._low is None else self._low.update(handles, values, low_precision)
        places = self._place(handles)
        super().update(places, values)
        self._updated[places] = True
        self._home.update(torch.where(places < 0, handles, -1), values, low)

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        return super().in_low_precision(handles) if self._low is None else self._low[handles]

    def prefetch(self, handles: torch.Tensor) -> None:
        with self._moving:
            self._lookup += 1
            known = self._places[self._locate(handles)]
            places = known.to(torch.int64).clamp(min=0) - 1
            if self._home.wants_misses:
                self._home.prefetch(torch.where(places < 0, handles, -1))
            self._found += (places >= 0).sum()
            self._use(places)
            # A row of the last lookup without a place is being updated at home: it comes in no more.
            self._bring(torch.where(known == 0, handles, -1), self._lookup - 1)
            left, self._outside = self._outside, torch.where(self._places[handles] <= 0, handles, -1)
            if on_host(handles):  # where no device is waited for, a shorter list
                self._outside = self._outside[self._outside >= 0]
            self._places[torch.where(self._places[left] < 0, left, -1)] = 0
            self._places[self._outside] = -1

    @property
    def moved(self) -> list[int]:
        return super().moved if self._low is None else self._low.moved

    @property
    def found(self) -> int:
        return int(self._found)

    def memory(self) -> dict[str, int]:
        home = self._home.memory()
        stored = {name: own + home[name] for name, own in super().memory().items()}
        columns = (self._places, self._handles, self._recent, self._updated, self._low)
        stored["metadata"] += sum(column.nbytes for column in columns if column is not None)
        return stored

    def _grow(self, end: int) -> None:
        self._home.grow(end)
        self._places.grow(end)

    def _place(self, handles: torch.Tensor) -> torch.Tensor:
        """Places (K,) int64 in the cache of the rows of `handles` (K,); -1: at home alone."""
        return self._places[self._locate(handles)].to(torch.int64).clamp(min=0) - 1

    def _bring(self, handles: torch.Tensor, before: int, new: bool = False) -> None:
        """Bring rows of `handles` (K,), or -1, into places of rows that no lookup since `before` has used;
        those of `new` rows hold anything.
        """
        arriving, to = self._choose(handles, before)
        if not len(to):
            return
        leaving = self._handles[to].to(torch.int64) - 1
        # Rows leave their places before others arrive there. A reader waits, and no lane updates them.
        written = torch.where(self._updated[to], leaving, -1)
        values = super().gather(torch.where(written >= 0, to, -1))
        self._home.update(written, values, None if self._low is None else self._low[written])
        self._places[leaving], self._handles[to], self._updated[to] = 0, 0, False
        if not new:
            super().update(to, self._home.gather(arriving))
        self._places[arriving] = (to + 1).to(torch.int32)
        self._handles[to] = (arriving + 1).to(torch.int32)
        self._recent[to] = self._lookup

    def _use(self, places: torch.Tensor) -> None:
        """Note that the rows at `places` (K,), distinct or -1, are looked up."""
        self._recent[places] = self._lookup

    def _choose(self, handles: torch.Tensor, before: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (n,) of `handles` (K,), or -1, that enter the cache, the first ones where places are short,
        and the places (n,) that they get, or -1, of rows whose last lookup is below `before`.
        """
        # At most 2 K + K' places from the hand on are of this lookup, of the last one, or given out.
        reach, self._size = min(self._rows, 2 * len(handles) + self._size), len(handles)
        ring = (self._hand + torch.arange(reach, device=self.device)) % self._rows
        # No number of them is read on the host: lists have their greatest length, and -1 behind the last.
        free = select(self._recent[ring] < before, padded=True)
        wanted = select(handles >= 0, padded=True)
        assert free.count is not None and wanted.count is not None
        most = min(reach, len(handles))
        number = torch.minimum(free.count, wanted.count)
        given = torch.arange(most, device=self.device) < number
        to = torch.where(given, free.take(ring)[:most], -1)
        if most:
            last = to.gather(0, (number - 1).clamp(min=0).view(1))[0]  # an index () would wait for the device
            self._hand.copy_(torch.where(number > 0, (last + 1) % self._rows, self._hand))
        return torch.where(given, wanted.take(handles)[:most], -1), to


class HostCachedStorage(CachedStorage):
    """A cache in host memory, whose hand is that of a clock: it passes a row over once for each last use::

        place             0   1   2   3   4         lookup 10 misses row 9, the hand is at 1
        row               4   7   1   0   2
        last lookup       8   9   6   7   3         place 1 is of the last lookup, 2 was used once more,
        uses              0   2   1   0   0    ->   and row 0 leaves place 3

    A new row enters at once, and is written when it leaves.
    """

    takes_new = True

    def __init__(self, home: RowStorage, rows: int, tiers: bool = False):
        super().__init__(home, rows, tiers)
        self._uses = RowColumn(torch.uint8, end=rows)  # since the hand passed, by place
        self._all_used = -1  # the last lookup since which all places were used: looked at once, as in a load

    def release(self, handles: torch.Tensor) -> None:
        self._uses[self._place(handles)] = 0
        super().release(handles)

    def _use(self, places: torch.Tensor) -> None:
        recent, uses = self._recent.rows.numpy(), self._uses.rows.numpy()
        numba_disk.use(places.numpy(), recent, uses, self._lookup)

    def _choose(self, handles: torch.Tensor, before: int) -> tuple[torch.Tensor, torch.Tensor]:
        handles = handles[handles >= 0]
        places = torch.empty(len(handles) if before > self._all_used else 0, dtype=torch.int64, device="cpu")
        count, hand = numba_disk.choose(
            self._recent.rows.numpy(), self._uses.rows.numpy(), int(self._hand), before, places.numpy()
        )
        if count < len(places):
            self._all_used = before
        self._hand.fill_(int(hand))
        return handles[:count], places[:count]


class HostStorage(RowStorage):
    """The home of a cache whose rows, in float32, only the host reaches: lists come to it without -1.

    The host learns which rows move, so that a lookup on a device waits for it: a batch before their use.
    """

    def __init__(self, home: RowStorage, device: torch.device):
        self.dim, self.row_width, self.device, self._home = home.dim, home.row_width, device, home
        self.wants_misses = home.wants_misses

    def grow(self, end: int) -> None:
        self._home.grow(end)

    def add(self, handles: torch.Tensor, end: int) -> None:
        self._home.add(self._present(handles)[1], end)

    def release(self, handles: torch.Tensor) -> None:
        self._home.release(self._present(handles)[1])

    def gather(self, handles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        positions, there = self._present(handles)
        if out is None and len(there) == len(handles):  # a copy less
            return self._home.gather(there).to(self.device)
        if out is None:
            out = torch.empty(len(handles), self.row_width, dtype=torch.float32, device=self.device)
        if len(there):
            out[positions] = self._home.gather(there).to(self.device)
        return out

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        positions, there = self._present(handles)
        if len(there):
            values = values if len(there) == len(handles) else values[positions]
            self._home.update(there, values.cpu())

    def prefetch(self, handles: torch.Tensor) -> None:
        self._home.prefetch(self._present(handles)[1])

    def memory(self) -> dict[str, int]:
        return self._home.memory()

    def _present(self, handles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (n,) of the `handles` (K,) that are not -1, and those handles on the host."""
        positions = (handles >= 0).nonzero().squeeze(1)
        return positions, handles[positions].cpu()
