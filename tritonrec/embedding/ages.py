"""Rows in the order of their last step, so that a pass of lru or ttl reads the oldest rows alone.

A step's rows are one bucket. A row that is used again is in a later bucket too, and its entry in the earlier
one no longer counts; buckets are cleared of such entries at ages that grow by a factor, so an entry is looked
at some log4(steps) times in all::

    step        0         1         2         3          oldest first: 7 and 9 of step 0,
    rows      7 8 9      8 5       5 6      8 6 4        then 5 of step 2, then 8, 6, 4
    counts    7 . 9      . .       5 .      8 6 4
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .row_column import RowColumn
from .stored_table import StoredTable

FACTOR = 4
"""Between the ages, in steps with a lookup, at which a bucket is cleared."""


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
    """The rows of a table in host memory by the step that used them last.

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
