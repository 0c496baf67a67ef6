"""Eviction: which keys lose their rows (MTGRBoost, section 4.1)."""

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
    """Scores of a table's rows, and the choice of those that go.

    A score is the last step that used the row (lru, ttl), or how many steps did (lfu).

    Args:
        eviction: see `Eviction`.
        layout: which logical table a key belongs to.
    """

    column = "score"

    def __init__(self, eviction: Eviction, layout: KeyLayout):
        self.eviction, self._layout = eviction, layout
        self.values = RowColumn(torch.int32)
        self._sizes = torch.zeros(len(layout.names), dtype=torch.int64)  # rows of each logical table
        self._missing_timestamps = False
        self._counts = eviction.policy == "lfu"
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def due(self, step: int) -> bool:
        """Whether rows are evicted at `step`."""
        return step % self.eviction.every == 0

    def add(self, handles: torch.Tensor, keys: torch.Tensor) -> None:
        """New rows that no step has used."""
        self.values[handles] = 0 if self._counts else NO_TIMESTAMP
        self._sizes += self._layout.count(keys)

    def remove(self, keys: torch.Tensor) -> None:
        """Rows that were erased."""
        self._sizes -= self._layout.count(keys)

    def record(self, handles: torch.Tensor, step: int) -> None:
        """The rows of `handles` (K,), distinct, are used at `step`."""
        self.values[handles] = self.values[handles] + 1 if self._counts else step

    def expect_missing_timestamps(self) -> None:
        """Rows were loaded: `stamp` has to look for those without a score."""
        self._missing_timestamps = True

    def stamp(self, rows: EmbeddingTable, step: int) -> torch.Tensor:
        """Loaded rows without a score count as used at `step`; their handles (n,)."""
        if self._counts or not self._missing_timestamps:
            return torch.empty(0, dtype=torch.int64)
        _keys, handles = rows.items()
        handles = handles[self.values[handles] == NO_TIMESTAMP]
        self.values[handles] = step
        self._missing_timestamps = False
        return handles

    def choose(
        self, rows: EmbeddingTable, pinned: torch.Tensor, step: int, all_reduce: AllReduce | None
    ) -> torch.Tensor:
        """Keys (n,), ascending, that lose their rows at `step`; none of the handles `pinned` (P,).

        Every rank that shares the table calls this equally often.
        """
        ttl, capacity = self.eviction.ttl, self.eviction.capacity
        if capacity is not None:
            sizes = self._sizes if all_reduce is None else all_reduce(self._sizes.clone())
            excess = (sizes - capacity).clamp(min=0)
            if not bool(excess.any()):
                return torch.empty(0, dtype=torch.int64)
        keys, _handles, scores = unpinned_rows(rows, pinned, self.values)
        if ttl is not None:
            chosen = step - scores > ttl
        else:
            members, ids = self._layout.unpack(keys)
            chosen = select_smallest(scores, ids, members, excess, all_reduce)
        return keys[chosen].sort().values

    def keep(self, rows: EmbeddingTable, keys: torch.Tensor) -> None:
        """Copy the rows of `keys` (n,) that are about to go, if `Eviction.keep`."""
        if self.eviction.keep:
            self._kept.append((keys, rows.gather(rows.find(keys))))

    def take_kept(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and rows of each `keep` since the last call."""
        kept, self._kept = self._kept, []
        return kept
