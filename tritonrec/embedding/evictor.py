"""Eviction: scores of rows, and the choice of rows to erase (MTGRBoost, section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .key_layout import KeyLayout
from .metadata import RowPolicy
from .policy import Eviction
from .pools import Arriving
from .select import (
    AllReduce,
    chosen_slots,
    in_order_of_keys,
    select_smallest,
    smallest_slots,
    unpinned_rows,
    unpinned_slots,
)
from .shared_state import RowColumn
from .stored_table import StoredTable

NO_TIMESTAMP = -1
"""Score of a row that no step has used."""
FACTOR = 4
"""Between the ages, in steps with a lookup, at which a bucket is cleared."""


class Evictor(RowPolicy):
    """Scores of a table's rows, and the choice of rows to erase.

    The score of a row is the last step that used it (lru, ttl), or the number of such steps (lfu).

    Args:
        eviction: see `Eviction`.
        layout: maps keys to logical tables.
        device: of the table.
        capacity: of `eviction` in rows.
    """

    def __init__(
        self,
        eviction: Eviction,
        layout: KeyLayout,
        device: torch.device | None = None,
        capacity: int | None = None,
    ):
        super().__init__("score", eviction.every, RowColumn(torch.int32, device=device), layout, device)
        self.eviction, self._device, self._capacity = eviction, device, capacity
        self._missing_timestamps = False
        self._counts = eviction.policy == "lfu"
        self.new = 0 if self._counts else NO_TIMESTAMP
        self._marks = RowColumn(torch.bool)  # of pinned rows, in a pass
        self._ages: LastSteps | None = (
            None  # of a table on the host, with lru or ttl, once a pass has made it
        )

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._marks.nbytes + (0 if self._ages is None else self._ages.nbytes)

    def record(self, keys: torch.Tensor, handles: torch.Tensor, step: int) -> None:
        self.values[handles] = self.values[handles] + 1 if self._counts else step
        if self._ages is not None:
            self._ages.add(keys, handles, step)

    def expect_missing_timestamps(self) -> None:
        """Loaded rows may lack a timestamp: the next `stamp` searches for them."""
        self._missing_timestamps, self._ages = True, None

    def stamp(self, rows: StoredTable, step: int) -> torch.Tensor:
        """Give rows without a timestamp the timestamp `step`; returns their handles (n,), or -1."""
        if self._counts or not self._missing_timestamps:
            return torch.empty(0, dtype=torch.int64, device=self._device or "cpu")
        _keys, handles = rows.slots_in_order() if rows.padded else rows.items()
        handles = torch.where(self.values[handles] == NO_TIMESTAMP, handles, -1)
        self.values[handles] = step
        self._missing_timestamps = False
        return handles

    def foresee(
        self, rows: StoredTable, step: int, in_buffers: int, all_reduce: AllReduce | None
    ) -> Arriving:
        """By a capacity, how many rows each logical table has too many, all ranks together; by ttl, how many
        rows of this rank have an access too long ago.
        """
        ttl, capacity = self.eviction.ttl, self._capacity
        if capacity is not None:
            return Arriving((self.sizes(all_reduce) - capacity).clamp(min=0))
        assert ttl is not None
        _keys, handles = rows.slots_in_order()
        scores = self.values[handles]
        return Arriving(((handles >= 0) & (scores != NO_TIMESTAMP) & (step - scores > ttl)).sum().view(1))

    def choose(
        self,
        rows: StoredTable,
        pinned: torch.Tensor,
        step: int,
        most: list[int] | None,
        all_reduce: AllReduce | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys (n,) int64, ascending, to evict at `step`, none of a `pinned` handle (P,); and None.

        With `most`, what `foresee` has found, of a table that is padded, without a wait: keys (sum(most),),
        the chosen ones first, and () int64, their number. Collective over the ranks that share the table,
        where `all_reduce` is given.
        """
        if most is None:
            return self._choose(rows, pinned, step, all_reduce), None
        keys, handles, among = unpinned_slots(rows, pinned)
        scores = self.values[handles]
        if self.eviction.ttl is not None:
            expired = among & (step - scores > self.eviction.ttl)
            positions, count = chosen_slots(expired, most[0])
        else:
            members, _ids = self._layout.unpack(keys)
            positions, count = smallest_slots(scores, keys, members, among, most, all_reduce)
        return in_order_of_keys(keys[positions], positions, count)[0], count

    def _choose(
        self, rows: StoredTable, pinned: torch.Tensor, step: int, all_reduce: AllReduce | None
    ) -> torch.Tensor:
        ttl, capacity = self.eviction.ttl, self._capacity
        excess = torch.zeros_like(self._sizes)
        if capacity is not None:
            excess = (self.sizes(all_reduce) - capacity).clamp(min=0)
            if not bool(excess.any()):
                return torch.empty(0, dtype=torch.int64, device=self._device or "cpu")
        if self._counts:
            keys, _handles, scores = unpinned_rows(rows, pinned, self.values)
        else:
            keys, scores = self._unpinned_oldest(rows, pinned, None if ttl is None else step - ttl, excess)
        if ttl is not None:
            return keys.sort().values
        # Merged tables have a capacity each: the k smallest scores are chosen for each of them.
        members, ids = self._layout.unpack(keys)
        return keys[select_smallest(scores, ids, members, excess, all_reduce)].sort().values

    def _unpinned_oldest(
        self, rows: StoredTable, pinned: torch.Tensor, before: int | None, enough: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) and last steps (n,) of rows that are not `pinned` (P,), from the oldest step on: all
        `before` a step, or `enough` (m,) of each logical table and the rest of the last step that is read.
        """
        if self._ages is None:
            self._ages = LastSteps.of_all(rows, self.values)
        self._marks.grow(rows.end)
        # Marks by handle, taken back below: a lookup of one bit, where a search in `pinned` would be needed.
        self._marks[pinned] = True
        missing = enough.clone()
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        found = [(none, none)]
        for bucket in self._ages.oldest(rows):
            # Buckets come by ascending step: the first one that is young enough ends the walk.
            if bucket.step >= before if before is not None else not bool((missing > 0).any()):
                break
            keys = bucket.keys[~self._marks[bucket.handles.to(torch.int64)]]
            found.append((keys, torch.full_like(keys, bucket.step)))
            if before is None:
                missing -= self._layout.count(keys)
        self._marks[pinned] = False
        keys, steps = (torch.cat(parts) for parts in zip(*found, strict=True))
        return keys, steps


@dataclass
class Bucket:
    """Rows last used in a `step`: keys (n,) int64 and handles (n,) int32; rows used since are among them."""

    step: int
    keys: torch.Tensor
    handles: torch.Tensor

    def keep(self, which: torch.Tensor) -> None:
        """Only the entries that `which` (n,) bool marks."""
        if not bool(which.all()):
            self.keys, self.handles = self.keys[which], self.handles[which]


class LastSteps:
    """The rows of a table in host memory by the step that used them last: a pass of lru or ttl reads the
    oldest rows alone.

    A step's rows are one bucket. A row that is used again is in a later bucket too, and its entry in the
    earlier one no longer counts; buckets are cleared of such entries at ages that grow by a factor, so an
    entry is looked at some log4(steps) times in all::

        step        0         1         2         3          oldest first: 7 and 9 of step 0,
        rows      7 8 9      8 5       5 6      8 6 4        then 5 of step 2, then 8, 6, 4
        counts    7 . 9      . .       5 .      8 6 4

    Args:
        last: [handle] that step; the caller writes it before `add`.
    """

    def __init__(self, last: RowColumn):
        self._last = last
        self._buckets: list[Bucket] = []  # of ascending steps

    @classmethod
    def of_all(cls, rows: StoredTable, last: RowColumn) -> LastSteps:
        """Of a table with rows; reads all of them."""
        made = cls(last)
        keys, handles = rows.items()
        steps, order = last[handles].sort(stable=True)
        found, counts = steps.unique_consecutive(return_counts=True)
        sizes = counts.tolist()
        parts = zip(found.tolist(), keys[order].split(sizes), handles[order].split(sizes), strict=True)
        made._buckets = [Bucket(step, own, of_own.to(torch.int32)) for step, own, of_own in parts]
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(each.keys.nbytes + each.handles.nbytes for each in self._buckets)

    def add(self, keys: torch.Tensor, handles: torch.Tensor, step: int) -> None:
        """Rows (K,) used in `step`, the last one or a later one; a handle of -1 is left out."""
        bucket = Bucket(step, keys, handles.to(torch.int32))
        bucket.keep(handles >= 0)
        if self._buckets and self._buckets[-1].step == step:  # loaded rows got it as their timestamp
            before = self._buckets.pop()
            before.keep(~torch.isin(before.keys, keys))
            bucket.keys = torch.cat([before.keys, bucket.keys])
            bucket.handles = torch.cat([before.handles, bucket.handles])
        self._buckets.append(bucket)
        age = 1
        while age < len(self._buckets):
            self._clear(self._buckets[-1 - age])
            age *= FACTOR

    def oldest(self, rows: StoredTable) -> Iterator[Bucket]:
        """Buckets from the oldest on, with rows that are there and were not used since."""
        gone = 0
        try:
            for bucket in self._buckets:
                self._clear(bucket)
                # The handle of an erased row may be another row's, used in the same step.
                bucket.keep(rows.find(bucket.keys) == bucket.handles)
                if len(bucket.keys):
                    yield bucket
                elif bucket is self._buckets[gone]:
                    gone += 1
        finally:
            del self._buckets[:gone]

    def _clear(self, bucket: Bucket) -> None:
        bucket.keep(self._last[bucket.handles.to(torch.int64)] == bucket.step)
