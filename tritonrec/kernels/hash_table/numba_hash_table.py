# mypy: ignore-errors
"""Grouped probing on the CPU: a group's eight keys are one cache line and one vector compare.

Keys come in blocks: hash all, ask for the cache lines of all home groups, then probe. While memory answers
for one key the others are already on their way, so a lookup costs bandwidth instead of latency.
"""

import numpy as np

from tritonrec.kernels.murmur.numba_murmur import mix64
from tritonrec.kernels.numba_intrinsics import equal_mask8, lowest_bit, negative_mask8, prefetch

from ..caches import njit

BLOCK = 64
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_LAST_LANE = np.uint64(128)
_GROUP_SHIFT = np.uint64(3)
_STEP_SHIFT = np.uint64(32)
_GROUP_MASK = np.int64(~7)
_EMPTY = np.int32(-1)
_TOMBSTONE = np.int32(-2)


@njit(inline="always")
def _ask_for(slot_keys, slot_rows, keys, start, size, last_group, hashes):
    """Hash a block of keys and prefetch their home groups."""
    for i in range(size):
        hashes[i] = mix64(keys[start + i])
    # A loop of its own: the processor has all requests of a block under way at once.
    for i in range(size):
        slot = (hashes[i] & last_group) << _GROUP_SHIFT
        prefetch(slot_keys, slot)
        prefetch(slot_rows, slot)


@njit(inline="always")
def _search(slot_keys, slot_rows, key, hashed, last_group):
    """(row, slot): the row and slot of `key`, or -1 and the slot where it would go, or -1, -1 if full.

    Keys of free slots may hold anything, so a match counts only where the slot is occupied.
    """
    group = hashed & last_group
    step = (hashed >> _STEP_SHIFT) | _ONE
    # The first free slot on the way. The search goes on behind
    # a tombstone, since the key may stand further along.
    place = np.int64(-1)
    for _ in range(last_group + _ONE):
        slot = group << _GROUP_SHIFT
        free = negative_mask8(slot_rows, slot)
        # Masks of eight lanes, 8 bits: one vector compare for a group.
        match = equal_mask8(slot_keys, slot, key) & ~free
        if match != _ZERO:
            slot += lowest_bit(match)
            return np.int64(slot_rows[slot]), np.int64(slot)
        if free != _ZERO:
            if place < 0:
                place = np.int64(slot + lowest_bit(free))
            # An empty slot: no key of this path was ever put behind this group.
            if equal_mask8(slot_rows, slot, _EMPTY) != _ZERO:
                return np.int64(-1), place
        group = (group + step) & last_group
    return np.int64(-1), place


@njit(inline="always")
def _look(slot_keys, slot_rows, key, group):
    """(row, ends): the row of `key` if this group holds it, else -1; whether a search ends here."""
    slot = group << _GROUP_SHIFT
    match = equal_mask8(slot_keys, slot, key) & ~negative_mask8(slot_rows, slot)
    # present or absent is a coin toss no branch predictor wins, so read a row either way
    # Without a match the last lane is read, which is a legal address, and dropped below.
    row = np.int64(slot_rows[slot + lowest_bit(match | _LAST_LANE)])
    ends = match | equal_mask8(slot_rows, slot, _EMPTY) != _ZERO
    return row if match != _ZERO else np.int64(-1), ends


@njit(cache=True, nogil=True)
def hash_find(slot_keys, slot_rows, keys, rows):
    """``rows[i]`` = the row of ``keys[i]`` or -1.

    While one block is probed the home groups of the next are on their way. Keys whose search goes on to
    another group (at load 0.75 every fifth absent one) are gathered and visit it together, asked for first.
    """
    last_group = np.uint64(len(slot_keys) // 8 - 1)
    hashes = np.empty(BLOCK, np.uint64)
    next_hashes = np.empty(BLOCK, np.uint64)
    groups = np.empty(BLOCK, np.uint64)
    pending = np.empty(BLOCK, np.int64)
    _ask_for(slot_keys, slot_rows, keys, 0, min(BLOCK, len(keys)), last_group, next_hashes)
    for start in range(0, len(keys), BLOCK):
        hashes, next_hashes = next_hashes, hashes
        size = min(BLOCK, len(keys) - start)
        next_size = min(BLOCK, len(keys) - start - size)
        left = 0
        for i in range(size):
            if i < next_size:
                next_hashes[i] = mix64(keys[start + BLOCK + i])
                slot = (next_hashes[i] & last_group) << _GROUP_SHIFT
                prefetch(slot_keys, slot)
                prefetch(slot_rows, slot)
            groups[i] = hashes[i] & last_group
            rows[start + i], ends = _look(slot_keys, slot_rows, keys[start + i], groups[i])
            # Written always and counted only where the search goes on: no branch.
            pending[left] = i
            left += not ends
        visits = _ZERO
        # The home group was the first visit, so as many are left as there are other groups.
        while left > 0 and visits < last_group:
            for j in range(left):
                i = pending[j]
                groups[i] = (groups[i] + (hashes[i] >> _STEP_SHIFT | _ONE)) & last_group
                prefetch(slot_keys, groups[i] << _GROUP_SHIFT)
                prefetch(slot_rows, groups[i] << _GROUP_SHIFT)
            unresolved = 0
            for j in range(left):
                i = pending[j]
                rows[start + i], ends = _look(slot_keys, slot_rows, keys[start + i], groups[i])
                pending[unresolved] = i
                unresolved += not ends
            left = unresolved
            visits += _ONE


@njit(cache=True, nogil=True)
def hash_insert(slot_keys, slot_rows, keys, next_row, free_rows, rows, inserted):
    """Find or insert; returns how many tombstones were reused, or -1 if a key had no place.

    The table is then as it was before.
    """
    last_group = np.uint64(len(slot_keys) // 8 - 1)
    hashes = np.empty(BLOCK, np.uint64)
    taken_slots = np.empty(len(keys), np.int64)
    taken_keys = np.empty(len(keys), np.uint64)
    taken_rows = np.empty(len(keys), np.int32)
    taken, tombstones = 0, 0
    for start in range(0, len(keys), BLOCK):
        size = min(BLOCK, len(keys) - start)
        _ask_for(slot_keys, slot_rows, keys, start, size, last_group, hashes)
        for i in range(size):
            key = keys[start + i]
            row, slot = _search(slot_keys, slot_rows, key, hashes[i], last_group)
            # All or nothing: each slot taken so far gets back what
            # it had. They are distinct, so any order will do.
            if slot < 0:
                for j in range(taken):
                    slot_keys[taken_slots[j]] = taken_keys[j]
                    slot_rows[taken_slots[j]] = taken_rows[j]
                return -1
            inserted[start + i] = row < 0
            if row < 0:
                # `taken` counts the new keys: the free rows first, then next_row, next_row + 1, ...
                row = free_rows[taken] if taken < len(free_rows) else next_row + taken - len(free_rows)
                taken_slots[taken] = slot
                taken_keys[taken] = slot_keys[slot]
                taken_rows[taken] = slot_rows[slot]
                # Read before the slot is written.
                tombstones += slot_rows[slot] == _TOMBSTONE
                taken += 1
                slot_keys[slot] = key
                slot_rows[slot] = row
            rows[start + i] = row
    return tombstones


@njit(cache=True, nogil=True)
def hash_erase(slot_keys, slot_rows, keys, rows):
    """``rows[i]`` = the row `keys[i]` had, or -1; returns how many tombstones were left."""
    last_group = np.uint64(len(slot_keys) // 8 - 1)
    hashes = np.empty(BLOCK, np.uint64)
    tombstones = 0
    for start in range(0, len(keys), BLOCK):
        size = min(BLOCK, len(keys) - start)
        _ask_for(slot_keys, slot_rows, keys, start, size, last_group, hashes)
        for i in range(size):
            row, slot = _search(slot_keys, slot_rows, keys[start + i], hashes[i], last_group)
            rows[start + i] = row
            if row >= 0:
                # `slot & ~7` is the group's first slot.
                ends_here = equal_mask8(slot_rows, np.uint64(slot & _GROUP_MASK), _EMPTY) != _ZERO
                slot_rows[slot] = _EMPTY if ends_here else _TOMBSTONE
                tombstones += not ends_here
    return tombstones


@njit(cache=True, nogil=True)
def hash_items(slot_keys, slot_rows, secret, keys, rows):
    """Write the keys of occupied slots, XOR `secret`, and their rows one after the other; returns how many.

    Both outputs have one place more than there are keys.
    """
    count = 0
    for slot in range(len(slot_keys)):
        keys[count] = slot_keys[slot] ^ secret
        rows[count] = slot_rows[slot]
        count += slot_rows[slot] >= 0  # no branch: whether a slot is occupied is a coin toss
    return count


@njit(inline="always")
def _place(key, row, new_keys, new_rows, last_group):
    """Put a key that is not in the new table into its first free slot; returns what its row was."""
    hashed = mix64(key)
    group = hashed & last_group
    step = (hashed >> _STEP_SHIFT) | _ONE
    free = negative_mask8(new_rows, group << _GROUP_SHIFT)
    while free == _ZERO:
        group = (group + step) & last_group
        free = negative_mask8(new_rows, group << _GROUP_SHIFT)
    slot = (group << _GROUP_SHIFT) + lowest_bit(free)
    before = new_rows[slot]
    new_keys[slot] = key
    new_rows[slot] = row
    return before


@njit(cache=True, nogil=True)
def hash_grow(slot_keys, slot_rows, new_keys, new_rows):
    """Insert every occupied slot into a larger table whose `new_rows` are all -1.

    A group's keys go home to the group of the same number or to the one half a table higher, so the old
    table is read and the new one written as streams.
    """
    last_group = np.uint64(len(new_keys) // 8 - 1)
    for old in range(len(slot_keys)):
        if slot_rows[old] >= 0:
            _place(slot_keys[old], slot_rows[old], new_keys, new_rows, last_group)


@njit(cache=True, nogil=True)
def hash_move(slot_keys, slot_rows, start, stop, new_keys, new_rows):
    """Move the keys in slots [start, stop) to another table, which has room, and leave tombstones.

    Returns how many tombstones of the other table were reused.
    """
    last_group = np.uint64(len(new_keys) // 8 - 1)
    tombstones = 0
    for old in range(start, stop):
        if slot_rows[old] >= 0:
            before = _place(slot_keys[old], slot_rows[old], new_keys, new_rows, last_group)
            tombstones += before == _TOMBSTONE
            # Not empty: searches of keys that stay must still pass this group.
            slot_rows[old] = _TOMBSTONE
    return tombstones
