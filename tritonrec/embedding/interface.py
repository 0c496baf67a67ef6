"""What every table of rows offers, wherever its rows are stored."""

from __future__ import annotations

from typing import Protocol

import torch


class EmbeddingTable(Protocol):
    """Rows of float32 values (weights and optimizer state) by int64 key.

    A *handle* is an int64 number that stands for a row of this table: from the call that returned it until
    the row is erased, whatever grows, moves or is added in between. -1 stands for no row. Only this table can
    tell from a handle where a row is stored. Keys, handles and values are on the table's device.

        keys     [ 7,  -3, 2**63-1]       find_or_insert
        handles  [ 0,   1,   2]           gather, update
        erase([-3]) -> [1]                void, and reserved until release([1])

    One thread may find, insert and gather while another one updates; a row that is being updated may be
    gathered half old, half new. All other calls take turns.
    """

    def __len__(self) -> int: ...

    @property
    def end(self) -> int:
        """Every handle so far is below: the length of row metadata."""
        ...

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Handles (K,) of `keys` (K,), repeats allowed; -1 where absent."""
        ...

    def find_or_insert(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Handles (K,) of `keys` (K,), distinct, and which are new, (K,) bool; new rows hold initial values.

        Raises MemoryError, or the allocator's error, where they do not fit; nothing has changed then.
        """
        ...

    def gather(self, handles: torch.Tensor) -> torch.Tensor:
        """Copies of rows (K, row_width) float32, repeats allowed; anything where a handle is -1."""
        ...

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        """Overwrite the rows of `handles` (K,), distinct, -1 left out, with `values` (K, row_width) float32.

        `low_precision` (K,) bool marks rows that are stored in 16 bits where these hold the values exactly;
        no value ever changes.
        """
        ...

    def erase(self, keys: torch.Tensor) -> torch.Tensor:
        """Erase the rows of `keys` (K,), distinct; the handles they had (K,), -1 where absent.

        An update of such a handle changes no other row until `release`.
        """
        ...

    def release(self, handles: torch.Tensor) -> None:
        """Handles (K,) of erased rows, distinct, may stand for new rows from now on."""
        ...

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys (n,) and their handles (n,), in no particular order."""
        ...

    def grow(self, rows: int) -> None:
        """Have room for `rows` rows more. Raises MemoryError."""
        ...

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        """(K,) bool, which rows of `handles` (K,) are stored in 16 bits; False where a handle is -1."""
        ...

    @property
    def moved(self) -> tuple[int, int]:
        """Rows moved so far to float32, and to 16 bits."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by purpose."""
        ...
