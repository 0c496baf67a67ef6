"""Checksums of rows at rest: written with a row, compared when it is read."""

from __future__ import annotations

import torch

from ..kernels.checksums import row_checksums
from .row_column import RowColumn
from .turn import Turn


class RowChecksums:
    """8 bytes for each row, by handle.

    Args:
        device: of the table.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sums = RowColumn(torch.int64, device=device)
        self._lock = Turn(device)  # a column that grows loses what is written meanwhile

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._sums.nbytes

    def write(self, handles: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """The rows of `handles` (K,), distinct, -1 left out, below `end`, are `values` (K, row_width) now."""
        sums = row_checksums(values)
        with self._lock:
            self._sums.grow(end)
            self._sums[handles] = sums

    def changed(self, handles: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """(K,) bool, which rows `values` (K, row_width), on any device, are not those that were written."""
        now = row_checksums(values).to(self._device)
        return (self._sums[handles] != now) & (handles >= 0)
