"""Freed host memory stays with the process, because each step allocates the same buffers again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT = 1 << 30
_MOST_FOR_MMAP = 32 << 20  # glibc refuses a larger one


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory at the end of each heap; nothing happens elsewhere.

    By default glibc returns the end of a heap to the kernel once it is larger than twice the largest freed
    block. The buffers of a training step are then unmapped and zeroed again by page faults in every step:
    up to a tenth of a small step's time, depending on the order in which blocks are freed. For processes
    that belong to tritonrec: its commands and the ranks of a `RankPool`.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _MOST_FOR_MMAP)
            mallopt(_M_TRIM_THRESHOLD, _KEPT)
