"""The handle of each key: the key structure of a dynamic table, which grows without a stall.

Two tensors of `tritonrec.kernels.hash_table`, 12 bytes a slot, apart from the rows they point to, so that
growth copies keys and no row (MTGRBoost section 4.1, Figure 6). The paper copies the whole key structure at
once; here every insert moves a part of it:

    load passes 0.75     a structure of twice the slots is allocated, but no byte of it is touched
    clearing             each call clears a stretch of it; keys still go to the old one
    moving               it takes the new keys, each call moves a stretch of groups out of the old one, and
                         a search that fails in the new one looks into the old one

A key is in exactly one of the two at any time. A structure of the same size takes over in the same way when
tombstones pile up.

Clearing in stretches bounds the page faults of a call. With untouched zero pages read as empty instead, the
inserts after the switch would take them, each at a random page. Clearing below a load of 0.75 would leave
memory idle in every table that has stopped growing.
"""

from __future__ import annotations

import numpy as np
import torch

from ..host_memory import return_freed_memory
from ..kernels import murmur
from ..kernels.hash_table import numba_hash_table as kernels
from .index_file import LANES, STRETCH, IndexFile
from .pools import MAX_ROWS, IndexPool

LOAD_FACTOR = 0.75
"""A structure of twice the slots takes over above this load (MTGRBoost, section 4.1)."""

MAX_OCCUPANCY = 0.875
"""A structure of the same size takes over above this share of slots with keys or tombstones."""

HARD_MAX_OCCUPANCY = 0.9375
"""No call leaves a larger share of slots occupied: it clears and moves as much as its keys need."""

SLOTS_CLEARED_PER_KEY = 32
"""Slots cleared per key of an insert call; meanwhile new keys take at most a sixteenth of the old slots."""

SLOTS_MOVED_PER_KEY = 8
"""Slots moved per key of an insert call; meanwhile new keys take at most an eighth of the old slots. Half as
many would hardly shorten the longest call, which searches two structures, and make twice the calls long."""

MIN_KEYS_PER_CALL = 1024
"""A call with fewer keys clears and moves as much as one with this many."""


SLOT_BYTES = 12
"""Of a structure in memory: a key and a row."""


class KeyIndex:
    """int64 key -> handle; any of the 2**64 keys is legal.

    Handles are numbers in [0, 2**30) and depend on the sequence of calls only. The slot of a key, and with it
    the order of `items`, differs from process to process (`kernels.murmur.SECRET`). Not thread-safe.

    Args:
        slots: initial slots, a power of two and at least 8.
        path: a directory for files of structures larger than `memory` bytes, see `IndexFile`; "": none.

    Raises OSError where such a file cannot be made, read or written.
    """

    def __init__(self, slots: int = 1024, path: str = "", memory: int = 0):
        if slots < 8 or slots & (slots - 1):
            raise ValueError(f"slots must be a power of two and at least 8, got {slots}")
        self._path, self._memory = path, memory
        self._now = self._structure(slots)  # takes the inserts
        self._now.clear(slots)
        self._old: _Structure | IndexFile | None = None  # its keys are on the move to `_now`
        self._next: _Structure | IndexFile | None = None  # is being cleared, and then takes over
        self._size = 0
        self._secret = np.uint64(murmur.SECRET)
        self._handles = IndexPool()

    def __len__(self) -> int:
        return self._size

    @property
    def end(self) -> int:
        """Upper bound of all handles so far."""
        return self._handles.end

    @property
    def slots(self) -> int:
        """Slots of the structure that takes new keys."""
        return self._now.slots

    @property
    def load_factor(self) -> float:
        """Keys per slot: above 0.75 only while the next structure is being cleared."""
        return self._size / self.slots

    @property
    def nbytes(self) -> int:
        """Bytes of all structures in memory, the old and the next one included."""
        return sum(one.nbytes for one in self._all() if isinstance(one, _Structure))

    @property
    def disk_nbytes(self) -> int:
        """Bytes of those in files."""
        return sum(one.nbytes for one in self._all() if isinstance(one, IndexFile))

    @property
    def free_nbytes(self) -> int:
        """Bytes of the list of free handles."""
        return self._handles.nbytes

    def find(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """The handle of each key (K,) int64, repeats allowed; -1 where it is absent. `count`: None here."""
        return torch.from_numpy(self._find(self._salted(keys)))

    def find_or_insert(
        self, keys: torch.Tensor, count: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the handles of `keys` (K,) int64, distinct (not checked); absent keys get new ones in order.

        Returns:
            ``handles`` (K,) int64 and ``inserted`` (K,) bool, true where the key is new.

        Raises:
            MemoryError: more than 2**30 handles; nothing has changed.
        """
        unsigned = self._salted(keys)
        new = len(unsigned)
        # Every key may be new: only where that bound asks for work are the new ones counted.
        if self._is_short(new) or len(self._handles) + new > MAX_ROWS:
            new = int(np.count_nonzero(self._find(unsigned) < 0))
        self._handles.check_room(new)
        self._make_room(new, len(unsigned))
        return self._insert(unsigned)

    def erase(self, keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """Erase distinct keys; returns their handles (K,) int64, -1 where absent.

        The handles stay reserved until `release`.
        """
        unsigned = self._salted(keys)
        rows = self._now.erase(unsigned)
        if self._old is not None:
            # Keys on the move are in one of the two structures, in the new one or still in the old one.
            rest = np.flatnonzero(rows < 0)
            rows[rest] = self._old.erase(unsigned[rest])
        self._size -= int(np.count_nonzero(rows >= 0))
        return torch.from_numpy(rows)

    def release(self, handles: torch.Tensor, count: torch.Tensor | None = None) -> None:
        """Let new keys reuse the `handles` (K,) int64, distinct, of erased keys."""
        self._handles.release(handles)

    def grow(self, keys: int) -> None:
        """Reserve room for `keys` more keys and finish all moves. Raises MemoryError."""
        self._handles.check_room(keys)
        while self._is_short(keys) or not self._idle():
            if self._idle():
                self._next = self._structure(self._slots_for(keys))
            self._work(1 << 62)

    def items(self, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys (N,) int64 and their handles (N,) of `dtype`, in no particular order."""
        keys = torch.empty(self._size + 1, dtype=torch.int64, device="cpu")
        rows = torch.empty(self._size + 1, dtype=dtype, device="cpu")
        count = 0
        for one in (self._now, self._old):
            if one is not None:
                count += one.items(self._secret, keys[count:].numpy(), rows[count:].numpy())
        return keys[:count], rows[:count]

    def _salted(self, keys: torch.Tensor) -> np.ndarray:
        """`keys` XOR the secret, the form that the structures store."""
        if keys.dtype != torch.int64 or keys.dim() != 1:
            raise ValueError(f"keys must be (K,) int64, got shape {tuple(keys.shape)} {keys.dtype}")
        return keys.contiguous().numpy().view(np.uint64) ^ self._secret

    def _find(self, keys: np.ndarray) -> np.ndarray:
        rows = self._now.find(keys)
        if self._old is not None:
            rest = np.flatnonzero(rows < 0)
            rows[rest] = self._old.find(keys[rest])
        return rows

    def _insert(self, keys: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        end, free = self._handles.end, self._handles.next_free(len(keys)).numpy()
        if self._old is None:
            rows, inserted = self._now.insert(keys, end, free)
        else:
            # While keys move, the old structure is asked first: an insert into the new one would give a key
            # that is still in the old one a second handle.
            rows, inserted = self._old.find(keys), np.zeros(len(keys), bool)
            rest = np.flatnonzero(rows < 0)
            rows[rest], inserted[rest] = self._now.insert(keys[rest], end, free)
        count = int(np.count_nonzero(inserted))
        self._handles.claim(count)
        self._size += count
        return torch.from_numpy(rows), torch.from_numpy(inserted)

    def _all(self) -> list[_Structure | IndexFile]:
        return [one for one in (self._now, self._old, self._next) if one is not None]

    def _structure(self, slots: int) -> _Structure | IndexFile:
        inside = not self._path or SLOT_BYTES * slots <= self._memory
        return _Structure(slots) if inside else IndexFile(self._path, slots)

    def _idle(self) -> bool:
        return self._next is None and self._old is None

    def _is_short(self, new: int) -> bool:
        """Whether `new` more keys need another structure, or more work on the next one."""
        # Two limits: keys (`size`) ask for twice the slots, keys
        # and tombstones (`taken`) for as many slots, cleaned.
        size, slots, taken = self._size + new, self._now.slots, self._size + self._now.tombstones + new
        if (size > LOAD_FACTOR * slots or taken > MAX_OCCUPANCY * slots) and self._idle():
            return True
        return taken > HARD_MAX_OCCUPANCY * slots

    def _make_room(self, new: int, keys: int) -> None:
        """Do the work of a call with `keys` keys, and more where its `new` ones would not fit otherwise."""
        if self._idle():
            if not self._is_short(new):
                return
            self._next = self._structure(self._slots_for(new))
        # Work in proportion to the keys of the call. The loop behind it is for a call that brings more new
        # keys than its own share of the work makes room for.
        self._work(max(keys, MIN_KEYS_PER_CALL))
        while self._is_short(new):
            if self._idle():
                self._next = self._structure(self._slots_for(new))
            self._work(1 << 62)

    def _slots_for(self, new: int) -> int:
        slots = self.slots
        while self._size + new > LOAD_FACTOR * slots:
            slots *= 2
        return slots

    def _work(self, keys: int) -> None:
        """Clear, switch and move: the work of a call with `keys` keys."""
        if self._next is not None:
            # Clearing uses up the call's budget in keys; what is left of it moves slots.
            keys -= self._next.clear(SLOTS_CLEARED_PER_KEY * keys) // SLOTS_CLEARED_PER_KEY
            if self._next.done == self._next.slots:
                self._old, self._now, self._next = self._now, self._next, None
                self._old.done = 0
        if self._old is not None and keys > 0:
            self._old.move(SLOTS_MOVED_PER_KEY * keys, self._now)
            if self._old.done == self._old.slots:
                size, self._old = self._old.nbytes, None
                return_freed_memory(size)


class _Structure:
    """Slots of keys and rows. The first `done` slots are cleared, or, in the old structure, moved."""

    def __init__(self, slots: int):
        self.slots, self.done, self.tombstones = slots, 0, 0
        # torch aligns to cache lines. numpy does not: a group of slots on two lines doubles the time of
        # finds, and numpy's huge pages cost more at the first touch than they save here.
        self.keys = torch.empty(slots, dtype=torch.int64, device="cpu").numpy().view(np.uint64)
        self.rows = torch.empty(slots, dtype=torch.int32, device="cpu").numpy()
        self.nbytes = self.keys.nbytes + self.rows.nbytes

    def clear(self, slots: int) -> int:
        """Clear the next `slots` slots, or those left; returns their number."""
        stretch = slice(self.done, min(self.done + slots, self.slots))
        self.rows[stretch] = -1
        self.keys[stretch] = 0  # takes the page faults now; keys are not read where the row is -1
        self.done = stretch.stop
        return stretch.stop - stretch.start

    def move(self, slots: int, target: _Structure | IndexFile) -> None:
        """Move the keys of the next `slots` slots to `target`."""
        stop = min(self.done + slots, self.slots)
        if isinstance(target, IndexFile):
            while self.done < stop:
                at = slice(self.done, min(self.done + LANES * STRETCH, stop))
                kept = self.rows[at] >= 0
                target.put(self.keys[at][kept], self.rows[at][kept].astype(np.int64))
                self.rows[at][kept] = -2  # a tombstone
                self.done = at.stop
            return
        target.tombstones -= kernels.hash_move(
            self.keys, self.rows, self.done, stop, target.keys, target.rows
        )
        self.done = stop

    def find(self, keys: np.ndarray) -> np.ndarray:
        rows = np.empty(len(keys), np.int64)
        kernels.hash_find(self.keys, self.rows, keys, rows)
        return rows

    def insert(self, keys: np.ndarray, next_row: int, free_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows, inserted = np.empty(len(keys), np.int64), np.empty(len(keys), np.bool_)
        reused = kernels.hash_insert(self.keys, self.rows, keys, next_row, free_rows, rows, inserted)
        assert reused >= 0, "the caller made room"
        self.tombstones -= reused
        return rows, inserted

    def erase(self, keys: np.ndarray) -> np.ndarray:
        rows = np.empty(len(keys), np.int64)
        self.tombstones += kernels.hash_erase(self.keys, self.rows, keys, rows)
        return rows

    def items(self, secret: np.uint64, keys: np.ndarray, rows: np.ndarray) -> int:
        return kernels.hash_items(self.keys, self.rows, secret, keys.view(np.uint64), rows)
