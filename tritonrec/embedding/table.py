"""A table of rows by key that grows without moving a row (MTGRBoost, section 4.1)."""

from __future__ import annotations

import threading

import torch

from .. import ops

LOAD_FACTOR = 0.75
"""The key structure doubles before more of its slots than this are taken (MTGRBoost, section 4.1)."""


class DynamicTable:
    """Rows (weights and optimizer state) by int64 key; any of the 2**64 keys is legal.

    The key structure (slots of key and row number) is apart from the rows, which lie in chunks that never
    move: growth doubles the key structure only. A key seen for the first time gets weights that are a
    function of (seed, table, key, column) and zero state, so neither the order of arrival, nor the rank, nor
    a restart changes them.

    Rows may be read and written while another thread adds keys: row numbers stay valid for ever.

    Args:
        dim: weights per row.
        row_width: float32 values per row, at least `dim`.
        seed, table_id: key of the initial values.
        scale: initial weights are uniform in [-scale, scale).
        slots: slots of the key structure at the start, a power of two.
        chunk_rows: rows of one value chunk.
    """

    def __init__(
        self,
        dim: int,
        row_width: int | None = None,
        *,
        seed: int = 0,
        table_id: int = 0,
        scale: float = 0.05,
        slots: int = 1024,
        chunk_rows: int = 65536,
    ):
        self.dim, self.row_width = dim, dim if row_width is None else row_width
        if dim < 1 or self.row_width < dim:
            raise ValueError(f"a row of {self.row_width} values cannot hold {dim} weights")
        if slots < 8 or slots & (slots - 1):
            raise ValueError(f"slots must be a power of two and at least 8, got {slots}")
        self.seed, self.table_id, self.scale, self.chunk_rows = seed, table_id, scale, chunk_rows
        self._slot_keys = torch.zeros(slots, dtype=torch.int64)
        self._slot_rows = torch.full((slots,), -1, dtype=torch.int32)
        self._chunks: list[torch.Tensor] = []
        self._size = 0
        self._lock = threading.Lock()  # of the key structure and the list of chunks

    def __len__(self) -> int:
        return self._size

    @property
    def load_factor(self) -> float:
        """Share of the key structure's slots that are taken."""
        return self._size / self._slot_keys.numel()

    def rows_of(self, keys: torch.Tensor) -> torch.Tensor:
        """Row numbers of `keys` (K,) int64, distinct; keys not in the table are added.

        Returns:
            (K,) int64; new keys get the next numbers in the order given.
        """
        with self._lock:
            # A few unknown keys are the rule; only they may need room.
            if self._size + keys.numel() > LOAD_FACTOR * self._slot_keys.numel():
                absent = int((ops.hash_find(self._slot_keys, self._slot_rows, keys) < 0).sum())
                while self._size + absent > LOAD_FACTOR * self._slot_keys.numel():
                    self._slot_keys, self._slot_rows = ops.hash_grow(self._slot_keys, self._slot_rows)
            rows, inserted = ops.hash_insert(self._slot_keys, self._slot_rows, keys, self._size)
            new = keys[inserted]
            if new.numel():
                while len(self._chunks) * self.chunk_rows < self._size + new.numel():
                    self._chunks.append(torch.empty(self.chunk_rows, self.row_width))
                values = torch.zeros(new.numel(), self.row_width)
                values[:, : self.dim] = ops.initial_rows(self.seed, self.table_id, new, self.dim, self.scale)
                self.write(rows[inserted], values)
                self._size += new.numel()
        return rows

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Row numbers of `keys` (K,) int64, -1 where absent; adds nothing."""
        with self._lock:
            return ops.hash_find(self._slot_keys, self._slot_rows, keys)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Copies of the rows numbered `rows` (K,) int64: (K, row_width) float32."""
        if len(self._chunks) == 1:
            return ops.gather_rows(self._chunks[0], rows)
        values = torch.empty(rows.numel(), self.row_width)
        for chunk, here, local in self._by_chunk(rows):
            values[here] = ops.gather_rows(chunk, local)
        return values

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite the rows numbered `rows` (K,), distinct, with `values` (K, row_width)."""
        if len(self._chunks) == 1:
            ops.scatter_rows(self._chunks[0], rows, values)
            return
        for chunk, here, local in self._by_chunk(rows):
            ops.scatter_rows(chunk, local, values[here])

    def export(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (n,) int64 in ascending order and their rows (n, row_width) float32, copied."""
        with self._lock:
            taken = self._slot_rows >= 0
            keys, order = torch.sort(self._slot_keys[taken])
            rows = self._slot_rows[taken][order].to(torch.int64)
        return keys, self.read(rows)

    def load(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add or overwrite the rows of distinct `keys` (n,) with `values` (n, row_width)."""
        if values.shape != (keys.numel(), self.row_width):
            raise ValueError(
                f"rows of shape {tuple(values.shape)} do not fit {keys.numel()} keys of a table whose rows "
                f"hold {self.row_width} values; was it saved with another optimizer or dimension?"
            )
        if keys.numel():
            self.write(self.rows_of(keys), values)

    def _by_chunk(self, rows: torch.Tensor):
        """(chunk, positions in `rows`, row numbers inside the chunk) of each chunk that `rows` touch."""
        number = rows // self.chunk_rows
        for index in torch.unique(number).tolist():
            here = (number == index).nonzero().squeeze(1)
            yield self._chunks[index], here, rows[here] - index * self.chunk_rows
