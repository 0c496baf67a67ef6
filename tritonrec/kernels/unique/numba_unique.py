# mypy: ignore-errors
"""Dedup with one pass over a growing open-addressing table.

A slot is two neighbouring 64-bit words, so that one cache line answers a probe: the key, and
``position << 32 | count``, which is zero exactly when the slot is empty (an occupied slot has count >= 1),
so every 64-bit key is legal. The home slot is the *top* bits of the hash, so growing walks the old and the
new table in the same order. Keys come in blocks: hash all, ask for all their cache lines, then probe.
"""

import numpy as np
from numba import njit

from tritonrec.kernels.murmur.numba_murmur import mix64
from tritonrec.kernels.numba_intrinsics import prefetch

BLOCK = 128
FIRST_BITS = 12
GROWTH_BITS = 2
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_HALF = np.uint64(32)


@njit(inline="always")
def _grown(slots, bits):
    """Move every occupied slot of a table of ``2**bits`` slots into one of ``2**(bits + GROWTH_BITS)``."""
    new_bits = bits + GROWTH_BITS
    new_slots = np.zeros(2 << new_bits, np.uint64)
    shift = np.uint64(64 - new_bits)
    last = np.uint64((1 << new_bits) - 1)
    for old in range(1 << bits):
        state = slots[2 * old + 1]
        if state != _ZERO:
            slot = mix64(slots[2 * old]) >> shift
            while new_slots[(slot << _ONE) + _ONE] != _ZERO:
                slot = (slot + _ONE) & last
            new_slots[slot << _ONE] = slots[2 * old]
            new_slots[(slot << _ONE) + _ONE] = state
    return new_slots


@njit(cache=True, nogil=True)
def unique(keys, inverse):
    """Fill `inverse`; return the distinct keys in order of first occurrence and their counts."""
    bits = FIRST_BITS
    slots = np.zeros(2 << bits, np.uint64)
    order = np.empty(len(keys), np.uint64)
    homes = np.empty(BLOCK, np.uint64)
    found = 0
    for start in range(0, len(keys), BLOCK):
        size = min(BLOCK, len(keys) - start)
        # at most half full, also if every key of the block is new
        while 2 * (found + size) > 1 << bits:
            slots = _grown(slots, bits)
            bits += GROWTH_BITS
        shift = np.uint64(64 - bits)
        last = np.uint64((1 << bits) - 1)
        for i in range(size):
            homes[i] = (mix64(keys[start + i]) >> shift) << _ONE
        for i in range(size):
            prefetch(slots, homes[i])
        for i in range(size):
            key = keys[start + i]
            word = homes[i]
            state = slots[word + _ONE]
            while state != _ZERO and slots[word] != key:
                word = (((word >> _ONE) + _ONE) & last) << _ONE
                state = slots[word + _ONE]
            if state == _ZERO:
                state = np.uint64(found) << _HALF
                slots[word] = key
                order[found] = key
                found += 1
            slots[word + _ONE] = state + _ONE
            inverse[start + i] = np.int64(state >> _HALF)
    counts = np.empty(found, np.int64)
    for slot in range(1 << bits):
        state = slots[2 * slot + 1]
        if state != _ZERO:
            counts[np.int64(state >> _HALF)] = np.int64(state & np.uint64(0xFFFFFFFF))
    return order[:found].copy(), counts
