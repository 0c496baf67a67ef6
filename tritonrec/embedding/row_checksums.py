"""Checksums of rows at rest: written with a row, compared when it is read."""

from __future__ import annotations

import torch

from ..kernels.checksums import first_other_row, row_checksums, write_row_checksums
from ..kernels.deferred import NONE
from ..kernels.dispatch import on_host
from .row_column import RowColumn
from .stream_lock import StreamLock


class RowChecksums:
    """8 bytes for each row, by handle.

    Args:
        device: of the table.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sums = RowColumn(torch.int64, device=device)
        self._lock = StreamLock(device)  # a column that grows loses what is written meanwhile

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._sums.nbytes

    def write(self, handles: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """The rows of `handles` (K,), distinct, -1 left out, below `end`, are `values` (K, row_width) now."""
        with self._lock:
            self._sums.grow(end)
            if on_host(values):
                write_row_checksums(self._sums.rows, handles, values)
            else:
                self._sums[handles] = row_checksums(values)

    def first_changed(
        self, handles: torch.Tensor, values: torch.Tensor, skipped: torch.Tensor
    ) -> torch.Tensor | int:
        """1 + the first of the rows `values` (K, row_width) that is not as it was written; 0: none.

        Rows of -1 are left out, and the positions `skipped` (n,) int64, where -1 is no position. On a device
        positions (K,) int64 of changed rows, with `deferred.NONE` for others.
        """
        if on_host(handles) and on_host(values):
            return 1 + first_other_row(self._sums.rows, handles, values, skipped)
        now = row_checksums(values).to(handles.device)
        changed = (self._sums[handles] != now) & (handles >= 0)
        changed = torch.cat([changed, changed.new_zeros(1)])  # and one for positions of -1
        changed[skipped] = False
        places = torch.arange(len(handles), device=handles.device)
        return torch.where(changed[:-1], places, NONE)
