"""Where the row of each key lies: the key structure of a dynamic table, which grows without a stall."""

from __future__ import annotations

import numpy as np
import torch

from ..kernels.hash_table import numba_hash_table as kernels

LOAD_FACTOR = 0.75


class KeyIndex:
    """int64 key -> int32 row number; any of the 2**64 keys is legal."""

    def __init__(self, slots: int = 1024):
        if slots < 8 or slots & (slots - 1):
            raise ValueError(f"slots must be a power of two and at least 8, got {slots}")
        self._keys, self._rows = np.zeros(slots, np.uint64), np.full(slots, -1, np.int32)
        self._size = self._tombstones = 0

    def __len__(self) -> int:
        return self._size

    @property
    def slots(self) -> int:
        return len(self._keys)

    @property
    def load_factor(self) -> float:
        return self._size / self.slots

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._rows.nbytes

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(keys.numel(), dtype=torch.int64)
        kernels.hash_find(self._keys, self._rows, _unsigned(keys), rows.numpy())
        return rows

    def insert(
        self, keys: torch.Tensor, next_row: int, free_rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._size + self._tombstones + keys.numel() > LOAD_FACTOR * self.slots:
            size = self._size + int((self.find(keys) < 0).sum())
            if size + self._tombstones > LOAD_FACTOR * self.slots:
                self._move(size)
        rows = torch.empty(keys.numel(), dtype=torch.int64)
        inserted = torch.empty(keys.numel(), dtype=torch.bool)
        free = np.empty(0, np.int64) if free_rows is None else free_rows[: keys.numel()].long().numpy()
        reused = kernels.hash_insert(
            self._keys, self._rows, _unsigned(keys), next_row, free, rows.numpy(), inserted.numpy()
        )
        self._size += int(inserted.sum())
        self._tombstones -= reused
        return rows, inserted

    def assign(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        absent = self.find(keys) < 0
        if absent.any():
            raise ValueError(f"key {int(keys[absent][0])} is not in the index; nothing was assigned")
        before = torch.empty(keys.numel(), dtype=torch.int64)
        kernels.hash_assign(
            self._keys, self._rows, _unsigned(keys), rows.long().contiguous().numpy(), before.numpy()
        )

    def erase(self, keys: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(keys.numel(), dtype=torch.int64)
        self._tombstones += kernels.hash_erase(self._keys, self._rows, _unsigned(keys), rows.numpy())
        self._size -= int((rows >= 0).sum())
        return rows

    def items(self) -> tuple[torch.Tensor, torch.Tensor]:
        live = self._rows >= 0
        keys = torch.from_numpy(self._keys[live].view(np.int64))
        return keys, torch.from_numpy(self._rows[live].astype(np.int64))

    def _move(self, size: int) -> None:
        slots = self.slots
        while size > LOAD_FACTOR * slots:
            slots *= 2
        new_keys, new_rows = np.zeros(slots, np.uint64), np.full(slots, -1, np.int32)
        kernels.hash_move(self._keys, self._rows, 0, self.slots, new_keys, new_rows)
        self._keys, self._rows, self._tombstones = new_keys, new_rows, 0


def _unsigned(keys: torch.Tensor) -> np.ndarray:
    return keys.contiguous().numpy().view(np.uint64)
