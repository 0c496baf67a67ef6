"""The interface of embedding tables, for any storage of rows."""

from __future__ import annotations

from typing import Protocol

import torch


class EmbeddingTable(Protocol):
    """Rows of float32 values (weights and optimizer state) by int64 key.

    A *handle* is an int64 number of a row of this table. It stays valid until the row is erased: growth,
    moves and inserts do not change it. -1 means no row. The storage location of a row is known to the table
    only. Keys, handles and values are on the table's device.

        keys     [ 7,  -3, 2**63-1]       find_or_insert
        handles  [ 0,   1,   2]           gather, update
        erase([-3]) -> [1]                void, and reserved until release([1])

    One thread may find, insert and gather while another one updates; a gather may then read a row that is
    half updated. All other calls exclude each other.

    A `count` () int64 is the number of valid keys where only the device knows it (`kernels.padding`); handles
    behind it are -1.
    """

    device: torch.device
    padded: bool
    """Whether lookups leave their lengths on the device, so that the host does not wait for them."""

    def __len__(self) -> int: ...

    @property
    def end(self) -> int:
        """Upper bound of all handles so far: the length of row metadata."""
        ...

    def find(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """Handles (K,) of `keys` (K,), repeats allowed; -1 where absent."""
        ...

    def find_or_insert(
        self, keys: torch.Tensor, count: torch.Tensor | None = None, initial: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Handles (K,) of `keys` (K,), distinct, and which are new, (K,) bool; new rows hold initial values,
        anything without `initial`, where the caller writes them next.

        Raises MemoryError, or the allocator's error, where they do not fit; the table is then unchanged.
        """
        ...

    def prefetch(self, handles: torch.Tensor) -> None:
        """Bring the rows of a lookup's `handles` (K,), distinct or -1, to where `gather` is fast.

        Call it once a lookup, after the update of the rows of the lookup before the last one.
        """
        ...

    def gather(self, handles: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies of rows (K, row_width) float32, repeats allowed, in `out` if given; undefined where a handle
        is -1.
        """
        ...

    def update(
        self, handles: torch.Tensor, values: torch.Tensor, low_precision: torch.Tensor | None = None
    ) -> None:
        """Overwrite the rows of `handles` (K,), distinct, -1 left out, with `values` (K, row_width) float32.

        `low_precision` (K,) bool marks rows to store in 16 bits where 16 bits hold their values exactly; the
        values never change.
        """
        ...

    def erase(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """Erase the rows of `keys` (K,), distinct; returns their handles (K,), -1 where absent.

        An update of such a handle changes no other row until `release`.
        """
        ...

    def release(self, handles: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """Let new rows reuse the `handles` (K,), distinct, of erased rows; a padded table leaves out -1."""
        ...

    def items(self, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys (n,) and their handles (n,) of `dtype`, in no particular order."""
        ...

    def slots_in_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a padded table: the key of every slot (S,) and its handle (S,), -1 where the slot has none."""
        ...

    def grow(self, rows: int) -> None:
        """Reserve memory for `rows` more rows. Raises MemoryError."""
        ...

    def in_low_precision(self, handles: torch.Tensor) -> torch.Tensor:
        """(K,) bool, which rows of `handles` (K,) are stored in 16 bits; False where a handle is -1."""
        ...

    def keep_checksums(self) -> None:
        """Keep a checksum of every row from now on, 8 bytes each; no other call may run meanwhile."""
        ...

    def first_changed(
        self, handles: torch.Tensor, values: torch.Tensor, skipped: torch.Tensor
    ) -> torch.Tensor | int:
        """1 + the first of the rows `values` (K, row_width) that is not as it was written; 0: none.

        See `RowChecksums.first_changed`; `keep_checksums` comes first.
        """
        ...

    @property
    def moved(self) -> tuple[int, int]:
        """Rows moved so far to float32, and to 16 bits."""
        ...

    @property
    def cached(self) -> int:
        """Rows that `prefetch` found in a cache so far; waits for a device."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by purpose."""
        ...
