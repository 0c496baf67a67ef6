# mypy: ignore-errors
"""Reads and writes of rows in a file, and the choice of rows that leave memory for it."""

import numpy as np
from numba import types

from ..kernels.caches import njit

MOST_USES = 3
"""Uses of a row that are counted; more would keep rows for long that were used much once."""

_pread = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))
_pwrite = types.ExternalFunction("pwrite", types.intp(types.intc, types.uintp, types.uintp, types.int64))


_fadvise = types.ExternalFunction(
    "posix_fadvise", types.intc(types.intc, types.int64, types.int64, types.intc)
)
_WILLNEED = 3  # of POSIX_FADV_*, on Linux


@njit(cache=True, nogil=True)
def announce(file, rows, size):
    """Begin to read the pages of the rows (K,) of `size` bytes, all at once: a disk has many queues, and a
    call that reads or changes a part of a page waits for it.
    """
    if len(rows) < 2:
        return
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or rows[end] != rows[end - 1] + 1:
            _fadvise(file, rows[start] * size, (end - start) * size, _WILLNEED)
            start = end


@njit(cache=True, nogil=True)
def move(write, file, rows, places, memory, size, start):
    """Copy rows from `start` on, of `size` bytes, between their number in the file, `rows`, and in memory,
    `places`, which begins at the address `memory`; returns the first that the system did not copy, or all.
    """
    while start < len(rows):
        end = start + 1  # rows that follow each other there and here are one call
        while end < len(rows) and rows[end] == rows[end - 1] + 1 and places[end] == places[end - 1] + 1:
            end += 1
        address, count = memory + np.uint64(places[start] * size), np.uint64((end - start) * size)
        if write:
            done = _pwrite(file, address, count, rows[start] * size)
        else:
            done = _pread(file, address, count, rows[start] * size)
        start += max(done, 0) // size
        if start < end:
            return start
    return start


@njit(cache=True, nogil=True)
def use(places, recent, uses, now):
    """Note the lookup `now` of the rows in memory at `places` (K,), -1 left out."""
    for place in places:
        if place >= 0:
            recent[place] = now
            uses[place] += uses[place] < MOST_USES


@njit(cache=True, nogil=True)
def choose(recent, uses, hand, before, chosen):
    """Choose places whose rows were not looked up since the lookup `before`, the hand of a clock going round;
    returns their number, at most ``len(chosen)``, and the hand. A place is passed over once for each use.
    """
    count = 0
    # After MOST_USES rounds every count is 0, so one more round finds all places that may be taken.
    for _ in range((MOST_USES + 1) * len(recent)):
        if count == len(chosen):
            break
        if recent[hand] < before:
            if uses[hand]:
                uses[hand] -= 1
            else:
                recent[hand] = before  # is not chosen again
                chosen[count] = hand
                count += 1
        hand = (hand + 1) % len(recent)
    return count, hand
