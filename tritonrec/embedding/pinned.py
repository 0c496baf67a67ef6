"""Handles of rows that lie in the pipeline's buffers."""

from __future__ import annotations

import torch


class PinnedRows:
    """Handles of the last two lookups, whose rows lie in the two buffers and are still to be updated.

        lookup 0   lookup 1   update 0   lookup 2   update 1   lookup 3   update 2
                   handles of 0 and 1 are pinned    1 and 2 are

    No policy takes the row of a pinned handle. If the user erases it, the handle stays reserved, since its
    update would change the row of the next key that got it.
    """

    def __init__(self) -> None:
        none = torch.empty(0, dtype=torch.int64)
        self._before, self.last = none, none  # handles of the last lookup but one, and of the last
        self._reserved = none, none  # free after the next lookup, and after the one behind it

    def advance(self, handles: torch.Tensor) -> torch.Tensor:
        """A lookup has found `handles` (K,); returns the reserved ones that are free now."""
        free, following = self._reserved
        self._reserved = following, following[:0]
        self._before, self.last = self.last, handles
        return free

    def reserve(self, handles: torch.Tensor) -> torch.Tensor:
        """Rows of `handles` (K,) were erased; returns those that are free at once."""
        used = torch.isin(handles, torch.cat([self._before, self.last]))
        self._reserved = self._reserved[0], torch.cat([self._reserved[1], handles[used]])
        return handles[~used]

    def restore(self, handles: torch.Tensor) -> None:
        """After a restart: the last lookup found `handles` (K,) as well."""
        self.last = torch.cat([self.last, handles])
