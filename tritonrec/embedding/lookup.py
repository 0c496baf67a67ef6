"""Result and counters of a table's lookups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Lookup(NamedTuple):
    """The rows of a step's keys.

    handles: (K,) int64, -1 for a key that is not admitted, and behind the count. Valid until the second
        lookup after this one begins; evictions, moves and inserts in between do not change them.
    low_precision: (K,) bool, rows to store in 16 bits, False where not admitted; None without precision
        tiers.
    """

    handles: torch.Tensor
    low_precision: torch.Tensor | None


class Moves(NamedTuple):
    """Rows that a table has moved so far.

    promoted, demoted: to float32 and to 16 bits; a new row moves at its first update. cached: rows looked up
    that were in a device's cache, or in the memory of a table on disk. disk_read, disk_written: read from a
    disk, and written to it.
    """

    promoted: int = 0
    demoted: int = 0
    cached: int = 0
    disk_read: int = 0
    disk_written: int = 0


@dataclass
class Counters:
    """Rows and lookups of a table on this rank since it was made.

    found: keys looked up that had a row. inserted: rows made for new keys. rejected: lookups of keys that
    are not admitted yet. evicted: rows erased by eviction. The others are those of `Moves`.
    """

    found: int
    inserted: int
    rejected: int
    evicted: int
    promoted: int
    demoted: int
    cached: int
    disk_read: int
    disk_written: int
