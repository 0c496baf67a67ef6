# mypy: ignore-errors
"""Words of variable length: their 64-bit hashes, and a table that gives each distinct word a number.

Words lie end to end, as in Arrow: word i is ``data[offsets[i] : offsets[i + 1]]``. Arguments are addresses
(`numba_addresses`), because Arrow's buffers cannot be written to and numpy's can: one type for both.

A slot of the table is an int64: 0 where it is empty, else the number of a word plus one in its low 40 bits
and the high 24 bits of the word's hash above them, so that few bytes are compared in vain. Collisions go to
the next slot. The words of all numbers lie in one store, which decides: equal hashes make no equal words.
"""

import numpy as np
from numba import carray

from .caches import njit
from .numba_addresses import integers, pointer
from .numba_intrinsics import prefetch

PRIME_1 = np.uint64(0x9E3779B185EBCA87)
PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
PRIME_3 = np.uint64(0x165667B19E3779F9)
PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
PRIME_5 = np.uint64(0x27D4EB2F165667C5)
NUMBER = (1 << 40) - 1
AHEAD, RING = 48, 64
"""Words whose memory is on its way, and places for their hashes, of which one more is in use."""


@njit(cache=True, nogil=True)
def raw_bytes(address, count):
    """A flat uint8 array of `count` elements."""
    return carray(pointer(address), (count,), np.uint8)


@njit(cache=True, nogil=True)
def _little_endian(data, at, count):
    """`count` bytes as a number, the lowest first: one load where `count` is a constant."""
    value = np.uint64(0)
    for i in range(count):
        value |= np.uint64(data[at + np.uint64(i)]) << np.uint64(8 * i)
    return value


@njit(cache=True, nogil=True)
def _rotated(x, bits):
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@njit(cache=True, nogil=True)
def _round(lane, word):
    return _rotated(lane + word * PRIME_2, 31) * PRIME_1


@njit(cache=True, nogil=True)
def xxh64(data, first, end):
    """XXH64 with seed 0 of ``data[first:end]``, as in xxHash's specification."""
    at, end = np.uint64(first), np.uint64(end)
    length = end - at
    if length >= np.uint64(32):
        a, b, c, d = PRIME_1 + PRIME_2, PRIME_2, np.uint64(0), np.uint64(0) - PRIME_1
        while at + np.uint64(32) <= end:
            a = _round(a, _little_endian(data, at, 8))
            b = _round(b, _little_endian(data, at + np.uint64(8), 8))
            c = _round(c, _little_endian(data, at + np.uint64(16), 8))
            d = _round(d, _little_endian(data, at + np.uint64(24), 8))
            at += np.uint64(32)
        h = _rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)
        for lane in (a, b, c, d):
            h = (h ^ _round(np.uint64(0), lane)) * PRIME_1 + PRIME_4
    else:
        h = PRIME_5
    h += length
    while at + np.uint64(8) <= end:
        h = _rotated(h ^ _round(np.uint64(0), _little_endian(data, at, 8)), 27) * PRIME_1 + PRIME_4
        at += np.uint64(8)
    if at + np.uint64(4) <= end:
        h = _rotated(h ^ (_little_endian(data, at, 4) * PRIME_1), 23) * PRIME_2 + PRIME_3
        at += np.uint64(4)
    while at < end:
        h = _rotated(h ^ (np.uint64(data[at]) * PRIME_5), 11) * PRIME_1
        at += np.uint64(1)
    h = (h ^ (h >> np.uint64(33))) * PRIME_2
    h = (h ^ (h >> np.uint64(29))) * PRIME_3
    return h ^ (h >> np.uint64(32))


@njit(cache=True, nogil=True)
def hash_words(count, data_at, offsets_at, out_at):
    """``out[i]``: the hash of word i, as int64."""
    offsets, out = integers(offsets_at, count + 1), integers(out_at, count)
    data = raw_bytes(data_at, offsets[count])
    for i in range(count):
        out[i] = np.int64(xxh64(data, offsets[i], offsets[i + 1]))


@njit(cache=True, nogil=True)
def fill_slots(words, store_at, bounds_at, slots_at, capacity):
    """Put the numbers of `words` distinct words into `capacity` empty slots, a power of two."""
    bounds, slots = integers(bounds_at, words + 1), integers(slots_at, capacity)
    store, mask = raw_bytes(store_at, bounds[words]), np.uint64(capacity - 1)
    hashes = np.empty(RING, dtype=np.uint64)
    # A ring of hashes: word `ahead` is hashed and its slot asked for, AHEAD words before it is put there.
    for ahead in range(words + AHEAD):
        number = ahead - AHEAD
        if number >= 0:
            h = hashes[number % RING]
            _put(slots, mask, h, number)
        if ahead < words:
            h = xxh64(store, bounds[ahead], bounds[ahead + 1])
            hashes[ahead % RING] = h
            prefetch(slots, h & mask)


@njit(cache=True, nogil=True)
def _tag(h):
    return np.int64((h >> np.uint64(40)) << np.uint64(40))


@njit(cache=True, nogil=True)
def _put(slots, mask, h, number):
    slot = h & mask
    while slots[slot]:
        slot = (slot + np.uint64(1)) & mask
    slots[slot] = _tag(h) | (number + 1)


@njit(cache=True, nogil=True)
def number_words(
    count, data_at, offsets_at, out_at, words, store_at, bounds_at, slots_at, capacity, unknown, extend
):
    """``out[i]``: the number of word i; returns how many words the store has then.

    A word that is not in the store of `words` words is added where `extend` is not 0, and the store has room
    for it; otherwise it is `unknown`.
    """
    offsets, out = integers(offsets_at, count + 1), integers(out_at, count)
    data = raw_bytes(data_at, offsets[count])
    bounds, slots = integers(bounds_at, words + count + 1), integers(slots_at, capacity)
    store = raw_bytes(store_at, bounds[words] + offsets[count] - offsets[0])
    mask = np.uint64(capacity - 1)
    hashes = np.empty(RING, dtype=np.uint64)
    for ahead in range(count + AHEAD):
        # Three waits for memory, each begun some words early: the slot, its word's bounds, the bytes there.
        if ahead < count:
            h = xxh64(data, offsets[ahead], offsets[ahead + 1])
            hashes[ahead % RING] = h
            prefetch(slots, h & mask)
        second = ahead - AHEAD // 3
        if 0 <= second < count:
            found = slots[hashes[second % RING] & mask]
            if found:
                prefetch(bounds, np.uint64((found & NUMBER) - 1))
        third = ahead - 2 * AHEAD // 3
        if 0 <= third < count:
            found = slots[hashes[third % RING] & mask]
            if found:
                prefetch(store, np.uint64(bounds[(found & NUMBER) - 1]))
        i = ahead - AHEAD
        if i < 0:
            continue
        h, first, length = hashes[i % RING], offsets[i], offsets[i + 1] - offsets[i]
        slot, tag = h & mask, _tag(h)
        out[i] = unknown
        while True:
            found = slots[slot]
            if found == 0:
                if extend:
                    for byte in range(length):
                        store[bounds[words] + byte] = data[first + byte]
                    bounds[words + 1] = bounds[words] + length
                    out[i] = words
                    words += 1
                    slots[slot] = tag | words
                break
            # 24 equal bits of the hash: only then are bytes compared.
            if (found ^ tag) >> 40 == 0:
                number = (found & NUMBER) - 1
                if _equal(store, bounds[number], bounds[number + 1], data, first, length):
                    out[i] = number
                    break
            slot = (slot + np.uint64(1)) & mask
    return words


@njit(cache=True, nogil=True)
def _equal(store, start, end, data, first, length):
    if end - start != length:
        return False
    byte = 0
    while byte < length and store[start + byte] == data[first + byte]:
        byte += 1
    return byte == length
