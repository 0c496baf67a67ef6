# mypy: ignore-errors
"""Dedup with one pass over a growing table of cache lines.

A group of four slots is one cache line of eight words: four keys, then their four states. A state is
``position << 32 | count``, zero exactly where the slot is empty (an occupied slot has count >= 1), so every
64-bit key is legal. One vector compare answers for the whole line, so the branches that remain (seen before
or new, does the line overflow) are the ones the data decides; mispredicted branches, not memory, bound an
ordinary table here.

The home group is ``hash * groups >> 32``, of the hash of ``key ^ secret`` (`kernels.murmur`): tables of any
size, and a larger table keeps the order of the smaller one, so growing reads and writes both as streams. Keys
come in blocks: hash all, ask for all their cache lines, then probe.
"""

import numpy as np
import torch

from tritonrec.kernels import murmur
from tritonrec.kernels.murmur.numba_murmur import mix64
from tritonrec.kernels.numba_intrinsics import equal_mask4, lowest_bit, prefetch
from tritonrec.kernels.padding import num_valid
from tritonrec.kernels.unique.op import pad_unique

from ..caches import njit

BLOCK = 128
# a table of 0.7 MB stays in a core's own cache, and a micro-batch seldom outgrows it
FIRST_KEYS = 32768
SLOTS = 4
LINE = 2 * SLOTS
# a table that fits into the nearer caches answers faster than a prefetch instruction is issued
PREFETCH_WORDS = 1 << 17
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_HALF = np.uint64(32)
_COUNT = np.uint64(0xFFFFFFFF)
_SLOTS = np.uint64(SLOTS)
_LINE = np.uint64(LINE)


@njit(inline="always")
def _home(key, groups, secret):
    """First word of the key's home group; the product of two 32-bit numbers cannot wrap."""
    return (((mix64(key ^ secret) >> _HALF) * groups) >> _HALF) * _LINE


@njit(cache=True, nogil=True)
def _count_keys(keys, inverse, order, table, found, start, secret):
    """Take keys from `start` until the table is three quarters full; the new `found` and `start`."""
    groups = np.uint64(len(table) // LINE)
    end = np.uint64(len(table))
    # Half of the words are keys. A block is taken only if all of its keys may be new and still fit.
    room = 3 * (len(table) // 2) // 4
    homes = np.empty(BLOCK, np.uint64)
    while start < len(keys):
        size = min(BLOCK, len(keys) - start)
        if found + size > room:
            break
        for i in range(size):
            homes[i] = _home(keys[start + i], groups, secret)
        if len(table) >= PREFETCH_WORDS:
            for i in range(size):
                prefetch(table, homes[i])
        for i in range(size):
            key = keys[start + i]
            word = homes[i]
            while True:
                # empty slots follow the occupied ones, so a match on a leftover key cannot hide a real one
                match = equal_mask4(table, word, key)
                if match != _ZERO:
                    slot = word + _SLOTS + lowest_bit(match)
                    state = table[slot]
                    if state != _ZERO:
                        table[slot] = state + _ONE
                        inverse[start + i] = np.int64(state >> _HALF)
                        break
                empty = equal_mask4(table, word + _SLOTS, _ZERO)
                if empty != _ZERO:
                    slot = word + lowest_bit(empty)
                    table[slot] = key
                    table[slot + _SLOTS] = (np.uint64(found) << _HALF) + _ONE
                    order[found] = key
                    inverse[start + i] = found
                    found += 1
                    break
                # Linear probing by cache lines, from the last to the first.
                word += _LINE
                if word == end:
                    word = _ZERO
        start += size
    return found, start


@njit(cache=True, nogil=True)
def _refill(table, larger, secret):
    """Move every occupied slot into an empty, larger table."""
    groups = np.uint64(len(larger) // LINE)
    end = np.uint64(len(larger))
    for line in range(0, len(table), LINE):
        for slot in range(line, line + SLOTS):
            # The count stays in the state, so a table that has grown goes on counting.
            state = table[slot + SLOTS]
            if state != _ZERO:
                word = _home(table[slot], groups, secret)
                empty = equal_mask4(larger, word + _SLOTS, _ZERO)
                while empty == _ZERO:
                    word += _LINE
                    if word == end:
                        word = _ZERO
                    empty = equal_mask4(larger, word + _SLOTS, _ZERO)
                place = word + lowest_bit(empty)
                larger[place] = table[slot]
                larger[place + _SLOTS] = state


@njit(cache=True, nogil=True)
def _read_counts(table, counts):
    for line in range(0, len(table), LINE):
        for slot in range(line + SLOTS, line + LINE):
            state = table[slot]
            if state != _ZERO:
                counts[np.int64(state >> _HALF)] = np.int64(state & _COUNT)


def _empty_table(keys: int) -> np.ndarray:
    """A table that is three quarters full at `keys` distinct keys; the kernel hands out zeroed pages."""
    return np.zeros((4 * keys // (3 * SLOTS) + 1) * LINE, np.uint64)


def unique(keys, count, padded, table=False) -> tuple[torch.Tensor, ...]:
    """See `tritonrec.ops.unique`."""
    valid = keys[: num_valid(count, keys.numel())]
    inverse = torch.empty(valid.numel(), dtype=torch.int64, device="cpu")
    order, counts = _unique(valid.contiguous().numpy().view(np.uint64), inverse.numpy())
    results = torch.from_numpy(order.view(np.int64)), inverse, torch.from_numpy(counts)
    return pad_unique(*results, keys.numel(), padded, table)


def _unique(keys: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill `inverse`; return the distinct keys (uint64) in order of first occurrence and their counts."""
    order, secret = np.empty(len(keys), np.uint64), np.uint64(murmur.SECRET)
    table = _empty_table(min(len(keys), FIRST_KEYS))
    found = start = 0
    while True:
        found_before, start_before = found, start
        found, start = _count_keys(keys, inverse, order, table, found, start, secret)
        if start >= len(keys):
            break
        # New keys get rarer, so a quarter of the present rate is a fair guess for the rest; at least four
        # times larger, so that few moves are made, and never more than the input could fill.
        rest = len(keys) - start
        rate = (found - found_before) / (start - start_before)
        larger = _empty_table(found + min(rest, max(int(rate * rest / 4), 3 * found) + BLOCK))
        _refill(table, larger, secret)
        table = larger
    counts = np.empty(found, np.int64)
    _read_counts(table, counts)
    return order[:found].copy(), counts
