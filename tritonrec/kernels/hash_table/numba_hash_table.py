# mypy: ignore-errors
"""Grouped probing on the CPU: a group's eight keys are one cache line and one vector compare.

Keys come in blocks: hash all, ask for the cache lines of all home groups, then probe. While memory answers
for one key the others are already on their way, so a lookup costs bandwidth instead of latency.
"""

import numpy as np
from numba import njit

from tritonrec.kernels.murmur.numba_murmur import mix64
from tritonrec.kernels.numba_intrinsics import equal_mask8, lowest_bit, negative_mask8, prefetch

BLOCK = 64
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_LAST_LANE = np.uint64(128)
_GROUP_SHIFT = np.uint64(3)
_STEP_SHIFT = np.uint64(32)


@njit(inline="always")
def _ask_for(slot_keys, slot_rows, keys, start, size, last_group, hashes):
    """Hash a block of keys and prefetch their home groups."""
    for i in range(size):
        hashes[i] = mix64(keys[start + i])
    for i in range(size):
        slot = (hashes[i] & last_group) << _GROUP_SHIFT
        prefetch(slot_keys, slot)
        prefetch(slot_rows, slot)


@njit(inline="always")
def _search(slot_keys, slot_rows, key, hashed, last_group):
    """(row, slot): the row and slot of `key`, or -1 and the slot where it would go, or -1, -1 if full.

    Keys of empty slots may hold anything, so a match counts only where the slot is occupied.
    """
    group = hashed & last_group
    step = (hashed >> _STEP_SHIFT) | _ONE
    for _ in range(last_group + _ONE):
        slot = group << _GROUP_SHIFT
        empty = negative_mask8(slot_rows, slot)
        match = equal_mask8(slot_keys, slot, key) & ~empty
        if match != _ZERO:
            slot += lowest_bit(match)
            return np.int64(slot_rows[slot]), np.int64(slot)
        if empty != _ZERO:
            return np.int64(-1), np.int64(slot + lowest_bit(empty))
        group = (group + step) & last_group
    return np.int64(-1), np.int64(-1)


@njit(cache=True, nogil=True)
def hash_find(slot_keys, slot_rows, keys, rows):
    """``rows[i]`` = the row of ``keys[i]`` or -1."""
    last_group = np.uint64(len(slot_keys) // 8 - 1)
    hashes = np.empty(BLOCK, np.uint64)
    for start in range(0, len(keys), BLOCK):
        size = min(BLOCK, len(keys) - start)
        _ask_for(slot_keys, slot_rows, keys, start, size, last_group, hashes)
        for i in range(size):
            key = keys[start + i]
            slot = (hashes[i] & last_group) << _GROUP_SHIFT
            empty = negative_mask8(slot_rows, slot)
            match = equal_mask8(slot_keys, slot, key) & ~empty
            if match | empty == _ZERO:
                rows[start + i] = _search(slot_keys, slot_rows, key, hashes[i], last_group)[0]
            else:
                # present or absent is a coin toss no branch predictor wins, so read a row either way
                row = np.int64(slot_rows[slot + lowest_bit(match | _LAST_LANE)])
                rows[start + i] = row if match != _ZERO else np.int64(-1)


@njit(cache=True, nogil=True)
def hash_insert(slot_keys, slot_rows, keys, next_row, rows, inserted):
    """Find or insert; returns whether all keys had a place, and leaves the table as it was if not."""
    last_group = np.uint64(len(slot_keys) // 8 - 1)
    hashes = np.empty(BLOCK, np.uint64)
    taken_slots = np.empty(len(keys), np.int64)
    taken_keys = np.empty(len(keys), np.uint64)
    taken = 0
    for start in range(0, len(keys), BLOCK):
        size = min(BLOCK, len(keys) - start)
        _ask_for(slot_keys, slot_rows, keys, start, size, last_group, hashes)
        for i in range(size):
            key = keys[start + i]
            row, slot = _search(slot_keys, slot_rows, key, hashes[i], last_group)
            if slot < 0:
                for j in range(taken - 1, -1, -1):
                    slot_keys[taken_slots[j]] = taken_keys[j]
                    slot_rows[taken_slots[j]] = -1
                return False
            inserted[start + i] = row < 0
            if row < 0:
                row = next_row + taken
                taken_slots[taken] = slot
                taken_keys[taken] = slot_keys[slot]
                taken += 1
                slot_keys[slot] = key
                slot_rows[slot] = row
            rows[start + i] = row
    return True


@njit(cache=True, nogil=True)
def hash_grow(slot_keys, slot_rows, new_keys, new_rows):
    """Insert every occupied slot into a larger table whose `new_rows` are all -1.

    A group's keys go home to the group of the same number or to the one half a table higher, so the old
    table is read and the new one written as streams.
    """
    last_group = np.uint64(len(new_keys) // 8 - 1)
    for old in range(len(slot_keys)):
        if slot_rows[old] >= 0:
            hashed = mix64(slot_keys[old])
            group = hashed & last_group
            step = (hashed >> _STEP_SHIFT) | _ONE
            empty = negative_mask8(new_rows, group << _GROUP_SHIFT)
            while empty == _ZERO:
                group = (group + step) & last_group
                empty = negative_mask8(new_rows, group << _GROUP_SHIFT)
            slot = (group << _GROUP_SHIFT) + lowest_bit(empty)
            new_keys[slot] = slot_keys[old]
            new_rows[slot] = slot_rows[old]
