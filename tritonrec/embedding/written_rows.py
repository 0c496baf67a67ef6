"""Rows that the caller writes between runs, which ranks with copies of a table compare as the next begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..kernels.checksums import row_checksums
from .in_flight import is_lane

if TYPE_CHECKING:
    from .table import DynamicTable

CHUNK = 1 << 16
"""Rows that are read at a time."""


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

    def take(self, table: DynamicTable) -> torch.Tensor:
        """Their keys (n,) int64 on the host, ascending."""
        keys = (
            table.keys().cpu() if self._all else torch.cat([torch.empty(0, dtype=torch.int64), *self._keys])
        )
        self.clear()
        return keys.unique()

    def clear(self) -> None:
        """Forget them: all ranks have written the same."""
        self._keys, self._all = [], False


def sums_of(table: DynamicTable, keys: torch.Tensor) -> torch.Tensor:
    """(n,) int64 on the host: checksums of the rows of `keys` (n,), of an absent one's initial row."""
    sums = [torch.empty(0, dtype=torch.int64)]
    for part in keys.to(table.device).split(CHUNK) if len(keys) else ():
        sums.append(row_checksums(table.gather(table.find(part), part)).cpu())
    return torch.cat(sums)
