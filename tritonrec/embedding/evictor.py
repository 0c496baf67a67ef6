"""Eviction: scores of rows, and the choice of rows to erase (MTGRBoost, section 4.1)."""

from __future__ import annotations

import torch

from .interface import EmbeddingTable
from .key_layout import KeyLayout
from .policy import Eviction
from .row_column import RowColumn
from .select import AllReduce, select_smallest, unpinned_rows

NO_TIMESTAMP = -1
"""Score of a row that no step has used."""


class Evictor:
    """Scores of a table's rows, and the choice of rows to erase.

    The score of a row is the last step that used it (lru, ttl), or the number of such steps (lfu).

    Args:
        eviction: see `Eviction`.
        layout: maps keys to logical tables.
        device: of the table.
    """

    column = "score"

    def __init__(self, eviction: Eviction, layout: KeyLayout, device: torch.device | None = None):
        self.eviction, self._layout, self._device = eviction, layout, device
        self.values = RowColumn(torch.int32, device=device)
        # rows of each logical table
        self._sizes = torch.zeros(len(layout.names), dtype=torch.int64, device=device)
        self._missing_timestamps = False
        self._counts = eviction.policy == "lfu"
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def due(self, step: int) -> bool:
        """Whether an eviction pass runs at `step`."""
        return step % self.eviction.every == 0

    def add(self, handles: torch.Tensor, keys: torch.Tensor) -> None:
        """Score new rows, which no step has used."""
        self.values[handles] = 0 if self._counts else NO_TIMESTAMP
        self._sizes += self._layout.count(keys, handles >= 0)

    def remove(self, keys: torch.Tensor) -> None:
        """Subtract erased rows from the sizes."""
        self._sizes -= self._layout.count(keys)

    def record(self, handles: torch.Tensor, step: int) -> None:
        """Record the access of `step` to the rows of `handles` (K,), distinct."""
        self.values[handles] = self.values[handles] + 1 if self._counts else step

    def expect_missing_timestamps(self) -> None:
        """Loaded rows may lack a timestamp: the next `stamp` searches for them."""
        self._missing_timestamps = True

    def stamp(self, rows: EmbeddingTable, step: int) -> torch.Tensor:
        """Give rows without a timestamp the timestamp `step`; returns their handles (n,)."""
        if self._counts or not self._missing_timestamps:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        _keys, handles = rows.items()
        handles = handles[self.values[handles] == NO_TIMESTAMP]
        self.values[handles] = step
        self._missing_timestamps = False
        return handles

    def choose(
        self, rows: EmbeddingTable, pinned: torch.Tensor, step: int, all_reduce: AllReduce | None
    ) -> torch.Tensor:
        """Keys (n,) int64, ascending, to evict at `step`, except those of the `pinned` handles (P,).

        Chosen on the host, which waits for a table on a device. Collective over the ranks that share the
        table, where `all_reduce` is given.
        """
        ttl, capacity = self.eviction.ttl, self.eviction.capacity
        if capacity is not None:
            sizes = self._sizes.cpu() if all_reduce is None else all_reduce(self._sizes.cpu().clone())
            excess = (sizes - capacity).clamp(min=0)
            if not bool(excess.any()):
                return torch.empty(0, dtype=torch.int64, device=self._device)
        keys, _handles, scores = unpinned_rows(rows, pinned, self.values)
        if ttl is not None:
            chosen = step - scores > ttl
        else:
            members, ids = self._layout.unpack(keys)
            chosen = select_smallest(scores, ids, members, excess, all_reduce)
        return keys[chosen].sort().values.to(self._device)

    def keep(self, rows: EmbeddingTable, keys: torch.Tensor) -> None:
        """Copy the rows of `keys` (n,) before their eviction, if `Eviction.keep`."""
        if self.eviction.keep:
            self._kept.append((keys, rows.gather(rows.find(keys))))

    def take_kept(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and rows of each `keep` since the last call."""
        kept, self._kept = self._kept, []
        return kept
