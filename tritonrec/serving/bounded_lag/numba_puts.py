# mypy: ignore-errors
"""Compiled puts into the windows of other ranks, and the wait for theirs; `window` has the layout.

A rank that waits looks at its counter `LOOKS` times, then gives way to other processes `TURNS` times, and
then sleeps until the last put of its exchange wakes it: more ranks than cores must not keep each other from
computing. It says so in `SLEEPING` first and looks once more, and a put counts first and looks there second.
So no put is missed.
"""

from __future__ import annotations

from ...kernels.caches import njit
from ...kernels.numba_atomics import (
    FUTEX,
    atomic_add,
    atomic_exchange32,
    atomic_load,
    atomic_store,
    copy_bytes,
    give_way,
    now,
    system_call,
)
from .messages import UNKNOWN
from .window import ARRIVED, FAILED_CLAIMS, FAILED_LENGTH, FAILED_STATE, FAILED_TEXT, LINE, SLEEPING, STARTED

LOOKS, TURNS = 200, 20
ALL_HERE, OVER, FAILED = 0, 1, 2
"""Outcomes of `wait_for`: every rank's rows are here, the time is over, a rank has reported a failure."""
_WAIT, _WAKE = 0, 1  # of futex(2)


@njit(cache=True, nogil=True)
def wake(window):
    """Wake the owner of the window where it sleeps."""
    # The exchange makes one waker of several: only it makes the system call.
    if atomic_exchange32(window + SLEEPING, 0) == 1:
        system_call(FUTEX, window + SLEEPING, _WAKE, 1, 0)


@njit(cache=True, nogil=True)
def report(window, kind, text, length):
    """Report a failure to the owner of the window, unless another rank has: `length` bytes at `text`."""
    if atomic_add(window + FAILED_CLAIMS, 1) == 0:
        # Text, then length, then state: who sees the state sees the text.
        copy_bytes(window + FAILED_TEXT, text, length)
        atomic_store(window + FAILED_LENGTH, length)
        atomic_store(window + FAILED_STATE, kind)
        wake(window)


@njit(cache=True, nogil=True)
def started(windows, counts):
    """Fill `counts` (W,) int64 with the exchanges that each rank has started."""
    for rank in range(len(windows)):
        counts[rank] = atomic_load(windows[rank] + STARTED)


@njit(cache=True, nogil=True)
def add(address, value):
    """Add atomically to the int64 at `address`; return its earlier value."""
    return atomic_add(address, value)


@njit(cache=True, nogil=True)
def put(rank, windows, heads, targets, source, starts, words, rows, expects, offsets, slot):
    """Write rows and header into each rank's window, this rank's own last, and count them as arrived.

    Args:
        windows: (W,) int64, addresses of the ranks' windows. heads, targets: (W,) int64, addresses of this
            rank's header and rows there; no rows are written where the target is 0.
        source: address of the rows. starts: (W + 1,) int64, first byte for each rank.
        words: number of the exchange, width, and the dtype's two words. rows, expects, offsets: (W,) int64 of
            the headers. slot: of the exchange.
    """
    world = len(windows)
    atomic_store(windows[rank] + STARTED, words[0] + 1)
    # Rank r begins with r + 1, so that not all write to one window at once; its own comes last.
    for step in range(1, world + 1):
        peer = (rank + step) % world
        if targets[peer] != 0:
            copy_bytes(targets[peer], source + starts[peer], starts[peer + 1] - starts[peer])
        head = heads[peer]
        atomic_store(head + 8, rows[peer])
        atomic_store(head + 16, words[1])
        atomic_store(head + 24, expects[peer])
        atomic_store(head + 32, words[2])
        atomic_store(head + 40, words[3])
        atomic_store(head + 48, offsets[peer])
        # The number of the exchange last: a header with this number is whole.
        atomic_store(head, words[0])
        arrived = atomic_add(windows[peer] + ARRIVED + LINE * slot, 1) + 1
        if arrived % world == 0:  # the last one of its exchange
            wake(windows[peer])


@njit(cache=True, nogil=True)
def wait_for(window, slot, target, nanoseconds, scratch):
    """Wait until `target` puts of this slot have been counted; ALL_HERE, OVER or FAILED.

    `scratch` is the address of 32 bytes of this thread.
    """
    counter = window + ARRIVED + LINE * slot
    for _ in range(LOOKS):
        if atomic_load(counter) >= target:
            return ALL_HERE
    for _ in range(TURNS):
        give_way()
        if atomic_load(counter) >= target:
            return ALL_HERE
    #     owner                          the last put
    #     SLEEPING = 1                   ARRIVED += 1
    #     look at ARRIVED                look at SLEEPING
    # Both write first and look second, and all is sequentially consistent: at least one sees the other.
    end = now(scratch) + nanoseconds
    while True:
        atomic_exchange32(window + SLEEPING, 1)
        if atomic_load(counter) >= target:
            atomic_exchange32(window + SLEEPING, 0)
            return ALL_HERE
        if atomic_load(window + FAILED_STATE) != 0:
            return FAILED
        left = end - now(scratch)
        if left <= 0:
            return OVER
        atomic_store(scratch + 16, left // 10**9)
        atomic_store(scratch + 24, left % 10**9)
        # The kernel sleeps only while SLEEPING is still 1: a wake between the look and the call is not lost.
        system_call(FUTEX, window + SLEEPING, _WAIT, 1, scratch + 16)


@njit(cache=True, nogil=True)
def look(window, slot, target):
    """As `wait_for`, without a wait."""
    if atomic_load(window + ARRIVED + LINE * slot) >= target:
        return ALL_HERE
    return FAILED if atomic_load(window + FAILED_STATE) != 0 else OVER


@njit(cache=True, nogil=True)
def compare(rank, heads, words, row_bytes, most, sent, expected, offsets, counts):
    """Read all headers: fill `counts`, and return the first rank whose header needs a look, or -1.

    Args:
        heads: (W,) int64, addresses of the headers. words: as for `put`, of the receiver.
        row_bytes, most: bytes of a row, and of rows that an exchange of unknown size may have.
        sent, expected: (W,) int64, rows to and from each rank. offsets: (W,) int64, where rows are expected.
    """
    for peer in range(len(heads)):
        head = heads[peer]
        number, rows, width = atomic_load(head), atomic_load(head + 8), atomic_load(head + 16)
        expects = atomic_load(head + 24)
        counts[peer] = rows
        same = number == words[0] and width == words[1]
        same = same and atomic_load(head + 32) == words[2] and atomic_load(head + 40) == words[3]
        if expected[peer] == UNKNOWN:
            same = same and (peer == rank or rows * row_bytes <= most)
        else:
            same = same and rows == expected[peer]
        if expects == UNKNOWN:
            same = same and (peer == rank or sent[peer] * row_bytes <= most)
        else:
            same = same and expects == sent[peer]
        if not same or atomic_load(head + 48) != offsets[peer]:
            return peer
    return -1


@njit(cache=True, nogil=True)
def take(out, sources, counts, row_bytes):
    """Copy the rows of every rank, from `sources` (W,) int64, one after the other to the address `out`.

    A rank whose source is 0 has its rows there already.
    """
    for peer in range(len(sources)):
        size = counts[peer] * row_bytes
        if sources[peer] != 0:
            copy_bytes(out, sources[peer], size)
        out += size
