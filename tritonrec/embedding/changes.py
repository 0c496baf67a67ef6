"""Which keys changed since the last checkpoint."""

from __future__ import annotations

import torch

ROOM = 1 << 20


class ChangeLog:
    """Keys that were touched, each once when taken; off until `start`."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._length = self._distinct = 0
        self.on = False

    def start(self) -> None:
        """Forget everything, and note keys from now on."""
        self._parts, self._length, self._distinct, self.on = [], 0, 0, True

    def add(self, keys: torch.Tensor) -> None:
        """Note `keys` (K,) int64, repeats allowed."""
        if not self.on:
            return
        self._parts.append(keys)
        self._length += len(keys)
        if self._length > 2 * self._distinct + ROOM:
            self._parts = [torch.cat(self._parts).unique()]
            self._length = self._distinct = len(self._parts[0])

    def keys(self) -> torch.Tensor:
        """All that was noted: (n,) int64, ascending, distinct."""
        if not self.on:
            raise ValueError("changes are not noted; call track_changes() first")
        return torch.cat([torch.empty(0, dtype=torch.int64), *self._parts]).unique()
