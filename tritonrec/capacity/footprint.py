"""Memory that a table takes for more rows, before it has them."""

from __future__ import annotations

from collections.abc import Sequence

from ..embedding import DynamicTable, HashTableCollection
from ..embedding.key_index import LOAD_FACTOR

SLOT_BYTES = 12
"""Of the key structure, see `tritonrec.embedding.key_index`."""
METADATA_BYTES = 16
"""Of a row at most for each policy, where the table is small; beyond that it grows as it did."""


def bytes_added(table: DynamicTable, rows: int, at_peak: bool = True) -> int:
    """Bytes of host memory that `rows` more rows of a shard add; a bound from above for rows in two tiers.

    Rows and metadata grow with their number. The key structure doubles where its load passes 0.75, and both
    structures are there until the keys have moved; without `at_peak` the old one is gone.

    A table on a device adds nothing here; a ``"cached"`` one adds its rows, whose keys are on the device.
    """
    storage = table.placement.chosen().storage
    if storage == "device":
        return 0
    added = rows * 4 * table.row_width
    if storage == "cached":
        return added
    now, then = len(table), len(table) + rows
    sizes = table.memory()
    slots = max(sizes["key_structure"] // SLOT_BYTES, 1)
    before = needed = 1 << (slots.bit_length() - 1)  # while keys move, those of the larger structure
    while then > LOAD_FACTOR * needed:
        needed *= 2
    if needed > before:
        added += SLOT_BYTES * (needed if at_peak else needed - before)
    policies = sum(each is not None for each in (table.policy.eviction, table.policy.precision))
    doublings = max((then - 1).bit_length() - max(now - 1, 1).bit_length(), 0)
    metadata = sizes["metadata"]
    return added + max(metadata * (2**doublings - 1), policies * METADATA_BYTES * then - metadata, 0)


def tables_added(tables: HashTableCollection, rows: Sequence[int], at_peak: bool = True) -> int:
    """`bytes_added` of a rank's tables, by the order of ``tables.groups``."""
    return sum(
        bytes_added(group.table, count, at_peak) for group, count in zip(tables.groups, rows, strict=True)
    )
