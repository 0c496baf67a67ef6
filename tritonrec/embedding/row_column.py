"""Row metadata: one value for each row of a table, by handle."""

from __future__ import annotations

import torch

from .stream_lock import Replaceable


class RowColumn:
    """Values of one type by handle, 0 at first; grown by doubling.

        handle    0    1    2    3   -1       a handle of -1 reads the last value, and writes nothing
        value     5    0    2    0   absent

    A lane may read values that no other one writes while another lane grows the column.

    Args:
        dtype: of the values.
        absent: the value of a handle of -1.
        end: initial number of handles.
        device: of the values.
    """

    def __init__(self, dtype: torch.dtype, absent: int = 0, end: int = 0, device: torch.device | None = None):
        self._absent = absent
        values = torch.zeros(end + 1, dtype=dtype, device=device or "cpu")
        values[-1] = absent
        self._values = Replaceable(values)

    @property
    def rows(self) -> torch.Tensor:
        """A view of the values by handle, at least as many as there are handles."""
        return self._values.get()[:-1]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._values.get().nbytes

    def __getitem__(self, handles: torch.Tensor) -> torch.Tensor:
        return self._values.get()[handles]

    def __setitem__(self, handles: torch.Tensor, values: torch.Tensor | int) -> None:
        own = self._values.get()
        own[handles] = values
        own[-1] = self._absent

    def grow(self, end: int) -> None:
        """Extend the values to every handle below `end`."""
        rows = self.rows
        if end > len(rows):
            larger = rows.new_zeros(max(end, 2 * len(rows)) + 1)
            larger[: len(rows)] = rows
            larger[-1] = self._absent
            self._values.replace(larger)
