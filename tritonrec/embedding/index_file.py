"""Slots of a key structure in a file: where keys outgrow memory, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..kernels import murmur
from .row_file import RowFile

LANES = 8
EMPTY, TOMBSTONE = 0, -1
STRETCH = 1 << 14
"""Groups that are listed or moved at once, 2 MB."""


class IndexFile:
    """Slots in groups of eight, each in 128 bytes of a file, so that a lookup reads a page for a key::

        group    8 keys, 8 rows, int64       a row of 0 is an empty slot, -1 a tombstone, others are 1 more
        search   begins at the low bits of the key's hash, goes on by a step of its high bits, and ends
                 behind an empty slot, as in `kernels.hash_table`

    The groups in which the searches of a call begin are announced to the disk at once. Reads and writes are
    `RowFile`'s, which names a disk that is full, slow or failing. A call that fails leaves keys anywhere.

    Args:
        path: an existing directory. slots: a power of two, at least 8.
    """

    def __init__(self, path: str, slots: int):
        self.slots, self.done, self.tombstones = slots, 0, 0
        self._file = RowFile(path, 16 * LANES, of="keys")
        self._file.grow(slots // LANES)  # of zeros: all of them are empty
        self.nbytes = self._file.nbytes

    def clear(self, slots: int) -> int:
        """The number of slots that it took work to clear."""
        self.done = self.slots
        return 0

    def move(self, slots: int, target: Any) -> None:
        """Move the keys of the next `slots` slots to `target`, another file: structures only grow."""
        stop = min(self.done + slots, self.slots)
        while self.done < stop:
            groups = np.arange(self.done // LANES, min(self.done // LANES + STRETCH, -(-stop // LANES)))
            there = self._read(groups)
            kept = there[:, 1] > 0
            target.put(there[:, 0][kept].view(np.uint64), there[:, 1][kept] - 1)
            # Not empty: searches of keys that stay must still pass these groups.
            there[:, 1][kept] = TOMBSTONE
            self._write(groups, there)
            self.done = min((int(groups[-1]) + 1) * LANES, self.slots)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Rows (K,) of `keys` (K,), -1 where absent."""
        return self._search(keys)[0]

    def insert(self, keys: np.ndarray, next_row: int, free_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `kernels.hash_table`: rows (K,), and which keys are new; there is room."""
        rows = self.find(keys)
        inserted = rows < 0
        new = int(np.count_nonzero(inserted))
        ahead = np.arange(next_row, next_row + max(new - len(free_rows), 0))
        rows[inserted] = np.concatenate([free_rows[:new], ahead])
        self.put(keys[inserted], rows[inserted])
        return rows, inserted

    def put(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Add `keys` (K,), distinct and absent, with `rows` (K,)."""
        groups, steps = self._way(keys)
        left = np.arange(len(keys))
        while len(left):
            distinct, which = np.unique(groups[left], return_inverse=True)
            there = self._read(distinct)
            free = there[:, 1] <= 0
            # The n-th of a group's keys gets its n-th free slot; keys without one go on.
            order = np.argsort(which, kind="stable")
            number = np.empty(len(which), np.int64)
            number[order] = np.arange(len(which)) - np.searchsorted(which[order], which[order])
            fits = number < free.sum(1)[which]
            slots = (free.cumsum(1)[which] > number[:, None]).argmax(1)[fits]
            at, keys_here = which[fits], left[fits]
            self.tombstones -= int(np.count_nonzero(there[at, 1, slots] == TOMBSTONE))
            there[at, 0, slots], there[at, 1, slots] = keys[keys_here].view(np.int64), rows[keys_here] + 1
            changed = np.unique(at)
            self._write(distinct[changed], there[changed])
            left = left[~fits]
            groups[left] = groups[left] + steps[left] & self.slots // LANES - 1

    def erase(self, keys: np.ndarray) -> np.ndarray:
        """Rows (K,) that `keys` (K,), distinct, had, -1 where absent."""
        rows, groups, slots = self._search(keys)
        found = rows >= 0
        distinct, which = np.unique(groups[found], return_inverse=True)
        there = self._read(distinct)
        # A group with an empty slot ends searches anyway.
        ends = (there[:, 1] == EMPTY).any(1)[which]
        there[which, 1, slots[found]] = np.where(ends, EMPTY, TOMBSTONE)
        self.tombstones += int(np.count_nonzero(~ends))
        self._write(distinct, there)
        return rows

    def items(self, secret: np.uint64, keys: np.ndarray, rows: np.ndarray) -> int:
        """Write all keys, XOR `secret`, and their rows one after the other; returns how many."""
        count = 0
        for start in range(0, self.slots // LANES, STRETCH):
            there = self._read(np.arange(start, min(start + STRETCH, self.slots // LANES)))
            kept = there[:, 1] > 0
            end = count + int(np.count_nonzero(kept))
            keys[count:end] = there[:, 0][kept] ^ secret.view(np.int64)
            rows[count:end] = there[:, 1][kept] - 1
            count = end
        return count

    def _search(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(K,) each, the row of each key or -1, the group where its search ended, and its slot there."""
        groups, steps = self._way(keys)
        rows, slots, left = np.full(len(keys), -1), np.zeros(len(keys), np.int64), np.arange(len(keys))
        while len(left):
            distinct, which = np.unique(groups[left], return_inverse=True)
            there = self._read(distinct)
            ends = (there[:, 1] == EMPTY).any(1)[which]
            there = there[which]
            same = (there[:, 0] == keys[left, None].view(np.int64)) & (there[:, 1] > 0)
            found = same.any(1)
            slots[left] = same.argmax(1)
            rows[left[found]] = there[found, 1, slots[left[found]]] - 1
            left = left[~(found | ends)]
            groups[left] = groups[left] + steps[left] & self.slots // LANES - 1
        return rows, groups, slots

    def _way(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The groups (K,) in which the searches of `keys` (K,) begin, and their steps."""
        hashes: np.ndarray = murmur.mix64(keys)  # type: ignore[arg-type, assignment]
        last = np.uint64(self.slots // LANES - 1)
        return (hashes & last).view(np.int64), (hashes >> np.uint64(32)).view(np.int64) | 1

    def _read(self, groups: np.ndarray) -> np.ndarray:
        """(G, 2, 8) int64, keys and rows of `groups` (G,), sorted."""
        there = torch.empty(len(groups), 2, LANES, dtype=torch.int64, device="cpu")
        self._file.read(torch.from_numpy(groups), there, _numbers(groups))
        return there.numpy()

    def _write(self, groups: np.ndarray, there: np.ndarray) -> None:
        self._file.write(torch.from_numpy(groups), torch.from_numpy(there), _numbers(groups))


def _numbers(groups: np.ndarray) -> torch.Tensor:
    return torch.arange(len(groups), dtype=torch.int64, device="cpu")
