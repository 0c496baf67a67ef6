"""A rank's window: memory that the other ranks of its host write into (arXiv 2512.19342, section III-B).

A window is a file in memory (memfd_create(2)) that others open through /proc. It has no name, so nothing is
left behind, however its processes end. S slots, W ranks::

    STARTED        exchanges that the owner has started; the others read it
    SLEEPING       int32, 1 while the owner waits to be woken
    FAILED_CLAIMS  ranks that had a failure to report; the first of them writes `FAILED_TEXT`
    FAILED_STATE   0, and then `DISAGREED` or `DIED`
    END            bytes of the file
    ARRIVED        for each slot the number of puts that were made, from the first exchange on
    headers        for each slot and source one of `messages.HEADER` bytes
    rows           for each slot and source a room for rows; a larger one is added at the end when needed

Each counter has a cache line of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import weakref

import numpy as np

from ...distributed.machine import machine
from .messages import HEADER, NO_MESSAGE

LINE = 64
STARTED, SLEEPING, FAILED_STATE, FAILED_CLAIMS, FAILED_LENGTH, END = (LINE * place for place in range(6))
FAILED_TEXT, TEXT_BYTES = 6 * LINE, 1024
ARRIVED = FAILED_TEXT + TEXT_BYTES
DISAGREED, DIED = 1, 2


class Layout:
    """Places in the windows of `world_size` ranks: `slots`, each with `room` bytes for each source's rows."""

    def __init__(self, world_size: int, slots: int, room: int):
        self.world_size, self.slots = world_size, slots
        self.room = -(-room // LINE) * LINE
        self.heads = ARRIVED + LINE * slots
        self.rows = -(-(self.heads + HEADER * slots * world_size) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = self.rows + self.room * slots * world_size
        self.end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE

    def head(self, slot: int, source: int) -> int:
        """First byte of a header."""
        return self.heads + HEADER * (slot * self.world_size + source)

    def first_rows(self, slot: int, source: int) -> int:
        """First byte of the rows of a slot and source, before a larger room was needed."""
        return self.rows + self.room * (slot * self.world_size + source)


class Segment:
    """A part of a file, mapped into this process; `address` is valid while the object lives."""

    def __init__(self, file: int, size: int, offset: int = 0):
        self.memory = mmap.mmap(file, size, offset=offset)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def words(self, offset: int, count: int) -> np.ndarray:
        """A view of `count` int64 from a byte on."""
        return np.frombuffer(self.memory, np.int64, count, offset)


class Window:
    """The window of a rank, made here or opened.

    Args:
        layout: the same on all ranks. file: an open file of this process, closed with this object.
    """

    def __init__(self, layout: Layout, file: int):
        self.layout, self.file = layout, file
        self._closing = weakref.finalize(self, os.close, file)
        self.control = Segment(file, layout.end)
        self.address = self.control.address

    @classmethod
    def make(cls, layout: Layout) -> Window:
        """A new window, of zeros and without messages."""
        file = os.memfd_create("tritonrec window", os.MFD_CLOEXEC)
        os.ftruncate(file, layout.end)
        window = cls(layout, file)
        window.control.words(END, 1)[0] = layout.end
        heads = window.control.words(layout.heads, layout.slots * layout.world_size * HEADER // 8)
        # The first word of each header is the exchange's number.
        heads[:: HEADER // 8] = NO_MESSAGE
        return window

    @property
    def name(self) -> tuple[int, int, int]:
        """Numbers of process, file and inode, by which other processes open this window."""
        return os.getpid(), self.file, os.fstat(self.file).st_ino

    @classmethod
    def open(cls, layout: Layout, name: tuple[int, int, int]) -> Window:
        """Another process's window. Raises OSError where it is not there, or may not be opened."""
        process, file, inode = name
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        # The process may have closed the file and opened another one under its number.
        if os.fstat(opened).st_ino != inode:
            os.close(opened)
            raise FileNotFoundError(f"file {file} of process {process} is another one")
        return cls(layout, opened)

    def add_room(self, offset: int, size: int) -> Segment:
        """Extend the file to `size` bytes from `offset` on, and map them. Raises OSError without memory."""
        # Allocated now: memory that is missing raises here, and does not end a process by SIGBUS at its first
        # write.
        os.posix_fallocate(self.file, offset, size)
        return Segment(self.file, size, offset)

    def room(self, offset: int, size: int) -> Segment:
        """Map what another rank has added."""
        return Segment(self.file, size, offset)


class Process:
    """Another process of this host, which can be seen to end."""

    def __init__(self, number: int):
        # A handle of this very process: its number may have another owner later.
        self._handle = os.pidfd_open(number)
        self._closing = weakref.finalize(self, os.close, self._handle)
        self._poll = select.poll()
        self._poll.register(self._handle, select.POLLIN)

    @property
    def has_ended(self) -> bool:
        return bool(self._poll.poll(0))


def host_words() -> tuple[int, int]:
    """What ranks that can share memory have in common, as two int64; zeros where this host cannot.

    The machine, the space of process numbers, and the user.
    """
    try:
        from ...kernels.numba_atomics import FUTEX

        # Tried out, since each of memfd, /proc and pidfd may be missing or forbidden.
        own = Window.make(Layout(1, 1, 0))
        Window.open(own.layout, own.name)
        Process(os.getpid())
        name = f"{machine()} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
    except (OSError, AttributeError):  # no Linux of these years
        return 0, 0
    if not FUTEX:
        return 0, 0
    import hashlib

    first, second = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], np.int64).tolist()
    return first, second
