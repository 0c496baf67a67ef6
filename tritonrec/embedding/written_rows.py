"""Rows that the caller writes between runs, which ranks with copies of a table compare as the next begins."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .in_flight import is_lane


class WrittenRows:
    """The keys of rows of a table that were written by others than lanes, since the last `take`."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._all = True  # those that are there when it begins

    def add(self, keys: torch.Tensor | None) -> None:
        """Note `keys` (K,) int64, or None where they are not known."""
        if is_lane():
            return
        if keys is None:
            self._all, self._keys = True, []
        elif not self._all:
            self._keys.append(keys.cpu().clone())

    def take(self, keys: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Their keys (n,) int64 on the host, ascending, of a table with these `keys`."""
        known = (
            [keys().cpu()] if self._all else [torch.empty(0, dtype=torch.int64, device="cpu"), *self._keys]
        )
        self.clear()
        return torch.cat(known).unique()

    def clear(self) -> None:
        """Forget them: all ranks have written the same."""
        self._keys, self._all = [], False
