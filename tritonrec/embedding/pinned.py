"""Handles of rows in the pipeline's buffers."""

from __future__ import annotations

import torch

from .stream_lock import use_here


class PinnedRows:
    """Handles of the last two lookups, whose rows are in the two buffers and will be updated.

        lookup 0   lookup 1   update 0   lookup 2   update 1   lookup 3   update 2
                   handles of 0 and 1 are pinned    1 and 2 are

    No policy evicts or demotes the row of a pinned handle. If the user erases the row, the handle stays
    reserved: its pending update must not reach the row of another key.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        none = torch.empty(0, dtype=torch.int64, device=device)
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
