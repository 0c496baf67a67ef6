"""Memory that a table takes for more rows, before it has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..embedding import DynamicTable, HashTableCollection
from ..embedding.key_index import LOAD_FACTOR
from ..settings import bytes_of

SLOT_BYTES = 12
"""Of the key structure, see `tritonrec.embedding.key_index`."""

METADATA_BYTES = 16
"""Of a row at most for each policy, where the table is small; beyond that it grows as it did."""


@dataclass(frozen=True)
class Sizes:
    """What a shard of a table has in host memory, bytes, and by what it grows.

    Args:
        rows: of the shard. row_bytes: of a row's float32 values.
        keys: of the key structure; 0 where it is on a device. metadata: of scores, counts and locations.
        policies: that keep metadata. most: of values, where other rows are on disk; None: no bound.
    """

    rows: int
    row_bytes: int
    keys: int
    metadata: int
    policies: int
    most: int | None = None

    def values(self, rows: int) -> int:
        """Bytes of the values of so many rows."""
        size = rows * self.row_bytes
        return size if self.most is None else min(size, self.most)

    def added(self, rows: int, at_peak: bool = True) -> int:
        """Bytes that `rows` more rows add; a bound from above for rows in two tiers of precision.

        Rows and metadata grow with their number. The key structure doubles where its load passes 0.75, and
        both structures are there until the keys have moved; without `at_peak` the old one is gone.
        """
        then = self.rows + rows
        slots = max(self.keys // SLOT_BYTES, 1)
        before = needed = 1 << (slots.bit_length() - 1)  # while keys move, those of the larger structure
        while self.keys and then > LOAD_FACTOR * needed:
            needed *= 2
        keys = SLOT_BYTES * (needed if at_peak else needed - before) if needed > before else 0
        doublings = max((then - 1).bit_length() - max(self.rows - 1, 1).bit_length(), 0)
        by_rows = self.policies * METADATA_BYTES * then - self.metadata
        metadata = max(self.metadata * (2**doublings - 1), by_rows, 0)
        return self.values(then) - self.values(self.rows) + keys + metadata


def sizes_of(table: DynamicTable) -> Sizes:
    """Of a shard. On a device nothing is in host memory; a ``"cached"`` table has its rows there, and one
    on disk those of recent lookups.
    """
    placement, memory = table.placement.chosen(), table.memory()
    storage = placement.storage
    host = storage in ("host", "disk")
    policies = sum(each is not None for each in (table.policy.eviction, table.policy.precision))
    return Sizes(
        len(table),
        0 if storage == "device" else 4 * table.row_width,
        memory["key_structure"] if host else 0,
        memory["metadata"] if host else 0,
        policies if host else 0,
        bytes_of(placement.memory) if storage == "disk" else None,
    )


def tables_added(tables: HashTableCollection, rows: Sequence[int]) -> int:
    """Bytes that as many more rows of each of ``tables.groups`` add on this rank, at most at one time."""
    pairs = zip(tables.groups, rows, strict=True)
    return sum(sizes_of(group.table).added(count) for group, count in pairs)
