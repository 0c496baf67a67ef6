"""Row metadata by handle: scores and access counts, pinned rows, and the log of changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .change_log import ChangeLog
from .key_layout import KeyLayout
from .pools import Arriving
from .select import AllReduce
from .shared_state import RowColumn, use_here
from .stored_table import StoredTable


class RowPolicy:
    """A policy with one number for each row: `Evictor`, `AccessCounter`.

    Args:
        column: name of the numbers' column in checkpoints.
        every: steps between the passes in which it acts.
        values: the numbers by handle.
        layout: of a policy that goes by the sizes of logical tables: maps keys to them.
        device: of the table.
    """

    new = 0
    """The number of a row that no step has used."""

    def __init__(
        self,
        column: str,
        every: int,
        values: RowColumn,
        layout: KeyLayout | None = None,
        device: torch.device | None = None,
    ):
        self.column, self.every, self.values = column, every, values
        self._layout, self._counts_rows = layout or KeyLayout(), layout is not None
        names = self._layout.names if self._counts_rows else ()
        # rows of each logical table, where they are counted
        self._sizes = torch.zeros(len(names), dtype=torch.int64, device=device or "cpu")

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.values.nbytes

    def due(self, step: int) -> bool:
        """Whether the policy acts at `step`."""
        return step % self.every == 0

    def add(self, handles: torch.Tensor, keys: torch.Tensor) -> None:
        """Initialise the numbers of new rows, which no step has used; a handle of -1 is left out."""
        self.values[handles] = self.new
        if self._counts_rows:
            self._sizes += self._layout.count(keys, handles >= 0)

    def remove(self, keys: torch.Tensor, which: torch.Tensor) -> None:
        """Handle the erasure of those of `keys` (K,) that `which` (K,) bool marks."""
        if self._counts_rows:
            self._sizes -= self._layout.count(keys, which)

    def sizes(self, all_reduce: AllReduce | None) -> torch.Tensor:
        """Rows of each logical table on all ranks, (m,) int64: each rank may have to act though its own part
        is small. Collective where `all_reduce` is given.
        """
        sizes = self._sizes.clone()
        return sizes if all_reduce is None else all_reduce(sizes)

    def record(self, keys: torch.Tensor, handles: torch.Tensor, step: int) -> None:
        """Record the access of `step` to the rows of `keys` (K,) and `handles` (K,), distinct or -1."""
        raise NotImplementedError

    def foresee(
        self, rows: StoredTable, step: int, in_buffers: int, all_reduce: AllReduce | None
    ) -> Arriving:
        """Of the pass at `step`, by a table that is padded: at most how many rows it chooses.

        Rows `in_buffers` are among them that are pinned then, or may be updated before. Collective where
        `all_reduce` is given and ranks choose together.
        """
        raise NotImplementedError


class PinnedRows:
    """Handles of the last two lookups, whose rows are in the two buffers and will be updated.

        lookup 0   lookup 1   update 0   lookup 2   update 1   lookup 3   update 2
                   handles of 0 and 1 are pinned    1 and 2 are

    No policy evicts or demotes the row of a pinned handle. If the user erases the row, the handle stays
    reserved: its pending update must not reach the row of another key.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        none = torch.empty(0, dtype=torch.int64, device=device or "cpu")
        self._before, self.last = none, none  # handles of the last lookup but one, and of the last
        self._reserved = none, none  # free after the next lookup, and after the second one

    @property
    def in_buffers(self) -> int:
        """At most how many rows are pinned."""
        return len(self._before) + len(self.last)

    def advance(self, handles: torch.Tensor) -> torch.Tensor:
        """Pin the `handles` (K,) of a new lookup; returns the reserved handles that are free now."""
        #     lookup t        erase       lookup t + 1    lookup t + 2
        #                     reserved    still pinned    its last update is done: free
        free, following = self._reserved
        self._reserved = following, following[:0]
        use_here(self._before)
        self._before, self.last = self.last, handles
        return free

    def reserve(self, handles: torch.Tensor) -> torch.Tensor:
        """Reserve the pinned `handles` (K,) of erased rows; returns the others, which are free."""
        used = torch.isin(handles, torch.cat([self._before, self.last]))
        self._reserved = self._reserved[0], torch.cat([self._reserved[1], handles[used]])
        return handles[~used]

    def restore(self, handles: torch.Tensor) -> None:
        """Add `handles` (K,) to those of the last lookup, after a restart."""
        self.last = torch.cat([self.last, handles])


class RowMetadata:
    """All metadata of a table's rows.

    Args:
        policies: those with a number for each row. device: of the table.
    """

    def __init__(self, policies: Sequence[RowPolicy], device: torch.device | None = None):
        self.policies = policies
        self.changes, self.pinned = ChangeLog(device), PinnedRows(device)
        # Of the pinned rows.
        self._last_keys: torch.Tensor | None = torch.empty(0, dtype=torch.int64, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(policy.nbytes for policy in self.policies) + self.changes.nbytes

    def add(self, handles: torch.Tensor, keys: torch.Tensor, end: int) -> None:
        """Add new rows (K,); all handles are below `end`, and -1 is left out."""
        self.changes.add(handles, end)
        for policy in self.policies:
            policy.values.grow(end)
            policy.add(handles, keys)

    def remove(self, keys: torch.Tensor, which: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """Handle the erasure of those of `keys` (K,) that `which` (K,) bool marks, all before the count."""
        self.changes.erase(keys, count)
        for policy in self.policies:
            policy.remove(keys, which)

    def record(self, keys: torch.Tensor, handles: torch.Tensor, step: int) -> torch.Tensor:
        """Record a lookup of `keys` (K,), whose rows are at `handles` (K,), distinct or -1; returns reserved
        handles that are free now.
        """
        if self.policies:
            self.changes.mark(self.pinned.last, self._last_keys)  # their column `recent` changes
            self._last_keys = keys
        self.changes.mark(handles, keys)
        for policy in self.policies:
            policy.record(keys, handles, step)
        return self.pinned.advance(handles)

    def read(self, handles: torch.Tensor) -> dict[str, torch.Tensor]:
        """Metadata (K,) of the rows of `handles` (K,) by column of a checkpoint."""
        columns = {policy.column: policy.values[handles] for policy in self.policies}
        if self.policies:
            columns["recent"] = torch.isin(handles, self.pinned.last)
        return columns

    def read_by_handle(self, handles: torch.Tensor, end: int) -> dict[str, torch.Tensor]:
        """As `read`, by column values (end,) by handle, of which only those of `handles` are written."""
        columns = {}
        for name, values in self.read(handles).items():
            columns[name] = torch.empty(end, dtype=values.dtype, device=values.device)
            columns[name][handles] = values
        return columns

    def copy(self, end: int) -> dict[str, torch.Tensor]:
        """By column of a checkpoint a copy of the values (end,) by handle."""
        columns = {policy.column: policy.values.rows[:end].clone() for policy in self.policies}
        if self.policies:
            columns["recent"] = torch.zeros(end, dtype=torch.bool, device=self.pinned.last.device)
            columns["recent"][self.pinned.last[self.pinned.last >= 0]] = True
        return columns

    def restore(self, handles: torch.Tensor, columns: dict[str, torch.Tensor]) -> None:
        """Load the result of `read`."""
        for policy in self.policies:
            policy.values[handles] = columns[policy.column]
        if self.policies:
            self.pinned.restore(handles[columns["recent"]])
            self._last_keys = None
